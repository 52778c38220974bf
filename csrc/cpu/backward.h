// The backward, which computes the weights again from the log-sum-exp and its rounding error. With P = e^(S - lse) and
// delta = rowsum(dO * O) - dlse:
//     dV = P^T dO,    dS = P * (dO V^T - delta),    dQ = scale dS K,    dK = scale dS^T Q.
// Where weights are dropped, P in dV and dO V^T in dS are multiplied by the factors of the weights, 0 or kept_scale.
// A task owns a tile of keys and goes through the queries that see it, so it sums dK and dV by itself. All tasks of a
// kv head add to the dQ of its query heads, in the order of the key tiles (ordered.h).
#pragma once

#include "kept.h"
#include "ordered.h"
#include "scores.h"
#include "tasks.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Backward {
  using A = Accumulate<T>;
  using E = Packed<T>;
  using Element = std::conditional_t<kDepth<E> == 1, A, T>;  // E is kDepth of these
  using V = Vec<A>;
  using Block = DimBlock<E>;
  using Scores = PanelScores<A, Block::cols>;
  using Sums = OrderedSums<A>;

  static constexpr int64_t panel = Block::cols * V::lanes;  // queries per pass of the micro-kernel
  static constexpr int64_t tile_queries = 64, packed_queries = tile_queries / kDepth<E>;
  static constexpr int64_t tile_keys = 128, packed_keys = tile_keys / kDepth<E>;
  static_assert(tile_queries % panel == 0 && tile_queries % kBitsLanes == 0 && kMaxHeadDim % panel == 0);

  const AttentionBackwardParams& params;
  const AttentionParams& p = params.forward;
  // Row lengths of tiles: depth in packed elements, for products along head_dim; dim where head_dim lies in the lanes.
  const int64_t depth_padded = round_up(ceil_div(p.head_dim, kDepth<E>), 16);
  const int64_t depth_v_padded = round_up(ceil_div(p.head_dim_v, kDepth<E>), 16);
  const int64_t dim_padded = round_up(p.head_dim, panel), dim_v_padded = round_up(p.head_dim_v, panel);
  const int64_t rows = p.batch() * p.heads_q * p.rows_q;
  const int64_t seqlen_q = min(p.seqlen_q, p.rows_q);
  const int64_t query_tiles = ceil_div(seqlen_q, tile_queries);
  const int64_t key_tiles = max<int64_t>(1, ceil_div(p.seqlen_k, tile_keys));
  const bool plain_scores = p.plain_scores(), drops_weights = p.drops_weights();
  // Whether an element of the bias stands for several scores, so that its gradient is a sum.
  const bool bias_is_broadcast =
      params.grad_bias.data &&
      ((params.grad_bias.batch == 0 && p.sequences > 1) || (params.grad_bias.head == 0 && p.heads_q > 1) ||
       (params.grad_bias.row == 0 && p.rows_q > 1) || (params.grad_bias.dim == 0 && p.seqlen_k > 1));

  // Queries, output gradients, keys and values are packed for each product they are in: as rows or (transposed) columns
  // where it sums along head_dim, across the rows where it sums over queries or keys.
  struct Workspace {
    Arena arena;
    const Backward& b;
    E* q = arena.take<E>(tile_queries * b.depth_padded);                   // [tile_queries][depth_padded]
    E* q_columns = arena.take<E>(tile_queries * b.depth_padded);           // [depth_padded][tile_queries]
    E* q_across = arena.take<E>(packed_queries * b.dim_padded);            // [packed_queries][dim_padded]
    E* grad_out = arena.take<E>(tile_queries * b.depth_v_padded);          // [tile_queries][depth_v_padded]
    E* grad_out_columns = arena.take<E>(tile_queries * b.depth_v_padded);  // [depth_v_padded][tile_queries]
    E* grad_out_across = arena.take<E>(packed_queries * b.dim_v_padded);   // [packed_queries][dim_v_padded]
    E* k = arena.take<E>(tile_keys * b.depth_padded);                      // [tile_keys][depth_padded]
    E* k_across = arena.take<E>(packed_keys * b.dim_padded);               // [packed_keys][dim_padded]
    E* v = arena.take<E>(tile_keys * b.depth_v_padded);                    // [tile_keys][depth_v_padded]

    A* s = arena.take<A>(tile_keys * tile_queries);          // [tile_keys][tile_queries]
    A* grad_p = arena.take<A>(tile_keys * tile_queries);     // [tile_keys][tile_queries]
    A* grad_bias = arena.take<A>(tile_keys * tile_queries);  // [tile_keys][tile_queries]
    // [tile_keys][tile_queries]: the factor of a weight that is kept, 0 for one that is dropped
    A* factors = arena.take<A>(b.drops_weights ? tile_keys * tile_queries : 0);
    E* weights = arena.take<E>(tile_keys * packed_queries);  // [tile_keys][packed_queries]
    E* grad_s = arena.take<E>(tile_keys * packed_queries);   // [tile_keys][packed_queries]
    // [packed_keys][tile_queries]; grad_s itself where elements are not packed in pairs
    E* grad_s_across = kDepth<E> == 1 ? grad_s : arena.take<E>(packed_keys * tile_queries);
    A* lse = arena.take<A>(tile_queries);                 // [tile_queries]
    A* lse_error = arena.take<A>(tile_queries);           // [tile_queries]
    A* delta = arena.take<A>(tile_queries);               // [tile_queries]
    A* bias = arena.take<A>(Scores::bias_elements(b.p));  // [bias_elements], for Scores
    // [tile_keys][tile_queries]
    double* grad_bias_sums = arena.take<double>(b.bias_is_broadcast ? tile_keys * tile_queries : 0);

    A* grad_k = arena.take<A>(tile_keys * b.dim_padded);    // [tile_keys][dim_padded]
    A* grad_v = arena.take<A>(tile_keys * b.dim_v_padded);  // [tile_keys][dim_v_padded]
  };
  // What all tasks share.
  struct Shared {
    Arena arena;
    const Backward& b;
    int64_t workers;
    A* delta = arena.take<A>(b.rows);  // [batch][heads_q][rows_q]
    // dQ: a sum per kv head, [heads that share it][seqlen_q][dim_padded]. Its parts are tiles of queries.
    Sums grad_q{arena, b.p.sequences * b.p.heads_kv, b.key_tiles, b.p.group() * b.seqlen_q * b.dim_padded, workers};
  };
  // A tile of keys, against tiles of queries.
  struct KeyTile {
    Sequence sequence;
    int64_t b, kv_head, j0, keys;
  };
  struct QueryTile {
    Visibility visible;
    int64_t h, i, queries;
    KeyRange keys;  // of the tile of keys, from the first to the last that any of the queries sees
  };

  Workspace workspace(char* memory) const { return {Arena(memory), *this}; }
  Shared shared(char* memory, int64_t workers) const { return {Arena(memory), *this, workers}; }
  int64_t workspace_bytes() const { return workspace(nullptr).arena.bytes(); }

 public:
  explicit Backward(const AttentionBackwardParams& params) : params(params) {}

  int64_t scratch_bytes(int64_t workers) const {
    return workers * workspace_bytes() + shared(nullptr, workers).arena.bytes();
  }

  void run(char* scratch, const Runner& runner) const {
    const int64_t bytes = workspace_bytes();
    Shared all = shared(scratch + runner.workers * bytes, runner.workers);
    all.grad_q.reset();
    for_each_row(runner, rows, [&](int64_t row) { all.delta[row] = delta_of_row(row); });
    runner.run(all.grad_q.count(), [&](int64_t worker, int64_t index) {
      run_task(all.grad_q[index], workspace(scratch + worker * bytes), all);
    });
    if (bias_is_broadcast)
      runner.run(bias_tiles(), [&](int64_t worker, int64_t index) {
        sum_grad_bias(index, workspace(scratch + worker * bytes), all);
      });
    if (params.grad_sinks) runner.run(p.heads_q, [&](int64_t, int64_t h) { sum_grad_sink(h, all); });
  }

 private:
  A delta_of_row(int64_t row) const {
    const int64_t b = row / p.rows_q / p.heads_q, h = row / p.rows_q % p.heads_q, i = row % p.rows_q;
    A delta = 0;
    if (params.grad_out.data) {
      A out[kMaxHeadDim], grad_out[kMaxHeadDim];
      widen(at<T>(p.out, b, h, i), p.out.dim, p.head_dim_v, dim_v_padded, out);
      widen(at<T>(params.grad_out, b, h, i), params.grad_out.dim, p.head_dim_v, dim_v_padded, grad_out);
      V sums(0);
      for (int64_t d = 0; d < dim_v_padded; d += V::lanes) sums = fma(V::load(out + d), V::load(grad_out + d), sums);
      delta += sums.fold([](A a, A b) { return a + b; });
    }
    if (params.grad_lse.data) delta -= *at<A>(params.grad_lse, b, h, i);
    return is_empty(*at<A>(p.lse, b, h, i)) ? A(0) : delta;
  }
  A error_of_lse(int64_t b, int64_t h, int64_t row) const {
    return p.lse_error.data ? *at<A>(p.lse_error, b, h, row) : A(0);
  }
  static bool is_empty(A lse) { return from_lse(lse).l == A(0); }

  // One tile of keys against all queries that see it.
  void run_task(typename Sums::Task task, const Workspace& w, Shared& all) const {
    A* grad_q = all.grad_q.begin(task);  // [heads that share the kv head][seqlen_q][dim_padded]
    const KeyTile t = key_tile(task.sum / p.heads_kv, task.sum % p.heads_kv, task.task * tile_keys);
    const Band& band = t.sequence.band;
    const int64_t first_query = band.first_query(t.j0),
                  end_query = min(t.sequence.q_len, band.end_query(t.j0 + t.keys));
    if (t.keys > 0) {
      bool packed = false;  // once some query sees the keys; until then their gradient is 0, as it was allocated
      for (int64_t g = 0; g < p.group(); g++)
        for (int64_t tile = first_query / tile_queries; max(first_query, tile * tile_queries) < end_query; tile++) {
          const QueryTile q = query_tile(t, t.kv_head * p.group() + g, tile);
          if (q.keys.count() <= 0) continue;
          if (!packed) pack_keys(t, w);
          packed = true;
          pack_queries(t, q, w, all);
          multiply_scores(q, w);
          weigh_tile(t, q, w);
          if (params.grad_bias.data && !bias_is_broadcast) store_grad_bias(t, q, w);
          add_grad_keys(q, w);
          all.grad_q.in_turn(task, g * query_tiles + tile,
                             [&] { add_grad_queries(q, w, grad_q + (g * seqlen_q + q.i) * dim_padded); });
        }
      if (packed) store_grad_keys(t, w);
    }
    all.grad_q.end(task, [&] { store_grad_queries(t, grad_q); });
  }

  // The keys from j0 on.
  KeyTile key_tile(int64_t b, int64_t kv_head, int64_t j0) const {
    const Sequence s = sequence(p, b);
    return {s, b, kv_head, j0, min(tile_keys, s.band.kv_len - j0)};
  }
  // Those keys of the same sequence that lie in a tile of the bias.
  KeyTile key_tile_of_bias(int64_t b, int64_t kv_head, int64_t tile) const {
    const Sequence s = sequence(p, b);
    const int64_t begin = tile * tile_keys - s.first_key, j0 = max<int64_t>(begin, 0);
    return {s, b, kv_head, j0, min(begin + tile_keys, s.band.kv_len) - j0};
  }
  QueryTile query_tile(const KeyTile& t, int64_t h, int64_t tile) const {
    const int64_t i = tile * tile_queries, queries = min(tile_queries, t.sequence.q_len - i);
    const Visibility visible = visibility(p, t.sequence, t.b, h);
    return {visible, h, i, queries, KeyRange{0, t.keys}.seen(visible, i, i + queries, t.j0)};
  }

  // The elements of packed rows.
  static Rows<Element> elements(const E* rows, int64_t stride) {
    return {reinterpret_cast<const Element*>(rows), kDepth<E> * stride, 1};
  }

  void pack_keys(const KeyTile& t, const Workspace& w) const {
    const Sequence& s = t.sequence;
    const int64_t padded = round_up(t.keys, kRows);
    pack(key_rows<T>(p, p.key, s, t.b, t.kv_head), t.j0, t.keys, padded, p.head_dim, depth_padded, w.k);
    pack(key_rows<T>(p, p.value, s, t.b, t.kv_head), t.j0, t.keys, padded, p.head_dim_v, depth_v_padded, w.v);
    pack_across(elements(w.k, depth_padded), 0, t.keys, p.head_dim, dim_padded, w.k_across);
    make_finite(w.k_across, ceil_div(t.keys, kDepth<E>) * dim_padded);
    std::memset(static_cast<void*>(w.grad_k), 0, tile_keys * dim_padded * sizeof(A));
    std::memset(static_cast<void*>(w.grad_v), 0, tile_keys * dim_v_padded * sizeof(A));
  }

  // Packs queries and output gradients. Empty rows are packed as 0, so what they hold has no effect.
  void pack_queries(const KeyTile& t, const QueryTile& q, const Workspace& w, const Shared& all) const {
    const Sequence& s = t.sequence;
    pack(query_rows<T>(p.query, s, q.h), q.i, q.queries, tile_queries, p.head_dim, depth_padded, w.q);
    if (params.grad_out.data)
      pack(query_rows<T>(params.grad_out, s, q.h), q.i, q.queries, tile_queries, p.head_dim_v, depth_v_padded,
           w.grad_out);
    else
      std::memset(static_cast<void*>(w.grad_out), 0, tile_queries * depth_v_padded * sizeof(E));
    const A* delta = all.delta + (s.q_batch * p.heads_q + q.h) * p.rows_q + s.q_row + q.i;
    for (int64_t r = 0; r < tile_queries; r++) {
      const bool exists = r < q.queries;
      const int64_t row = s.q_row + q.i + r;
      w.lse[r] = exists ? *at<A>(p.lse, s.q_batch, q.h, row) : A(0);
      w.lse_error[r] = exists ? error_of_lse(s.q_batch, q.h, row) : A(0);
      w.delta[r] = exists ? delta[r] : A(0);
      if (!is_empty(w.lse[r])) continue;
      std::memset(static_cast<void*>(w.q + r * depth_padded), 0, depth_padded * sizeof(E));
      std::memset(static_cast<void*>(w.grad_out + r * depth_v_padded), 0, depth_v_padded * sizeof(E));
    }
    transpose(w.q, depth_padded, tile_queries, depth_padded, w.q_columns, tile_queries);
    transpose(w.grad_out, depth_v_padded, tile_queries, depth_v_padded, w.grad_out_columns, tile_queries);
    pack_across(elements(w.q, depth_padded), 0, q.queries, p.head_dim, dim_padded, w.q_across);
    pack_across(elements(w.grad_out, depth_v_padded), 0, q.queries, p.head_dim_v, dim_v_padded, w.grad_out_across);
    make_finite(w.q_across, ceil_div(q.queries, kDepth<E>) * dim_padded);
  }

  // S^T = K Q^T (before the scale) and dP^T = V dO^T
  void multiply_scores(const QueryTile& q, const Workspace& w) const {
    if (takes_decode(p))
      decode_scores(q, w);
    else
      set_product(w.k, depth_padded, w.q_columns, q.keys, ceil_div(p.head_dim, kDepth<E>), w.s);
    set_product(w.v, depth_v_padded, w.grad_out_columns, q.keys, ceil_div(p.head_dim_v, kDepth<E>), w.grad_p);
  }

  // The same scores, each summed in the order of the decode kernel, which computed lse. In another order a score of 100
  // differs by 1e-5, and P by as much.
  void decode_scores(const QueryTile& q, const Workspace& w) const {
    const Element* k_rows[tile_keys + kRowsAhead];
    for (int64_t j = q.keys.begin; j < q.keys.end; j++) k_rows[j] = elements(w.k, depth_padded)[j];
    repeat_last(k_rows, q.keys.end);
    for (int64_t r = 0; r < q.queries; r++) {
      A s[tile_keys + V::lanes];
      for (int64_t j = q.keys.begin; j < q.keys.end; j += V::lanes)
        dots<1>(k_rows + j, w.q + r * depth_padded, depth_padded, p.head_dim, s + j, tile_keys);
      for (int64_t j = q.keys.begin; j < q.keys.end; j++) w.s[j * tile_queries + r] = s[j];
    }
    for (int64_t j = q.keys.begin; j < q.keys.end; j++)
      std::fill(w.s + j * tile_queries + q.queries, w.s + (j + 1) * tile_queries, A(0));
  }

  // P^T and dS^T
  void weigh_tile(const KeyTile& t, const QueryTile& q, const Workspace& w) const {
    if (drops_weights)
      find_factors(p, t.b, q.h, q.i, tile_queries, t.j0 + q.keys.begin, q.keys.count(),
                   w.factors + q.keys.begin * tile_queries);
    for (int64_t column = 0; column < q.queries; column += panel) {
      const int64_t i = q.i + column, queries = min(panel, q.queries - column);
      Scores score(score_of<A>(p, t.b, q.h), p, q.visible, t.b, q.h, i, queries, t.j0, t.keys, w.bias);
      const Verdict verdict = q.visible.verdict(i, i + queries, t.j0 + q.keys.begin, t.j0 + q.keys.end);
      if (plain_scores && !drops_weights && queries == panel && verdict == Verdict::full)
        weigh_panel<false, false>(score, column, q.keys, w);
      else if (!drops_weights)
        weigh_panel<true, false>(score, column, q.keys, w);
      else
        weigh_panel<true, true>(score, column, q.keys, w);
    }
  }

  // The same for the panel of queries that begins at `column` of the tile. masked: scores may be hidden or not plain.
  // drops: weights are dropped.
  template <bool masked, bool drops>
  HOT void weigh_panel(const Scores& score, int64_t column, KeyRange keys, const Workspace& w) const {
    const V scale(p.scale);
    unroll<Block::cols>([&](auto c) {
      const int64_t lane = column + c * V::lanes;
      const V lse = V::load(w.lse + lane), lse_error = V::load(w.lse_error + lane), delta = V::load(w.delta + lane);
      auto weigh_key = [&](int64_t j) {
        const int64_t at = j * tile_queries + lane;
        V dot = V::load(w.s + at), grad_p = V::load(w.grad_p + at);
        V content = masked ? score.content(dot) : dot * scale;
        V s = masked ? score(j, c, content) : content;
        V p = weight_from_lse(s, lse, lse_error);
        const V factor = drops ? V::load(w.factors + at) : V(1);
        if (drops) grad_p = select(factor == V(0), V(0), grad_p * factor);
        V grad_s = p * (grad_p - delta);
        if (masked) {  // by selection: a hidden key has weight 0 even in a row whose lse is NaN
          auto hidden = s == V(kHidden);
          p = select(hidden, V(0), p);
          select(hidden, V(0), grad_s).store(w.grad_bias + at);
          grad_s = select(hidden, V(0), grad_s * score.content_slope(content));
        }
        if (drops) p = select(factor == V(0), V(0), p);
        store(p, reinterpret_cast<Element*>(w.weights) + at);
        store(grad_s, reinterpret_cast<Element*>(w.grad_s) + at);
        return grad_s;
      };
      if constexpr (kDepth<E> == 1)
        for (int64_t j = keys.begin; j < keys.end; j++) weigh_key(j);
      else
        for (int64_t j = keys.begin; j < keys.end; j += 2) {
          V low = weigh_key(j);
          store_pairs(low, j + 1 < keys.end ? weigh_key(j + 1) : V(0), w.grad_s_across + j / 2 * tile_queries + lane);
        }
    });
  }

  // dV += P^T dO and dK += dS^T Q
  void add_grad_keys(const QueryTile& q, const Workspace& w) const {
    const int64_t begin = q.keys.begin, depth = ceil_div(q.queries, kDepth<E>);
    add_product(Left<E>{w.weights + begin * packed_queries, packed_queries, 1}, w.grad_out_across, dim_v_padded,
                q.keys.count(), p.head_dim_v, depth, w.grad_v + begin * dim_v_padded);
    add_product(Left<E>{w.grad_s + begin * packed_queries, packed_queries, 1}, w.q_across, dim_padded, q.keys.count(),
                p.head_dim, depth, w.grad_k + begin * dim_padded);
  }
  // dQ += dS K
  void add_grad_queries(const QueryTile& q, const Workspace& w, A* grad_q) const {
    const int64_t begin = q.keys.begin / kDepth<E>;
    add_product(Left<E>{w.grad_s_across + begin * tile_queries, 1, tile_queries}, w.k_across + begin * dim_padded,
                dim_padded, q.queries, p.head_dim, ceil_div(q.keys.count(), kDepth<E>), grad_q);
  }

  // to [tile_keys][tile_queries] = the packed keys or values, times columns
  static void set_product(const E* packed, int64_t stride, const E* columns, KeyRange keys, int64_t depth, A* to) {
    multiply<Block>(Left<E>{packed + keys.begin * stride, stride, 1}, columns, tile_queries, keys.count(), tile_queries,
                    depth, to + keys.begin * tile_queries, tile_queries, Set());
  }
  // to [rows][stride] += a b
  static void add_product(Left<E> a, const E* b, int64_t stride, int64_t rows, int64_t cols, int64_t depth, A* to) {
    multiply<Block>(a, b, stride, rows, cols, depth, to, stride, Add());
  }

  void store_grad_keys(const KeyTile& t, const Workspace& w) const {
    for (int64_t j = 0; j < t.keys; j++) {
      const int64_t row = t.sequence.k_row + t.j0 + j;
      narrow(w.grad_k + j * dim_padded, A(p.scale), p.head_dim,
             at<T>(params.grad_key, t.sequence.k_batch, t.kv_head, row), params.grad_key.dim);
      narrow(w.grad_v + j * dim_v_padded, p.kept_scale<A>(), p.head_dim_v,
             at<T>(params.grad_value, t.sequence.k_batch, t.kv_head, row), params.grad_value.dim);
    }
  }
  void store_grad_queries(const KeyTile& t, const A* grad_q) const {
    for (int64_t g = 0; g < p.group(); g++)
      for (int64_t i = 0; i < t.sequence.q_len; i++) {
        const int64_t h = t.kv_head * p.group() + g, row = t.sequence.q_row + i;
        narrow(grad_q + (g * seqlen_q + i) * dim_padded, A(p.scale), p.head_dim,
               at<T>(params.grad_query, t.sequence.q_batch, h, row), params.grad_query.dim);
      }
  }
  void store_grad_bias(const KeyTile& t, const QueryTile& q, const Workspace& w) const {
    for (int64_t r = 0; r < q.queries; r++)
      for (int64_t j = q.keys.begin; j < q.keys.end; j++)
        at<A>(params.grad_bias, t.b, q.h, q.i + r)[(t.sequence.first_key + t.j0 + j) * params.grad_bias.dim] =
            w.grad_bias[j * tile_queries + r];
  }

  // The gradient of a broadcast bias has one tile along an axis that is broadcast.
  int64_t bias_tiles() const {
    const Tensor4& x = params.grad_bias;
    return (x.batch ? p.sequences : 1) * (x.head ? p.heads_q : 1) * (x.row ? query_tiles : 1) * (x.dim ? key_tiles : 1);
  }
  // Each task owns one tile of the gradient of the bias and computes all tiles of scores that share it once more, in order. So
  // the order of the sum is fixed, and no matrix of scores is stored.
  void sum_grad_bias(int64_t index, const Workspace& w, const Shared& all) const {
    const Tensor4& x = params.grad_bias;
    struct Range {
      int64_t begin, end;
    };
    auto along = [&](int64_t stride, int64_t count) {
      if (stride == 0) return Range{0, count};
      const int64_t own = index % count;
      index /= count;
      return Range{own, own + 1};
    };
    const Range bs = along(x.batch, p.sequences), heads = along(x.head, p.heads_q);
    const Range q_tiles = along(x.row, query_tiles), k_tiles = along(x.dim, key_tiles);

    std::fill_n(w.grad_bias_sums, tile_keys * tile_queries, 0.0);
    for (int64_t b = bs.begin; b < bs.end; b++)
      for (int64_t h = heads.begin; h < heads.end; h++)
        for (int64_t k_tile = k_tiles.begin; k_tile < k_tiles.end; k_tile++) {
          const KeyTile t = key_tile_of_bias(b, h / p.group(), k_tile);
          if (t.keys <= 0) continue;
          const int64_t column = t.sequence.first_key + t.j0 - k_tile * tile_keys;  // of the tile's first key
          pack_keys(t, w);
          for (int64_t q_tile = q_tiles.begin; q_tile < q_tiles.end; q_tile++) {
            const QueryTile q = query_tile(t, h, q_tile);
            if (q.queries <= 0 || q.keys.count() <= 0) continue;
            pack_queries(t, q, w, all);
            multiply_scores(q, w);
            weigh_tile(t, q, w);
            for (int64_t j = q.keys.begin; j < q.keys.end; j++)
              for (int64_t r = 0; r < q.queries; r++)
                w.grad_bias_sums[(column + j) * tile_queries + r] += w.grad_bias[j * tile_queries + r];
          }
        }

    const int64_t i0 = q_tiles.begin * tile_queries, j0 = k_tiles.begin * tile_keys;
    const int64_t queries = min(tile_queries, seqlen_q - i0), keys = min(tile_keys, p.seqlen_k - j0);
    const int64_t each_query = x.row ? 1 : queries, each_key = x.dim ? 1 : keys;  // summed into one element
    for (int64_t j = 0; j < keys; j += each_key)
      for (int64_t r = 0; r < queries; r += each_query) {
        double sum = 0;
        for (int64_t key = j; key < j + each_key; key++)
          for (int64_t query = r; query < r + each_query; query++) sum += w.grad_bias_sums[key * tile_queries + query];
        at<A>(x, bs.begin, heads.begin, i0 + r)[(j0 + j) * x.dim] = A(sum);
      }
  }

  // A sink is a key whose value is 0: its gradient is its dS, summed over all rows of its head.
  void sum_grad_sink(int64_t h, const Shared& all) const {
    double sum = 0;
    for (int64_t b = 0; b < p.batch(); b++)
      for (int64_t i = 0; i < p.rows_q; i++) {
        if (is_empty(*at<A>(p.lse, b, h, i))) continue;  // no query, by q_lens
        const A weight = weight_from_lse(p.sinks.at<A>(h), *at<A>(p.lse, b, h, i), error_of_lse(b, h, i));
        sum -= weight * all.delta[(b * p.heads_q + h) * p.rows_q + i];
      }
    static_cast<A*>(params.grad_sinks)[h] = A(sum);
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
