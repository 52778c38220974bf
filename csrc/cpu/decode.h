// Split-KV decode: few queries against many keys. The query rows of all heads that share a kv head share one read of
// its keys and values; head_dim lies in the vector lanes. Each split of the keys leaves the states of its rows, which
// are then merged in order.
#pragma once

#include "scores.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Decode {
  using A = Accumulate<T>;
  using V = Vec<A>;
  using E = Packed<T>;

  static constexpr int64_t tile_keys = 1024;
  static constexpr T kNoValue[kMaxHeadDim] = {};  // beside the last value, where they are read in pairs

  // The states of the query rows of one kv head: m, l [rows], acc [rows][dim_v].
  struct RowStates {
    A *m, *l, *acc;
  };
  struct Workspace {
    E* q;                        // [rows][depth]
    A* s;                        // [rows][tile_keys], scores and then weights
    A* bias;                     // [tile_keys]
    T* k;                        // [tile_keys][dim], only where rows are not contiguous in memory
    T* v;                        // [tile_keys][dim_v]
    const T **k_rows, **v_rows;  // [tile_keys + kRowsAhead]
    RowStates tile, states, total;
  };
  struct Head {
    Sequence sequence;
    int64_t b, kv_head;
  };

  const AttentionParams& p;
  const int64_t rows = p.group() * p.seqlen_q;  // row = head in the group * seqlen_q + query
  const int64_t dim = round_up(p.head_dim, V::lanes* kDepth<E>), depth = dim / kDepth<E>;
  const int64_t dim_v = round_up(p.head_dim_v, V::lanes);
  const int64_t split_size = round_up(p.split_size, tile_keys);
  const int64_t splits = max<int64_t>(1, ceil_div(p.seqlen_k, split_size));
  const int64_t heads = p.sequences * p.heads_kv;
  const bool plain = p.plain_scores();

  RowStates take_states(Arena& arena) const {
    return {arena.take<A>(rows), arena.take<A>(rows), arena.take<A>(rows * dim_v)};
  }
  Workspace take_workspace(Arena& arena) const {
    Workspace w;
    w.q = arena.take<E>(rows * depth);
    w.s = arena.take<A>(rows * tile_keys);
    w.bias = arena.take<A>(tile_keys);
    w.k = arena.take<T>(p.key.dim == 1 ? 0 : tile_keys * dim);
    w.v = arena.take<T>(p.value.dim == 1 ? 0 : tile_keys * dim_v);
    w.k_rows = arena.take<const T*>(tile_keys + kRowsAhead);
    w.v_rows = arena.take<const T*>(tile_keys + kRowsAhead);
    w.tile = take_states(arena);
    w.states = take_states(arena);
    w.total = take_states(arena);
    return w;
  }
  int64_t states_bytes() const {
    return Arena::bytes_of([&](Arena& arena) { take_states(arena); });
  }
  int64_t workspace_bytes() const {
    return Arena::bytes_of([&](Arena& arena) { take_workspace(arena); });
  }

  Head head(int64_t index) const {
    int64_t b = index / p.heads_kv;
    return {sequence(p, b), b, index % p.heads_kv};
  }
  int64_t query_head(const Head& t, int64_t row) const { return t.kv_head * p.group() + row / p.seqlen_q; }

  void clear(RowStates states) const {
    for (int64_t r = 0; r < rows; r++) states.m[r] = kHidden;
    std::memset(static_cast<void*>(states.l), 0, rows * sizeof(A));
    std::memset(static_cast<void*>(states.acc), 0, rows * dim_v * sizeof(A));
  }

  // Pointers to rows [j0, j0 + n), which are copied together first where their elements lie apart.
  static void gather(const Rows<T>& from, int64_t j0, int64_t n, int64_t dims, int64_t width, T* copy,
                     const T** pointers) {
    for (int64_t j = 0; j < n; j++) pointers[j] = from[j0 + j];
    if (from.dim != 1)
      for (int64_t j = 0; j < n; j++) {
        T* row = copy + j * width;
        for (int64_t d = 0; d < dims; d++) row[d] = pointers[j][d * from.dim];
        pointers[j] = row;
      }
    repeat_last(pointers, n);
  }

  void run_split(const Head& t, int64_t split, const Workspace& w, RowStates states) const {
    const Band& band = t.sequence.band;
    clear(states);
    int64_t begin = max(split * split_size, band.first(0) / tile_keys * tile_keys);
    int64_t end = min((split + 1) * split_size, band.end(t.sequence.q_len - 1));
    if (begin >= end) return;

    for (int64_t r = 0; r < rows; r++) {
      int64_t i = r % p.seqlen_q;
      if (i < t.sequence.q_len)
        pack(query_rows<T>(p.query, t.sequence, query_head(t, r)), i, 1, 1, p.head_dim, depth, w.q + r * depth);
    }
    Rows<T> keys = key_rows<T>(p, p.key, t.sequence, t.b, t.kv_head);
    Rows<T> values = key_rows<T>(p, p.value, t.sequence, t.b, t.kv_head);
    for (int64_t j0 = begin; j0 < end; j0 += tile_keys) {
      int64_t n = min(tile_keys, end - j0);
      gather(keys, j0, n, p.head_dim, dim, w.k, w.k_rows);
      gather(values, j0, n, p.head_dim_v, dim_v, w.v, w.v_rows);
      if (n % kDepth<E>) w.v_rows[n] = kNoValue;
      clear(w.tile);
      for (int64_t j = 0; j < n; j += V::lanes)
        in_row_blocks<min(4, V::lanes)>([&](int64_t r, auto count) {
          dots<count>(w.k_rows + j, w.q + r * depth, depth, p.head_dim, w.s + r * tile_keys + j, tile_keys);
        });
      for (int64_t r = 0; r < rows; r++) weigh(t, r, j0, n, w);
      for (int64_t j = 0; j < n; j += kFetch)  // so many values stay in the cache nearest to the core
        in_row_blocks<2>([&](int64_t r, auto count) { accumulate<count>(w, r, j, min(j + kFetch, n)); });
      fold(states, w.tile);
    }
  }

  // f(row, count) over all rows, at most `most` of them together. A row's arithmetic does not depend on how many.
  template <int most, class F> INLINE void in_row_blocks(F&& f) const {
    int64_t r = 0;
    for (; r + most <= rows; r += most) f(r, std::integral_constant<int, most>{});
    for (; r < rows; r++) f(r, std::integral_constant<int, 1>{});
  }

  // Scores to weights, and the row's state of this tile, but for acc.
  void weigh(const Head& t, int64_t r, int64_t j0, int64_t n, const Workspace& w) const {
    int64_t i = r % p.seqlen_q, h = query_head(t, r);
    A* s = w.s + r * tile_keys;
    int64_t padded = round_up(n, V::lanes);
    if (i >= t.sequence.q_len) return std::fill(s, s + padded, A(0));
    const Score<A> score_of_key = score_of<A>(p, h);
    const V first(min(t.sequence.band.first(i) - j0, tile_keys)),
        end(max<int64_t>(min(t.sequence.band.end(i) - j0, n), 0));
    const V distance(A(i + t.sequence.band.q_offset - j0));
    if (p.mask.data) pack_mask(p, t.b, h, i, 1, j0, n, padded, w.bias);

    V maxima(kHidden);
    for (int64_t j = 0; j < padded; j += V::lanes) {
      V key = V(A(j)) + V::iota();
      V score = score_of_key.content(V::load(s + j));
      if (!plain) {
        V bias = p.mask.data ? V::load(w.bias + j) : V(A(0));
        score = score_of_key(score, distance - key, bias);
      }
      score = select((first <= key) & (key < end), score, V(kHidden));
      maxima = max(maxima, score);
      score.store(s + j);
    }
    State<A> state;
    raise(state, fold_lanes(maxima, [](A a, A b) { return max(a, b); }));
    V sums(A(0));
    E* weights = reinterpret_cast<E*>(s);
    for (int64_t j = 0; j < padded; j += V::lanes) {
      V p = weight(V::load(s + j), V(state.m));
      sums = sums + p;
      Factor<E>::store(p, weights + j / kDepth<E>);
    }
    w.tile.m[r] = state.m;
    w.tile.l[r] = fold_lanes(sums, [](A a, A b) { return a + b; });
  }

  template <class F> static A fold_lanes(V x, F f) {
    A total = x.v[0];
    for (int lane = 1; lane < V::lanes; lane++) total = f(total, x.v[lane]);
    return total;
  }

  // The tile's acc[r] += sum over j in [begin, end) of p[r][j] v[j] for row r and the next count - 1
  template <int count> HOT void accumulate(const Workspace& w, int64_t r, int64_t begin, int64_t end) const {
    using F = Factor<E>;
    constexpr int block_cols = QueryBlock<A>::rows;  // vectors of a value, summed in registers
    const E* weights = reinterpret_cast<const E*>(w.s + r * tile_keys);
    constexpr int64_t p_width = tile_keys * sizeof(A) / sizeof(E);
    auto columns = [&](int64_t d, auto cols, auto... count_v) {  // the last: of elements, none: all
      V sums[count * cols];
      unroll<count * cols>(
          [&](auto i) { sums[i] = V::load(w.tile.acc + (r + i / cols) * dim_v + d + i % cols * V::lanes); });
      for (int64_t j = begin; j < end; j += kDepth<E>) {
        typename F::Vector v_reg[cols];
        unroll<cols>([&](auto c) {
          v_reg[c] = F::load_across(w.v_rows + j, d + c * V::lanes, count_v...);
          unroll<kDepth<E>>([&](auto i) { fetch<V::lanes>(w.v_rows[j + i + kFetch], d + c * V::lanes); });
        });
        unroll<count>([&](auto row) {
          auto p_reg = F::splat(weights[row * p_width + j / kDepth<E>]);
          unroll<cols>([&](auto c) { sums[row * cols + c] = F::multiply_add(sums[row * cols + c], p_reg, v_reg[c]); });
        });
      }
      unroll<count * cols>(
          [&](auto i) { sums[i].store(w.tile.acc + (r + i / cols) * dim_v + d + i % cols * V::lanes); });
    };
    int64_t d = 0;
    for (; d + block_cols * V::lanes <= p.head_dim_v; d += block_cols * V::lanes)
      columns(d, std::integral_constant<int, block_cols>{});
    for (; d + V::lanes <= p.head_dim_v; d += V::lanes) columns(d, std::integral_constant<int, 1>{});
    if (d < p.head_dim_v) columns(d, std::integral_constant<int, 1>{}, p.head_dim_v - d);
  }

  void fold(RowStates total, RowStates states) const {
    for (int64_t r = 0; r < rows; r++) {
      State<A> into{total.m[r], total.l[r]};
      Factors<A> factors = merge(into, State<A>{states.m[r], states.l[r]});
      total.m[r] = into.m;
      total.l[r] = into.l;
      for (int64_t d = r * dim_v; d < (r + 1) * dim_v; d += V::lanes)
        (V::load(total.acc + d) * V(factors.into) + V::load(states.acc + d) * V(factors.from)).store(total.acc + d);
    }
  }

  void finish(const Head& t, RowStates states) const {
    for (int64_t r = 0; r < rows; r++) {
      int64_t i = r % p.seqlen_q, h = query_head(t, r);
      if (i >= t.sequence.q_len) continue;
      State<A> state{states.m[r], states.l[r]};
      A factor(1);
      if (p.sinks.data) factor = merge(state, State<A>{p.sinks.at<A>(h), A(1)}).into;
      int64_t row = t.sequence.q_row + i;
      narrow(states.acc + r * dim_v, factor * inverse_sum(state), p.head_dim_v,
             at<T>(p.out, t.sequence.q_batch, h, row), p.out.dim);
      *at<A>(p.lse, t.sequence.q_batch, h, row) = lse(state);
    }
  }

 public:
  explicit Decode(const AttentionParams& params) : p(params) {}

  int64_t scratch_bytes(int64_t workers) const {
    return workers * workspace_bytes() + (splits > 1 ? heads * splits * states_bytes() : 0);
  }

  void run(char* scratch, const Runner& runner) const {
    auto workspace = [&](int64_t worker) {
      Arena arena(scratch + worker * workspace_bytes());
      return take_workspace(arena);
    };
    auto split_states = [&](int64_t index) {
      Arena arena(scratch + runner.workers * workspace_bytes() + index * states_bytes());
      return take_states(arena);
    };
    if (splits > 1)
      runner.run(heads * splits, [&](int64_t worker, int64_t index) {
        Head t = head(index / splits);
        if (t.sequence.q_len > 0) run_split(t, index % splits, workspace(worker), split_states(index));
      });
    runner.run(heads, [&](int64_t worker, int64_t index) {
      Head t = head(index);
      if (t.sequence.q_len <= 0) return;
      Workspace w = workspace(worker);
      if (splits == 1) {
        run_split(t, 0, w, w.states);
        return finish(t, w.states);
      }
      clear(w.total);
      for (int64_t split = 0; split < splits; split++) fold(w.total, split_states(index * splits + split));
      finish(t, w.total);
    });
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
