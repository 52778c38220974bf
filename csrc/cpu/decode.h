// Split-KV decode: few queries against many keys. The query rows of all heads that share a kv head read its keys and
// values once, together, straight from memory; head_dim lies in the vector lanes. Each split of the keys leaves the
// states of these rows, which are merged in order.
#pragma once

#include "overflow.h"
#include "scores.h"
#include "tasks.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Decode {
  using A = Accumulate<T>;
  using V = Vec<A>;
  using E = Packed<T>;
  using F = Fma<E>;

  static constexpr int64_t tile_keys = 1024;
  static constexpr T kNoValue[kMaxHeadDim] = {};  // pairs with the last of an odd number of values

  const AttentionParams& p;
  const int64_t rows = p.group() * p.seqlen_q;  // at most, of a unit
  const int64_t dim_padded = round_up(p.head_dim, V::lanes* kDepth<E>), depth_padded = dim_padded / kDepth<E>;
  const int64_t dim_v_padded = round_up(p.head_dim_v, V::lanes);
  const int64_t split_size = round_up(p.split_size, tile_keys);
  const bool plain_scores = p.plain_scores(), has_bias = p.has_bias();

  struct Workspace {
    Arena arena;
    const Decode& d;
    E* q = arena.take<E>(d.rows * d.depth_padded);                              // [rows][depth_padded]
    A* s = arena.take<A>(d.rows * tile_keys);                                   // [rows][tile_keys], scores
    E* weights = reinterpret_cast<E*>(s);                                       // [rows][weights_stride], in place of s
    A* bias = arena.take<A>(tile_keys);                                         // [tile_keys]
    uint16_t* words = arena.take<uint16_t>(tile_keys);                          // [tile_keys]
    T* k = arena.take<T>(d.p.key.dim == 1 ? 0 : tile_keys * d.dim_padded);      // [tile_keys][dim_padded]
    T* v = arena.take<T>(d.p.value.dim == 1 ? 0 : tile_keys * d.dim_v_padded);  // [tile_keys][dim_v_padded]
    const T** k_rows = arena.take<const T*>(tile_keys + kRowsAhead);            // [tile_keys + kRowsAhead]
    const T** v_rows = arena.take<const T*>(tile_keys + kRowsAhead);            // [tile_keys + kRowsAhead]
    RowStates<A> tile = d.take_states(arena), states = d.take_states(arena), total = d.take_states(arena);
  };
  static constexpr int64_t weights_stride = tile_keys * sizeof(A) / sizeof(E);

 public:
  explicit Decode(const AttentionParams& params) : p(params) {}

  // All query rows of one kv head of one sequence: row = head in the group * queries + query.
  struct Unit {
    Sequence sequence;
    Visibility visible;  // to any of its heads
    int64_t b, kv_head, queries, rows;
  };
  const int64_t units = p.sequences * p.heads_kv;
  const int64_t splits = max<int64_t>(1, ceil_div(p.seqlen_k, split_size));

  bool splits_in_parallel(int64_t) const { return splits > 1; }
  Workspace workspace(char* memory) const { return {Arena(memory), *this}; }
  // acc is [rows][dim_v_padded].
  RowStates<A> take_states(Arena& arena) const { return {arena, rows, dim_v_padded}; }

  Unit unit(int64_t index) const {
    int64_t b = index / p.heads_kv;
    Sequence s = sequence(p, b);
    const int64_t kv_head = index % p.heads_kv;
    return {s, visibility(p, s, b, kv_head * p.group(), p.group()), b, kv_head, s.q_len, p.group() * s.q_len};
  }

  // The states of a unit's rows over one split of the keys.
  void run_split(const Unit& u, int64_t split, const Workspace& w, const RowStates<A>& states) const {
    const Band& band = u.sequence.band;
    states.clear();
    const int64_t first = max(split * split_size, band.first(0));
    const int64_t end = min((split + 1) * split_size, band.end(u.queries - 1));
    if (first >= end) return;
    const int64_t begin = first / tile_keys * tile_keys;

    for (int64_t r = 0; r < u.rows; r++)
      pack(query_rows<T>(p.query, u.sequence, query_head(u, r)), r % u.queries, 1, 1, p.head_dim, depth_padded,
           w.q + r * depth_padded);
    Rows<T> keys = key_rows<T>(p, p.key, u.sequence, u.b, u.kv_head);
    Rows<T> values = key_rows<T>(p, p.value, u.sequence, u.b, u.kv_head);
    auto attend = [&](int64_t j0, int64_t n) {
      gather(keys, j0, n, p.head_dim, dim_padded, w.k, w.k_rows);
      gather(values, j0, n, p.head_dim_v, dim_v_padded, w.v, w.v_rows);
      if (n % kDepth<E>) w.v_rows[n] = kNoValue;
      w.tile.clear();

      // S = Q K^T
      for (int64_t j = 0; j < n; j += V::lanes)
        in_row_blocks<min(4, V::lanes)>(u.rows, [&](int64_t r, auto count) {
          dots<count>(w.k_rows + j, w.q + r * depth_padded, depth_padded, p.head_dim, w.s + r * tile_keys + j,
                      tile_keys);
        });
      // P and its sums
      for (int64_t r = 0; r < u.rows; r++) weigh(u, r, j0, n, w);
      // O += P V, kFetch values at a time: so many stay in the cache nearest to the core for all rows.
      for (int64_t j = 0; j < n; j += kFetch)
        in_row_blocks<2>(u.rows, [&](int64_t r, auto count) { accumulate<count>(w, r, j, min(j + kFetch, n)); });
      fold(states, w.tile);
    };
    for (int64_t tile = begin; tile < end; tile += tile_keys)
      KeyRange{0, min(tile_keys, end - tile)}.for_each_stretch(
          u.visible, 0, u.queries, tile, [&](KeyRange keys) { attend(tile + keys.begin, keys.count()); });
  }

  // total := total + states
  void fold(const RowStates<A>& total, const RowStates<A>& states) const {
    for (int64_t r = 0; r < rows; r++) {
      State<A> into{total.m[r], total.l[r]};
      Factors<A> factors = merge(into, State<A>{states.m[r], states.l[r]});
      total.m[r] = into.m;
      total.l[r] = into.l;
      for (int64_t d = r * dim_v_padded; d < (r + 1) * dim_v_padded; d += V::lanes)
        fma(V::load(total.acc + d), V(factors.into), V::load(states.acc + d) * V(factors.from)).store(total.acc + d);
    }
  }

  // out, lse and lse_error of a unit's rows.
  void finish(const Unit& u, const Workspace&, const RowStates<A>& states) const {
    for (int64_t r = 0; r < u.rows; r++) {
      int64_t i = r % u.queries, h = query_head(u, r);
      State<A> state{states.m[r], states.l[r]};
      A factor(1);
      if (p.sinks.data) factor = merge(state, State<A>{p.sinks.at<A>(h), A(1)}).into;
      int64_t row = u.sequence.q_row + i;
      const A* acc = states.acc + r * dim_v_padded;
      narrow(acc, factor * inverse_sum(state), p.head_dim_v, at<T>(p.out, u.sequence.q_batch, h, row), p.out.dim);
      if (overflowed<T>(acc, p.head_dim_v)) recompute_row<T>(p, u.sequence, h, i);
      *at<A>(p.lse, u.sequence.q_batch, h, row) = lse(state);
      if (p.lse_error.data) *at<A>(p.lse_error, u.sequence.q_batch, h, row) = lse_error(state);
    }
  }

 private:
  int64_t query_head(const Unit& u, int64_t row) const { return u.kv_head * p.group() + row / u.queries; }

  // Points at rows [j0, j0 + n). Where their elements are not contiguous, they are first copied to copy [n][stride].
  static void gather(const Rows<T>& from, int64_t j0, int64_t n, int64_t dims, int64_t stride, T* copy,
                     const T** pointers) {
    for (int64_t j = 0; j < n; j++) pointers[j] = from[j0 + j];
    if (from.dim_stride != 1)
      for (int64_t j = 0; j < n; j++) {
        T* row = copy + j * stride;
        for (int64_t d = 0; d < dims; d++) row[d] = pointers[j][d * from.dim_stride];
        pointers[j] = row;
      }
    repeat_last(pointers, n);
  }

  // f(row, count) over all rows: `most` at a time, then one by one. A row's arithmetic is the same either way.
  template <int most, class Body> INLINE void in_row_blocks(int64_t rows, Body&& f) const {
    int64_t r = 0;
    for (; r + most <= rows; r += most) f(r, std::integral_constant<int, most>{});
    for (; r < rows; r++) f(r, std::integral_constant<int, 1>{});
  }

  // The words of the map of the mask for keys j0 and on; null if it hides no key.
  const uint16_t* words_of(const Unit& u, int64_t h, int64_t j0, int64_t count, const Workspace& w) const {
    const Visibility visible = visibility(p, u.sequence, u.b, h);
    if (!visible.map.bits || visible.map.bits_key) return visible.map.bits ? visible.word(0, j0) : nullptr;
    std::fill_n(w.words, count, *visible.word(0, 0));
    return w.words;
  }

  // Turns the scores of row r into weights, and sets m and l of the row's state of this tile.
  void weigh(const Unit& u, int64_t r, int64_t j0, int64_t n, const Workspace& w) const {
    int64_t i = r % u.queries, h = query_head(u, r);
    A* s = w.s + r * tile_keys;
    int64_t padded = round_up(n, V::lanes);
    const Score<A> score_of_key = score_of<A>(p, u.b, h);
    const V first(min(u.sequence.band.first(i) - j0, tile_keys)),
        end(max<int64_t>(min(u.sequence.band.end(i) - j0, n), 0));
    const V distance(A(i + u.sequence.band.q_offset - j0));
    if (has_bias) pack_bias(p, u.visible, u.b, h, i, 1, j0, n, padded, w.bias);
    const uint16_t* words = words_of(u, h, j0, padded, w);

    V maxima(kHidden);
    for (int64_t j = 0; j < padded; j += V::lanes) {
      V key = V(A(j)) + V::iota();
      V score = score_of_key.content(V::load(s + j));
      if (!plain_scores) {
        V bias = has_bias ? V::load(w.bias + j) : V(A(0));
        score = score_of_key(score, distance - key, bias);
      }
      score = select((first <= key) & (key < end), score, V(kHidden));
      if (words) score = select(mask_of_words<A>(words + j, i), score, V(kHidden));
      maxima = max(maxima, score);
      score.store(s + j);
    }
    State<A> state;
    raise(state, maxima.fold([](A a, A b) { return max(a, b); }));
    V sums(A(0));
    E* weights = w.weights + r * weights_stride;
    for (int64_t j = 0; j < padded; j += V::lanes) {
      V p = weight(V::load(s + j), V(state.m));
      sums = sums + p;
      F::store(p, weights + j / kDepth<E>);
    }
    w.tile.m[r] = state.m;
    w.tile.l[r] = sums.fold([](A a, A b) { return a + b; });
  }

  // The tile's acc[row] += sum over j in [begin, end) of weights[row][j] v[j], for row r and the next count - 1.
  template <int count> HOT void accumulate(const Workspace& w, int64_t r, int64_t begin, int64_t end) const {
    constexpr int block_cols = QueryBlock<A>::rows;  // vectors of a value whose sums are in registers
    const E* weights = w.weights + r * weights_stride;
    A* acc = w.tile.acc + r * dim_v_padded;
    // Dimensions from d on: `cols` vectors, the last one of only `valid` elements if that is given.
    auto columns = [&](int64_t d, auto cols, auto... valid) {
      V sums[count * cols];
      unroll<count * cols>([&](auto i) { sums[i] = V::load(acc + i / cols * dim_v_padded + d + i % cols * V::lanes); });
      for (int64_t j = begin; j < end; j += kDepth<E>) {
        typename F::Operand v_reg[cols];
        unroll<cols>([&](auto c) {
          v_reg[c] = F::load_across(w.v_rows + j, d + c * V::lanes, valid...);
          unroll<kDepth<E>>([&](auto i) { fetch<V::lanes>(w.v_rows[j + i + kFetch], d + c * V::lanes); });
        });
        unroll<count>([&](auto row) {
          auto p_reg = F::splat(weights[row * weights_stride + j / kDepth<E>]);
          unroll<cols>([&](auto c) { sums[row * cols + c] = F::multiply_add(sums[row * cols + c], p_reg, v_reg[c]); });
        });
      }
      unroll<count * cols>([&](auto i) { sums[i].store(acc + i / cols * dim_v_padded + d + i % cols * V::lanes); });
    };
    int64_t d = 0;
    for (; d + block_cols * V::lanes <= p.head_dim_v; d += block_cols * V::lanes)
      columns(d, std::integral_constant<int, block_cols>{});
    for (; d + V::lanes <= p.head_dim_v; d += V::lanes) columns(d, std::integral_constant<int, 1>{});
    if (d < p.head_dim_v) columns(d, std::integral_constant<int, 1>{}, p.head_dim_v - d);
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
