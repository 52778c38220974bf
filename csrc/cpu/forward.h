// The tiled forward: a tile of queries passes over the keys and values tile by tile and keeps the softmax state of each
// row. Queries lie in the vector lanes (S^T = K Q^T, O^T += V^T P^T), so row maxima and row sums need no horizontal
// operation, and one micro-kernel computes both products.
#pragma once

#include "kept.h"
#include "overflow.h"
#include "scores.h"
#include "tasks.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Forward {
  using A = Accumulate<T>;
  using E = Packed<T>;
  using V = Vec<A>;
  using Block = QueryBlock<E>;
  using Scores = PanelScores<A, Block::cols>;

  static constexpr int64_t panel = Block::cols * V::lanes;  // queries per pass of the micro-kernel
  static_assert(panel % kBitsLanes == 0);
  static constexpr int64_t tile_queries = round_up(256, panel);  // queries that share a tile of keys and values
  static constexpr int64_t tile_keys = kMaxTileKeys, packed_keys = tile_keys / kDepth<E>;

  const AttentionParams& p;
  const int64_t depth = ceil_div(p.head_dim, kDepth<E>);  // packed elements of head_dim
  const int64_t depth_padded = round_up(depth, 16), dim_v_padded = round_up(p.head_dim_v, 16);
  const int64_t split_size = round_up(p.split_size, tile_keys);
  const int64_t tiles = ceil_div(min(p.seqlen_q, p.rows_q), tile_queries);
  const bool plain_scores = p.plain_scores(), scale_in_exp = p.scale_in_exp();

  struct Workspace {
    Arena arena;
    const Forward& f;
    E* q_rows = arena.take<E>(tile_queries * f.depth_padded);  // [tile_queries][depth_padded]
    E* q = arena.take<E>(tile_queries * f.depth_padded);       // [panels][depth_padded][panel]
    E* k = arena.take<E>(tile_keys * f.depth_padded);          // [tile_keys][depth_padded]
    E* v = arena.take<E>(packed_keys * f.dim_v_padded);        // [packed_keys][dim_v_padded]
    A* s = arena.take<A>(tile_keys * panel);                   // [tile_keys][panel]
    E* weights = reinterpret_cast<E*>(s);                      // [packed_keys][panel], in place of s
    A* o_rows = arena.take<A>(tile_queries * f.dim_v_padded);  // [tile_queries][dim_v_padded]
    A* bias = arena.take<A>(Scores::bias_elements(f.p));       // [bias_elements], for Scores
    RowStates<A> states = f.take_states(arena), total = f.take_states(arena);
  };
  // One step: a panel of queries, [i, i + queries), takes in a tile of keys, whose first one is j0.
  struct Step {
    int64_t i, queries;
    const E* q;      // [depth_padded][panel]
    A *m, *l, *acc;  // [panel], [panel], [dim_v_padded][panel]
    int64_t j0;
    KeyRange keys;   // those of the tile that it takes in
    const E *k, *v;  // [tile_keys][depth_padded], [packed_keys][dim_v_padded]
  };

 public:
  explicit Forward(const AttentionParams& params) : p(params) {}

  // A tile of queries of one head.
  struct Unit {
    Sequence sequence;
    Visibility visible;
    int64_t b, h, i0, queries;
  };
  const int64_t units = p.sequences * p.heads_q * tiles;
  const int64_t splits = max<int64_t>(1, ceil_div(p.seqlen_k, split_size));

  bool splits_in_parallel(int64_t workers) const { return splits > 1 && units < workers; }
  Workspace workspace(char* memory) const { return {Arena(memory), *this}; }
  // acc is [panels][dim_v_padded][panel].
  RowStates<A> take_states(Arena& arena) const { return {arena, tile_queries, dim_v_padded}; }

  // Longest tiles first, for balance: in a causal call, or with a mask that may be causal, the last ones; else the first
  // ones, because the last tile of a sequence may be short.
  Unit unit(int64_t index) const {
    int64_t heads = p.sequences * p.heads_q, bh = index % heads, t = index / heads;
    if (p.window.right < kUnbounded || p.mapped().data) t = tiles - 1 - t;
    int64_t b = bh / p.heads_q, h = bh % p.heads_q, i0 = t * tile_queries;
    Sequence s = sequence(p, b);
    return {s, visibility(p, s, b, h), b, h, i0, min(tile_queries, s.q_len - i0)};
  }

  // The states of a unit's rows over one split of the keys.
  void run_split(const Unit& u, int64_t split, const Workspace& w, const RowStates<A>& states) const {
    const Band& band = u.sequence.band;
    states.clear();
    const int64_t first = max(split * split_size, band.first(u.i0));
    const int64_t end = min((split + 1) * split_size, band.end(u.i0 + u.queries - 1));
    if (first >= end) return;
    const int64_t begin = first / tile_keys * tile_keys;

    // Q^T
    const int64_t rows = round_up(u.queries, panel);
    const E* q_rows = pack_or_view(query_rows<T>(p.query, u.sequence, u.h), u.i0, u.queries, rows, p.head_dim,
                                   depth_padded, w.q_rows);
    for (int64_t i = 0; i < rows; i += panel)
      transpose(q_rows + i * depth_padded, depth_padded, panel, depth_padded, w.q + i * depth_padded, panel);

    Rows<T> keys = key_rows<T>(p, p.key, u.sequence, u.b, u.h / p.group());
    Rows<T> values = key_rows<T>(p, p.value, u.sequence, u.b, u.h / p.group());
    for (int64_t j0 = begin; j0 < end; j0 += tile_keys) {
      int64_t n = min(tile_keys, end - j0);
      if (u.visible.verdict(u.i0, u.i0 + u.queries, j0, j0 + n) == Verdict::skip) continue;
      const E* k = pack_or_view(keys, j0, n, round_up(n, kRows), p.head_dim, depth_padded, w.k);
      const E* v = pack_across_or_view(values, j0, n, p.head_dim_v, dim_v_padded, w.v);
      for (int64_t row = 0; row < u.queries; row += panel) {
        int64_t i = u.i0 + row, queries = min(panel, u.queries - row);
        KeyRange{0, n}.for_each_stretch(u.visible, i, i + queries, j0, [&](KeyRange keys) {
          attend(u, w,
                 Step{i, queries, w.q + row * depth_padded, states.m + row, states.l + row,
                      states.acc + row * dim_v_padded, j0, keys, k, v});
        });
      }
    }
    if (scale_in_exp)
      for (int64_t i = 0; i < tile_queries; i++) states.m[i] *= A(p.scale);
  }

  // total := total + states
  void fold(const RowStates<A>& total, const RowStates<A>& states) const {
    for (int64_t i = 0; i < tile_queries; i += V::lanes) {
      State<V> into{V::load(total.m + i), V::load(total.l + i)};
      Factors<V> factors = merge(into, State<V>{V::load(states.m + i), V::load(states.l + i)});
      into.m.store(total.m + i);
      into.l.store(total.l + i);
      int64_t column = i / panel * panel * dim_v_padded + i % panel;
      for (int64_t d = 0; d < p.head_dim_v; d++) {
        A* o = total.acc + column + d * panel;
        fma(V::load(o), factors.into, V::load(states.acc + column + d * panel) * factors.from).store(o);
      }
    }
  }

  // out, lse and lse_error of a unit's rows. Overwrites l by the factor from acc to out.
  void finish(const Unit& u, const Workspace& w, const RowStates<A>& states) const {
    for (int64_t i = 0; i < u.queries; i += V::lanes) {
      State<V> state{V::load(states.m + i), V::load(states.l + i)};
      V factor(A(1));
      if (p.sinks.data) factor = merge(state, State<V>{V(p.sinks.at<A>(u.h)), V(A(1))}).into;
      (factor * inverse_sum(state) * V(p.kept_scale<A>())).store(states.l + i);
      auto store_lanes = [&](const Tensor4& to, V x) {
        for (int64_t lane = 0; lane < min(V::lanes, u.queries - i); lane++)
          *at<A>(to, u.sequence.q_batch, u.h, u.sequence.q_row + u.i0 + i + lane) = x.v[lane];
      };
      store_lanes(p.lse, lse(state));
      if (p.lse_error.data) store_lanes(p.lse_error, lse_error(state));
    }
    for (int64_t i = 0; i < u.queries; i += panel)
      transpose(states.acc + i * dim_v_padded, panel, dim_v_padded, panel, w.o_rows + i * dim_v_padded, dim_v_padded);
    for (int64_t i = 0; i < u.queries; i++) {
      const A* acc = w.o_rows + i * dim_v_padded;
      narrow(acc, states.l[i], p.head_dim_v, at<T>(p.out, u.sequence.q_batch, u.h, u.sequence.q_row + u.i0 + i),
             p.out.dim);
      if (overflowed<T>(acc, p.head_dim_v)) recompute_row<T>(p, u.sequence, u.h, u.i0 + i);
    }
  }

 private:
  // The scores of a step, S^T [keys][panel], and the largest of each query.
  INLINE void make_scores(const Unit& u, const Workspace& w, const Step& step, V (&largest)[Block::cols]) const {
    const KeyRange keys = step.keys;
    const Left<E> k_rows{step.k + keys.begin * depth_padded, depth_padded, 1};
    // Whether all queries see the keys [begin, end) of the tile, and their scores are their contents.
    auto all_plain = [&](int64_t begin, int64_t end) {
      return plain_scores &&
             u.visible.verdict(step.i, step.i + step.queries, step.j0 + begin, step.j0 + end) == Verdict::full;
    };
    if (depth <= kChain && all_plain(keys.begin, keys.end)) {
      auto multiply_with = [&](auto maxima) {
        maxima = multiply_chain<Block>(k_rows, step.q, panel, keys.count(), panel, depth, w.s, panel, maxima);
        unroll<Block::cols>([&](auto c) { largest[c] = maxima.largest[c]; });
      };
      if (scale_in_exp) return multiply_with(SetAndMax<V, Block::cols, false>());
      return multiply_with(SetAndMax<V, Block::cols, true>(V(p.scale)));
    }
    multiply<Block>(k_rows, step.q, panel, keys.count(), panel, depth, w.s, panel, Set());
    Score<A> head_score = score_of<A>(p, u.b, u.h);
    if (scale_in_exp) head_score.scale = 1;
    Scores score(head_score, p, u.visible, u.b, u.h, step.i, step.queries, step.j0, keys.end, w.bias);
    unroll<Block::cols>([&](auto c) { largest[c] = V(kHidden); });
    for (int64_t j = keys.begin; j < keys.end;) {
      const int64_t end = min(u.visible.cell_end(step.j0 + j) - step.j0, keys.end);
      auto set_scores = [&](auto score_of_content) {
        for (; j < end; j++)
          unroll<Block::cols>([&](auto c) {
            A* s = w.s + (j - keys.begin) * panel + c * V::lanes;
            V x = score_of_content(c, score.content(V::load(s)));
            largest[c] = max(largest[c], x);
            x.store(s);
          });
      };
      if (all_plain(j, end))
        set_scores([](auto, V content) { return content; });
      else if (plain_scores)
        set_scores([&](auto c, V content) { return score.hide(j, c, content); });
      else
        set_scores([&](auto c, V content) { return score(j, c, content); });
    }
  }

  HOT void attend(const Unit& u, const Workspace& w, const Step& step) const {
    // S^T = K Q^T and its maxima
    const int64_t n = step.keys.count();
    V largest[Block::cols];
    make_scores(u, w, step, largest);

    // P^T and its sums
    if (n % kDepth<E>) std::fill_n(w.s + n * panel, panel, A(kHidden));
    const ScaledExp<A> exponential(scale_in_exp ? p.scale : 1);
    V m[Block::cols], l[Block::cols], sums[Block::cols], alpha[Block::cols];
    unroll<Block::cols>([&](auto c) {
      State<V> state{V::load(step.m + c * V::lanes), V::load(step.l + c * V::lanes)};
      alpha[c] = raise(state, largest[c], exponential);
      state.m.store(step.m + c * V::lanes);
      m[c] = state.m, l[c] = state.l, sums[c] = V(0);
    });
    for (int64_t j = 0; j < n; j += kDepth<E>)
      unroll<Block::cols>([&](auto c) {
        V p_reg[kDepth<E>];
        unroll<kDepth<E>>([&](auto i) {
          p_reg[i] = weight(V::load(w.s + (j + i) * panel + c * V::lanes), m[c], exponential);
          sums[c] = sums[c] + p_reg[i];
        });
        Fma<E>::store_across(p_reg, w.weights + j / kDepth<E> * panel + c * V::lanes);
      });
    unroll<Block::cols>([&](auto c) { (l[c] + sums[c]).store(step.l + c * V::lanes); });
    if (p.drops_weights()) drop(p, u.b, u.h, step.i, panel, step.j0 + step.keys.begin, n, w.weights);

    // O^T = alpha O^T + V^T P^T
    multiply<Block>(Left<E>{step.v + step.keys.begin / kDepth<E> * dim_v_padded, 1, dim_v_padded}, w.weights, panel,
                    p.head_dim_v, panel, ceil_div(n, kDepth<E>), step.acc, panel,
                    [&alpha](V o, int c, V sum) { return fma(o, alpha[c], sum); });
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
