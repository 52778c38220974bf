// Backward from the log-sum-exp. With P = e^(S - lse) and delta = rowsum(dO * O) - dlse:
//     dV = P^T dO,    dS = P * (dO V^T - delta),    dQ = scale dS K,    dK = scale dS^T Q.
// A task owns a tile of keys and goes through the queries that see it, so dK and dV are its own. Each tile of dQ takes
// its addends in the order of the key tiles: a task waits until the one before has passed, whoever runs it. Hence the
// same bits for any number of threads. Tasks are taken in order, so whoever is waited for has started.
#pragma once

#include <atomic>
#include <thread>

#include "scores.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Backward {
  using A = Accumulate<T>;
  using E = Packed<T>;
  using Element = std::conditional_t<kDepth<E> == 1, A, T>;  // that E is made of
  using V = Vec<A>;
  using Block = DimBlock<E>;

  static constexpr int64_t group = Block::cols * V::lanes;
  static constexpr int64_t tile_queries = 64, tile_keys = 128;
  static_assert(tile_queries % group == 0);

  // A tile of a tensor, as the products need it.
  struct Tile {
    E* rows;     // [tile][depth], for products along head_dim
    E* columns;  // [depth][tile], the same transposed
    E* across;   // [tile / kDepth][width], for products across the rows
  };
  struct Workspace {
    Tile q, grad_o, k, v;
    A *s, *grad_p, *grad_bias;  // [tile_keys][tile_queries]
    E *p, *ds;                  // [tile_keys][tile_queries / kDepth]
    E* ds_across;               // [tile_keys / kDepth][tile_queries]
    A *grad_k, *grad_v;         // [tile_keys][width], [tile_keys][width_v]
    A *lse, *delta, *mask;      // [tile_queries], [tile_queries]
  };
  // Of the whole call. The kv heads that are under way take the slots in turn.
  struct Shared {
    A* delta;                        // [batch, heads_q, rows_q]
    A* grad_q;                       // [slots][query heads of a kv head][seqlen_q][width]
    std::atomic<int64_t>* turn;      // [slots], how many kv heads have left the slot
    std::atomic<int64_t>* progress;  // [kv heads][key_tiles], how many items a task has done
  };
  struct Row {
    int64_t b, h, i;
  };

  const AttentionGradParams& grad;
  const AttentionParams& p = grad.forward;
  const int64_t depth = round_up(ceil_div(p.head_dim, kDepth<E>), 16),
                depth_v = round_up(ceil_div(p.head_dim_v, kDepth<E>), 16);
  const int64_t width = round_up(p.head_dim, group), width_v = round_up(p.head_dim_v, group);
  const int64_t batch = p.batch();
  const int64_t rows = batch * p.heads_q * p.rows_q;
  const int64_t seqlen_q = min(p.seqlen_q, p.rows_q);
  const int64_t query_tiles = ceil_div(seqlen_q, tile_queries);
  const int64_t key_tiles = max<int64_t>(1, ceil_div(p.seqlen_k, tile_keys));
  const int64_t kv_heads = p.sequences * p.heads_kv;
  const int64_t tasks = kv_heads * key_tiles;
  const bool plain = p.plain_scores();

  Workspace take_workspace(Arena& arena) const {
    auto tile = [&](int64_t rows, int64_t depth, int64_t width) {
      return Tile{arena.take<E>(rows * depth), arena.take<E>(rows * depth), arena.take<E>(rows * width)};
    };
    auto scores = [&](auto element) { return arena.take<decltype(element)>(tile_keys * tile_queries); };
    Workspace w;
    w.q = tile(tile_queries, depth, width);
    w.grad_o = tile(tile_queries, depth_v, width_v);
    w.k = tile(tile_keys, depth, width);
    w.v = tile(tile_keys, depth_v, width_v);
    for (A** x : {&w.s, &w.grad_p, &w.grad_bias}) *x = scores(A());
    for (E** x : {&w.p, &w.ds, &w.ds_across}) *x = scores(E());
    w.grad_k = arena.take<A>(tile_keys * width);
    w.grad_v = arena.take<A>(tile_keys * width_v);
    for (A** x : {&w.lse, &w.delta}) *x = arena.take<A>(tile_queries);
    w.mask = arena.take<A>(p.mask.data ? GroupScores<A, Block::cols>::mask_elements : 0);
    return w;
  }
  int64_t slots(int64_t workers) const { return min(2 * workers, kv_heads); }
  // Heads go side by side, a slot each, tile after tile: a task seldom waits for the one before it.
  int64_t task_at(int64_t index, int64_t slots) const {
    const int64_t block = index / (slots * key_tiles), rest = index % (slots * key_tiles);
    const int64_t heads = min(slots, kv_heads - block * slots);
    return (block * slots + rest % heads) * key_tiles + rest / heads;
  }
  Shared take_shared(Arena& arena, int64_t slots) const {
    return {arena.take<A>(rows), arena.take<A>(slots * p.group() * seqlen_q * width),
            arena.take<std::atomic<int64_t>>(slots), arena.take<std::atomic<int64_t>>(tasks)};
  }
  int64_t workspace_bytes() const {
    return Arena::bytes_of([&](Arena& arena) { take_workspace(arena); });
  }

  Row row(int64_t r) const {
    int64_t bh = r / p.rows_q;
    return {bh / p.heads_q, bh % p.heads_q, r % p.rows_q};
  }

  void find_delta(int64_t r, const Workspace& w, const Shared& shared) const {
    Row at_row = row(r);
    A delta = 0;
    if (grad.grad_out.data) {
      A *o = w.grad_k, *grad_o = w.grad_v;
      widen(at<T>(p.out, at_row.b, at_row.h, at_row.i), p.out.dim, p.head_dim_v, width_v, o);
      widen(at<T>(grad.grad_out, at_row.b, at_row.h, at_row.i), grad.grad_out.dim, p.head_dim_v, width_v, grad_o);
      V sums(0);
      for (int64_t d = 0; d < width_v; d += V::lanes) sums = sums + V::load(o + d) * V::load(grad_o + d);
      for (int lane = 0; lane < V::lanes; lane++) delta += sums.v[lane];
    }
    if (grad.grad_lse.data) delta -= *at<A>(grad.grad_lse, at_row.b, at_row.h, at_row.i);
    shared.delta[r] = from_lse(*at<A>(p.lse, at_row.b, at_row.h, at_row.i)).l == A(0) ? A(0) : delta;
  }

  Rows<Element> elements(const E* rows, int64_t depth) const {
    return {reinterpret_cast<const Element*>(rows), kDepth<E> * depth, 1};
  }

  // Queries [i, i + n) of a head. An empty row takes no part, whatever it and its gradient hold.
  void pack_queries(const Sequence& s, int64_t h, int64_t i, int64_t n, const Workspace& w,
                    const Shared& shared) const {
    pack(query_rows<T>(p.query, s, h), i, n, tile_queries, p.head_dim, depth, w.q.rows);
    if (grad.grad_out.data)
      pack(query_rows<T>(grad.grad_out, s, h), i, n, tile_queries, p.head_dim_v, depth_v, w.grad_o.rows);
    else
      std::memset(static_cast<void*>(w.grad_o.rows), 0, tile_queries * depth_v * sizeof(E));
    int64_t r = (s.q_batch * p.heads_q + h) * p.rows_q + s.q_row + i;
    for (int64_t q = 0; q < tile_queries; q++) {
      w.lse[q] = q < n ? *at<A>(p.lse, s.q_batch, h, s.q_row + i + q) : A(0);
      w.delta[q] = q < n ? shared.delta[r + q] : A(0);
      if (from_lse(w.lse[q]).l != A(0)) continue;
      std::memset(static_cast<void*>(w.q.rows + q * depth), 0, depth * sizeof(E));
      std::memset(static_cast<void*>(w.grad_o.rows + q * depth_v), 0, depth_v * sizeof(E));
    }
    transpose(w.q.rows, depth, tile_queries, depth, w.q.columns, tile_queries);
    transpose(w.grad_o.rows, depth_v, tile_queries, depth_v, w.grad_o.columns, tile_queries);
    pack_across(elements(w.q.rows, depth), 0, n, p.head_dim, width, w.q.across);
    pack_across(elements(w.grad_o.rows, depth_v), 0, n, p.head_dim_v, width_v, w.grad_o.across);
    make_finite(w.q.across, ceil_div(n, kDepth<E>) * width);
  }

  // P and dS of one group of queries; column is the group's place in the tile.
  template <bool masked>
  HOT void weigh(const GroupScores<A, Block::cols>& score, int64_t column, KeyRange keys, const Workspace& w) const {
    const V scale(p.scale);
    unroll<Block::cols>([&](auto c) {
      const int64_t lane = column + c * V::lanes;
      const V lse = V::load(w.lse + lane), delta = V::load(w.delta + lane);
      auto weigh_key = [&](int64_t j) {
        const int64_t at = j * tile_queries + lane;
        V dot = V::load(w.s + at), grad_p = V::load(w.grad_p + at);
        V content = masked ? score.content(dot) : dot * scale;
        V s = masked ? score(j, c, content) : content;
        V p = weight(s, lse);
        V ds = p * (grad_p - delta);
        if (masked) {  // by selection: a hidden key of a row whose lse is NaN has weight 0 all the same
          auto hidden = s == V(kHidden);
          p = select(hidden, V(0), p);
          select(hidden, V(0), ds).store(w.grad_bias + at);
          ds = select(hidden, V(0), ds * score.content_slope(content));
        }
        store(p, reinterpret_cast<Element*>(w.p) + at);
        store(ds, reinterpret_cast<Element*>(w.ds) + at);
        return ds;
      };
      if constexpr (kDepth<E> == 1)
        for (int64_t j = keys.begin; j < keys.end; j++) weigh_key(j);
      else
        for (int64_t j = keys.begin; j < keys.end; j += 2) {
          V low = weigh_key(j);
          store_pairs(low, j + 1 < keys.end ? weigh_key(j + 1) : V(0), w.ds_across + j / 2 * tile_queries + lane);
        }
    });
  }

  static void wait_for(const std::atomic<int64_t>& count, int64_t wanted) {
    while (count.load(std::memory_order_acquire) < wanted) std::this_thread::yield();
  }

  void run_task(int64_t task, const Workspace& w, const Shared& shared, int64_t slots) const {
    const int64_t tile = task % key_tiles, head = task / key_tiles;
    const int64_t slot_size = p.group() * seqlen_q * width;
    A* grad_q = shared.grad_q + head % slots * slot_size;
    std::atomic<int64_t>& turn = shared.turn[head % slots];
    if (tile == 0) {
      wait_for(turn, head / slots);
      std::memset(static_cast<void*>(grad_q), 0, slot_size * sizeof(A));
    }
    run_tile(task, w, shared, grad_q);
    if (tile > 0) wait_for(shared.progress[task - 1], INT64_MAX);
    if (tile == key_tiles - 1) {
      store_grad_q(head, grad_q);
      turn.store(head / slots + 1, std::memory_order_release);
    }
    shared.progress[task].store(INT64_MAX, std::memory_order_release);
  }

  void store_grad_q(int64_t head, const A* grad_q) const {
    Sequence s = sequence(p, head / p.heads_kv);
    for (int64_t g = 0; g < p.group(); g++)
      for (int64_t i = 0; i < s.q_len; i++) {
        int64_t h = head % p.heads_kv * p.group() + g;
        narrow(grad_q + (g * seqlen_q + i) * width, A(p.scale), p.head_dim,
               at<T>(grad.grad_query, s.q_batch, h, s.q_row + i), grad.grad_query.dim);
      }
  }

  void run_tile(int64_t task, const Workspace& w, const Shared& shared, A* grad_q) const {
    int64_t tile = task % key_tiles, kv_head = task / key_tiles % p.heads_kv, b = task / key_tiles / p.heads_kv;
    Sequence s = sequence(p, b);
    int64_t j0 = tile * tile_keys, n = min(tile_keys, s.band.kv_len - j0);
    if (n <= 0) return;
    Rows<T> keys = key_rows<T>(p, p.key, s, b, kv_head), values = key_rows<T>(p, p.value, s, b, kv_head);
    pack(keys, j0, n, round_up(n, kRows), p.head_dim, depth, w.k.rows);
    pack(values, j0, n, round_up(n, kRows), p.head_dim_v, depth_v, w.v.rows);
    pack_across(elements(w.k.rows, depth), 0, n, p.head_dim, width, w.k.across);
    make_finite(w.k.across, ceil_div(n, kDepth<E>) * width);
    std::memset(static_cast<void*>(w.grad_k), 0, tile_keys * width * sizeof(A));
    std::memset(static_cast<void*>(w.grad_v), 0, tile_keys * width_v * sizeof(A));

    const int64_t first_query = s.band.first_query(j0), end_query = min(s.q_len, s.band.end_query(j0 + n));
    for (int64_t g = 0; g < p.group(); g++)
      for (int64_t t = first_query / tile_queries; max(first_query, t * tile_queries) < end_query; t++) {
        int64_t h = kv_head * p.group() + g, i = t * tile_queries, queries = min(tile_queries, s.q_len - i);
        pack_queries(s, h, i, queries, w, shared);

        // S^T = K Q^T, dP^T = V dO^T
        const KeyRange range = KeyRange{0, n}.seen(s.band, i, i + queries, j0);
        if (p.seqlen_q <= kDecodeQueries)
          decode_scores(queries, range, w);
        else
          set_product(w.k.rows, depth, w.q.columns, range, ceil_div(p.head_dim, kDepth<E>), w.s);
        set_product(w.v.rows, depth_v, w.grad_o.columns, range, ceil_div(p.head_dim_v, kDepth<E>), w.grad_p);

        // P^T and dS^T
        for (int64_t column = 0; column < queries; column += group) {
          int64_t first = i + column, count = min(group, queries - column);
          GroupScores<A, Block::cols> score(score_of<A>(p, h), p, s, b, h, first, count, j0, n, w.mask);
          if (plain && count == group &&
              s.band.verdict(first, first + count, j0 + range.begin, j0 + range.end) == Verdict::full)
            weigh<false>(score, column, range, w);
          else
            weigh<true>(score, column, range, w);
        }
        if (grad.grad_mask.data) store_grad_mask(b, h, i, queries, j0, range, w);

        // dV += P^T dO, dK += dS^T Q
        const int64_t p_row = tile_queries / kDepth<E>, p_depth = ceil_div(queries, kDepth<E>);
        add_product(Operand<E>{w.p + range.begin * p_row, p_row, 1}, w.grad_o.across, width_v, range.count(),
                    p.head_dim_v, p_depth, w.grad_v + range.begin * width_v);
        add_product(Operand<E>{w.ds + range.begin * p_row, p_row, 1}, w.q.across, width, range.count(), p.head_dim,
                    p_depth, w.grad_k + range.begin * width);

        // dQ += dS K, when the tile of keys before has passed
        int64_t item = g * query_tiles + t;
        if (tile > 0) wait_for(shared.progress[task - 1], item + 1);
        const E* ds_across = (kDepth<E> == 1 ? w.ds : w.ds_across) + range.begin / kDepth<E> * tile_queries;
        add_product(Operand<E>{ds_across, 1, tile_queries}, w.k.across + range.begin / kDepth<E> * width, width,
                    queries, p.head_dim, ceil_div(range.count(), kDepth<E>), grad_q + (g * seqlen_q + i) * width);
        shared.progress[task].store(item + 1, std::memory_order_release);
      }

    for (int64_t j = 0; j < n; j++) {
      narrow(w.grad_k + j * width, A(p.scale), p.head_dim, at<T>(grad.grad_key, s.k_batch, kv_head, s.k_row + j0 + j),
             grad.grad_key.dim);
      narrow(w.grad_v + j * width_v, A(1), p.head_dim_v, at<T>(grad.grad_value, s.k_batch, kv_head, s.k_row + j0 + j),
             grad.grad_value.dim);
    }
  }

  // q.k summed as the decode forward sums it. In another order a score of 100 differs from its lse by 1e-5, and P by as
  // much.
  void decode_scores(int64_t queries, KeyRange keys, const Workspace& w) const {
    const Element* k_rows[tile_keys + kRowsAhead];
    for (int64_t j = keys.begin; j < keys.end; j++) k_rows[j] = elements(w.k.rows, depth)[j];
    repeat_last(k_rows, keys.end);
    for (int64_t q = 0; q < queries; q++) {
      A s[tile_keys + V::lanes];
      for (int64_t j = keys.begin; j < keys.end; j += V::lanes)
        dots<1>(k_rows + j, w.q.rows + q * depth, depth, p.head_dim, s + j, tile_keys);
      for (int64_t j = keys.begin; j < keys.end; j++) w.s[j * tile_queries + q] = s[j];
    }
    for (int64_t j = keys.begin; j < keys.end; j++)
      std::fill(w.s + j * tile_queries + queries, w.s + (j + 1) * tile_queries, A(0));
  }

  // to[keys][tile_queries] = the rows of a tile of keys or values, times columns
  static void set_product(const E* rows, int64_t row, const E* columns, KeyRange keys, int64_t depth, A* to) {
    multiply<Block>(Operand<E>{rows + keys.begin * row, row, 1}, columns, tile_queries, keys.count(), tile_queries,
                    depth, to + keys.begin * tile_queries, tile_queries, Set());
  }
  // to[rows][width] += a b
  static void add_product(Operand<E> a, const E* b, int64_t width, int64_t rows, int64_t cols, int64_t depth, A* to) {
    multiply<Block>(a, b, width, rows, cols, depth, to, width, Add());
  }

  void store_grad_mask(int64_t b, int64_t h, int64_t i, int64_t queries, int64_t j0, KeyRange keys,
                       const Workspace& w) const {
    for (int64_t q = 0; q < queries; q++)
      for (int64_t j = keys.begin; j < keys.end; j++)
        at<A>(grad.grad_mask, b, h, i + q)[(j0 + j) * grad.grad_mask.dim] = w.grad_bias[j * tile_queries + q];
  }

  // The sink is a key of value 0: its dS, summed over all rows of its head.
  void sum_grad_sink(int64_t h, const Shared& shared) const {
    double sum = 0;
    for (int64_t b = 0; b < batch; b++)
      for (int64_t i = 0; i < p.rows_q; i++)
        sum -= weight(p.sinks.at<A>(h), *at<A>(p.lse, b, h, i)) * shared.delta[(b * p.heads_q + h) * p.rows_q + i];
    static_cast<A*>(grad.grad_sinks)[h] = A(sum);
  }

 public:
  explicit Backward(const AttentionGradParams& params) : grad(params) {}

  int64_t scratch_bytes(int64_t workers) const {
    return workers * workspace_bytes() + Arena::bytes_of([&](Arena& arena) { take_shared(arena, slots(workers)); });
  }

  void run(char* scratch, const Runner& runner) const {
    const int64_t slots = this->slots(runner.workers);
    Arena arena(scratch + runner.workers * workspace_bytes());
    Shared shared = take_shared(arena, slots);
    for (int64_t slot = 0; slot < slots; slot++) new (shared.turn + slot) std::atomic<int64_t>(0);
    for (int64_t task = 0; task < tasks; task++) new (shared.progress + task) std::atomic<int64_t>(0);
    auto workspace = [&](int64_t worker) {
      Arena arena(scratch + worker * workspace_bytes());
      return take_workspace(arena);
    };
    constexpr int64_t chunk = 64;  // rows a task
    runner.run(ceil_div(rows, chunk), [&](int64_t worker, int64_t index) {
      Workspace w = workspace(worker);
      for (int64_t r = index * chunk; r < min(rows, (index + 1) * chunk); r++) find_delta(r, w, shared);
    });
    runner.run(tasks, [&](int64_t worker, int64_t index) {
      run_task(task_at(index, slots), workspace(worker), shared, slots);
    });
    if (grad.grad_sinks) runner.run(p.heads_q, [&](int64_t, int64_t h) { sum_grad_sink(h, shared); });
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
