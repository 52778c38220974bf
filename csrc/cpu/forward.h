// Tiled forward. Queries lie in the vector lanes (S^T = K Q^T, O^T += V^T P^T), so the statistics of the rows need no
// horizontal operation and one micro-kernel serves both products.
#pragma once

#include "scores.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Forward {
  using A = Accumulate<T>;
  using E = Packed<T>;
  using V = Vec<A>;
  using Block = QueryBlock<E>;

  static constexpr int64_t group = Block::cols * V::lanes;  // queries that share a pass of the micro-kernel
  static constexpr int64_t groups = ceil_div(256, group);
  static constexpr int64_t tile_queries = groups * group;  // queries that share a tile of keys and values

  // The states of a tile's rows: m, l [tile_queries], acc [groups][dim_v][group].
  struct RowStates {
    A *m, *l, *acc;
  };
  struct Workspace {
    E* q_rows;  // [tile_queries][dim]
    E* q;       // [groups][dim][group]
    E* k;       // [kTileKeys][dim]
    E* v;       // [kTileKeys / kDepth][dim_v]
    A* s;       // [kTileKeys][group], scores and then, as E [kTileKeys / kDepth][group], weights
    A* o_rows;  // [tile_queries][dim_v]
    A* mask;
    RowStates states, total;
  };

  const AttentionParams& p;
  const int64_t depth = ceil_div(p.head_dim, kDepth<E>);
  const int64_t dim = round_up(depth, 16), dim_v = round_up(p.head_dim_v, 16);
  const int64_t split_size = round_up(p.split_size, kTileKeys);
  const int64_t splits = max<int64_t>(1, ceil_div(p.seqlen_k, split_size));
  const int64_t tiles = ceil_div(min(p.seqlen_q, p.rows_q), tile_queries);
  const int64_t tasks = p.sequences * p.heads_q * tiles;
  const bool plain = p.scale_in_exp();

  RowStates take_states(Arena& arena) const {
    return {arena.take<A>(tile_queries), arena.take<A>(tile_queries), arena.take<A>(tile_queries * dim_v)};
  }
  Workspace take_workspace(Arena& arena) const {
    Workspace w;
    w.q_rows = arena.take<E>(tile_queries * dim);
    w.q = arena.take<E>(tile_queries * dim);
    w.k = arena.take<E>(kTileKeys * dim);
    w.v = arena.take<E>(kTileKeys * dim_v);
    w.s = arena.take<A>(kTileKeys * group);
    w.o_rows = arena.take<A>(tile_queries * dim_v);
    w.mask = arena.take<A>(p.mask.data ? GroupScores<A, Block::cols>::mask_elements : 0);
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
  // Where there are fewer tiles than workers the splits of a tile run side by side, each into its own states.
  bool splits_in_parallel(int64_t workers) const { return splits > 1 && tasks < workers; }

  struct Tile {
    Sequence sequence;
    int64_t b, h, i0, queries;
  };
  // What takes long comes first, and the short ends of the work are even: the tiles of a causal call last to first, of
  // another first to last, as the last may be a part of one.
  Tile tile(int64_t task) const {
    int64_t heads = p.sequences * p.heads_q, bh = task % heads, t = task / heads;
    if (p.window.right < kUnbounded) t = tiles - 1 - t;
    int64_t b = bh / p.heads_q, h = bh % p.heads_q, i0 = t * tile_queries;
    Sequence s = sequence(p, b);
    return {s, b, h, i0, min(tile_queries, s.q_len - i0)};
  }

  static void clear(RowStates states, int64_t dim_v) {
    for (int64_t i = 0; i < tile_queries; i++) states.m[i] = kHidden;
    std::memset(static_cast<void*>(states.l), 0, tile_queries * sizeof(A));
    std::memset(static_cast<void*>(states.acc), 0, tile_queries * dim_v * sizeof(A));
  }

  // The states of a tile's rows over one split of the keys.
  void run_split(const Tile& t, int64_t split, const Workspace& w, RowStates states) const {
    const Band& band = t.sequence.band;
    clear(states, dim_v);
    int64_t begin = max(split * split_size, band.first(t.i0) / kTileKeys * kTileKeys);
    int64_t end = min((split + 1) * split_size, band.end(t.i0 + t.queries - 1));
    if (begin >= end) return;

    // Q^T
    const int64_t padded = round_up(t.queries, group);
    const E* q_rows =
        packed(query_rows<T>(p.query, t.sequence, t.h), t.i0, t.queries, padded, p.head_dim, dim, w.q_rows);
    for (int64_t i = 0; i < padded; i += group) transpose(q_rows + i * dim, dim, group, dim, w.q + i * dim, group);

    Rows<T> keys = key_rows<T>(p, p.key, t.sequence, t.b, t.h / p.group());
    Rows<T> values = key_rows<T>(p, p.value, t.sequence, t.b, t.h / p.group());
    for (int64_t j0 = begin; j0 < end; j0 += kTileKeys) {
      int64_t n = min(kTileKeys, end - j0);
      const E* k = packed(keys, j0, n, round_up(n, kRows), p.head_dim, dim, w.k);
      const E* v = packed_across(values, j0, n, p.head_dim_v, dim_v, w.v);
      for (int64_t g = 0; g * group < t.queries; g++) {
        int64_t i = t.i0 + g * group, queries = min(group, t.i0 + t.queries - i);
        KeyRange range = KeyRange{0, n}.seen(band, i, i + queries, j0);
        if (range.count() <= 0) continue;
        step(t, w, w.q + g * group * dim, k, v, i, queries, j0, range,
             {states.m + g * group, states.l + g * group, states.acc + g * group * dim_v});
      }
    }
    if (plain)
      for (int64_t i = 0; i < tile_queries; i++) states.m[i] *= A(p.scale);
  }

  // Queries [i, i + queries), one group, take in the keys of one tile.
  HOT void step(const Tile& t, const Workspace& w, const E* q, const E* k, const E* v, int64_t i, int64_t queries,
                int64_t j0, KeyRange keys, RowStates rows) const {
    // S^T = K Q^T and its maxima
    const int64_t n = keys.count();
    const Operand<E> k_rows{k + keys.begin * dim, dim, 1};
    SetAndMax<V, Block::cols> found;
    const KeyRange full = plain ? keys.seen_by_all(t.sequence.band, i, i + queries, j0) : KeyRange{keys.end, keys.end};
    if (full.count() == n && depth <= kChain) {
      found = multiply_chain<Block>(k_rows, q, group, n, group, depth, w.s, group, found);
    } else {
      multiply<Block>(k_rows, q, group, n, group, depth, w.s, group, Set());
      Score<A> head_score = score_of<A>(p, t.h);
      if (plain) head_score.scale = 1;
      GroupScores<A, Block::cols> score(head_score, p, t.sequence, t.b, t.h, i, queries, j0, keys.end, w.mask);
      for (int64_t j = keys.begin; j < keys.end; j++)
        unroll<Block::cols>([&](auto c) {
          A* s = w.s + (j - keys.begin) * group + c * V::lanes;
          V dot = V::load(s);
          bool as_it_is = full.begin <= j && j < full.end;
          found(dot, c, as_it_is ? dot : score(j, c, score.content(dot))).store(s);
        });
    }

    // P^T and its sums, in the place of the scores
    E* weights = reinterpret_cast<E*>(w.s);
    if (n % kDepth<E>) std::fill_n(w.s + n * group, group, A(kHidden));
    const ScaledExp<A> exponential(plain ? p.scale : 1);
    V m[Block::cols], l[Block::cols], sums[Block::cols], alpha[Block::cols];
    unroll<Block::cols>([&](auto c) {
      State<V> state{V::load(rows.m + c * V::lanes), V::load(rows.l + c * V::lanes)};
      alpha[c] = raise(state, found.largest[c], exponential);
      state.m.store(rows.m + c * V::lanes);
      m[c] = state.m, l[c] = state.l, sums[c] = V(0);
    });
    for (int64_t j = 0; j < n; j += kDepth<E>)
      unroll<Block::cols>([&](auto c) {
        V p_reg[kDepth<E>];
        unroll<kDepth<E>>([&](auto i) {
          p_reg[i] = weight(V::load(w.s + (j + i) * group + c * V::lanes), m[c], exponential);
          sums[c] = sums[c] + p_reg[i];
        });
        Factor<E>::store_across(p_reg, weights + j / kDepth<E> * group + c * V::lanes);
      });
    unroll<Block::cols>([&](auto c) { (l[c] + sums[c]).store(rows.l + c * V::lanes); });

    // O^T = alpha O^T + V^T P^T
    multiply<Block>(Operand<E>{v + keys.begin / kDepth<E> * dim_v, 1, dim_v}, weights, group, p.head_dim_v, group,
                    ceil_div(n, kDepth<E>), rows.acc, group,
                    [&alpha](V o, int c, V sum) { return o * alpha[c] + sum; });
  }

  void fold(RowStates total, RowStates states) const {
    for (int64_t i = 0; i < tile_queries; i += V::lanes) {
      State<V> into{V::load(total.m + i), V::load(total.l + i)};
      Factors<V> factors = merge(into, State<V>{V::load(states.m + i), V::load(states.l + i)});
      into.m.store(total.m + i);
      into.l.store(total.l + i);
      int64_t column = i / group * group * dim_v + i % group;
      for (int64_t d = 0; d < p.head_dim_v; d++) {
        A* o = total.acc + column + d * group;
        (V::load(o) * factors.into + V::load(states.acc + column + d * group) * factors.from).store(o);
      }
    }
  }

  // out and lse of a tile's rows
  void finish(const Tile& t, const Workspace& w, RowStates states) const {
    for (int64_t i = 0; i < t.queries; i += V::lanes) {
      State<V> state{V::load(states.m + i), V::load(states.l + i)};
      V factor(A(1));
      if (p.sinks.data) factor = merge(state, State<V>{V(p.sinks.at<A>(t.h)), V(A(1))}).into;
      (factor * inverse_sum(state)).store(states.l + i);
      V lse_lanes = lse(state);
      for (int64_t lane = 0; lane < min(V::lanes, t.queries - i); lane++)
        *at<A>(p.lse, t.sequence.q_batch, t.h, t.sequence.q_row + t.i0 + i + lane) = lse_lanes.v[lane];
    }
    for (int64_t g = 0; g * group < t.queries; g++)
      transpose(states.acc + g * group * dim_v, group, dim_v, group, w.o_rows + g * group * dim_v, dim_v);
    for (int64_t i = 0; i < t.queries; i++)
      narrow(w.o_rows + i * dim_v, states.l[i], p.head_dim_v,
             at<T>(p.out, t.sequence.q_batch, t.h, t.sequence.q_row + t.i0 + i), p.out.dim);
  }

 public:
  explicit Forward(const AttentionParams& params) : p(params) {}

  int64_t scratch_bytes(int64_t workers) const {
    return workers * workspace_bytes() + (splits_in_parallel(workers) ? tasks * splits * states_bytes() : 0);
  }

  void run(char* scratch, const Runner& runner) const {
    auto workspace = [&](int64_t worker) {
      Arena arena(scratch + worker * workspace_bytes());
      return take_workspace(arena);
    };
    auto split_states = [&](int64_t task, int64_t split) {
      Arena arena(scratch + runner.workers * workspace_bytes() + (task * splits + split) * states_bytes());
      return take_states(arena);
    };
    bool parallel = splits_in_parallel(runner.workers);
    if (parallel)
      runner.run(tasks * splits, [&](int64_t worker, int64_t index) {
        Tile t = tile(index / splits);
        if (t.queries > 0)
          run_split(t, index % splits, workspace(worker), split_states(index / splits, index % splits));
      });
    runner.run(tasks, [&](int64_t worker, int64_t task) {
      Tile t = tile(task);
      if (t.queries <= 0) return;
      Workspace w = workspace(worker);
      if (splits > 1) clear(w.total, dim_v);
      for (int64_t split = 0; split < splits; split++) {
        RowStates states = parallel ? split_states(task, split) : w.states;
        if (!parallel) run_split(t, split, w, states);
        if (splits > 1) fold(w.total, states);
      }
      finish(t, w, splits > 1 ? w.total : w.states);
    });
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
