// Backward from the log-sum-exp. With P = e^(S - lse) and delta = rowsum(dO * O) - dlse:
//     dV = P^T dO,    dS = P * (dO V^T - delta),    dQ = scale dS K,    dK = scale dS^T Q.
// A task owns a tile of keys and goes through the queries that see it, so dK and dV are its own. Each tile of dQ takes its
// addends in the order of the key tiles: a task waits until the one before has passed, whoever runs it. Hence the same bits
// for any number of threads.
#pragma once

#include <atomic>
#include <thread>

#include "scores.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Backward {
  using A = Accumulate<T>;
  using V = Vec<A>;

  static constexpr int64_t group = kGroup<A>;
  static constexpr int64_t tile_queries = 64 / group * group, tile_keys = kTileKeys;

  struct Workspace {
    A *q, *q_finite, *q_t;     // [tile_queries][dim] twice, [dim][tile_queries]
    A *grad_o, *grad_o_t;      // [tile_queries][dim_v], [dim_v][tile_queries]
    A *k, *k_finite, *v;       // [tile_keys][dim] twice, [tile_keys][dim_v]
    A *p, *ds, *grad_bias;     // [tile_keys][tile_queries]
    A *grad_k, *grad_v;        // [tile_keys][dim], [tile_keys][dim_v]
    A *lse, *delta, *mask;     // [tile_queries], [tile_queries]
  };
  // Of the whole call.
  struct Shared {
    A *delta, *grad_q;                // [batch, heads_q, rows_q], [batch, heads_q, rows_q, dim]
    std::atomic<int64_t>* progress;   // [kv heads][key_tiles], the item that a task is at
  };
  struct Row {
    int64_t b, h, i;
  };

  const AttentionGradParams& grad;
  const AttentionParams& p = grad.forward;
  const int64_t dim = round_up(p.head_dim, group), dim_v = round_up(p.head_dim_v, group);
  const int64_t batch = p.cu_seqlens_q ? 1 : p.sequences;
  const int64_t rows = batch * p.heads_q * p.rows_q;
  const int64_t key_tiles = ceil_div(p.seqlen_k, tile_keys);
  const int64_t query_tiles = ceil_div(min(p.seqlen_q, p.rows_q), tile_queries);
  const int64_t tasks = p.sequences * p.heads_kv * key_tiles;
  const bool plain = plain_scores(p);

  Workspace take_workspace(Arena& arena) const {
    Workspace w;
    for (A** tile : {&w.q, &w.q_finite, &w.q_t}) *tile = arena.take<A>(tile_queries * dim);
    for (A** tile : {&w.grad_o, &w.grad_o_t}) *tile = arena.take<A>(tile_queries * dim_v);
    for (A** tile : {&w.k, &w.k_finite, &w.grad_k}) *tile = arena.take<A>(tile_keys * dim);
    for (A** tile : {&w.v, &w.grad_v}) *tile = arena.take<A>(tile_keys * dim_v);
    for (A** tile : {&w.p, &w.ds, &w.grad_bias}) *tile = arena.take<A>(tile_keys * tile_queries);
    for (A** tile : {&w.lse, &w.delta}) *tile = arena.take<A>(tile_queries);
    w.mask = arena.take<A>(p.mask.data ? 2 * tile_keys * group : 0);
    return w;
  }
  Shared take_shared(Arena& arena) const {
    return {arena.take<A>(rows), arena.take<A>(rows * dim), arena.take<std::atomic<int64_t>>(tasks)};
  }
  int64_t workspace_bytes() const {
    Arena arena(nullptr);
    take_workspace(arena);
    return arena.used(nullptr);
  }

  Row row(int64_t r) const {
    int64_t bh = r / p.rows_q;
    return {bh / p.heads_q, bh % p.heads_q, r % p.rows_q};
  }

  // delta of a row, and its dQ cleared
  void prepare(int64_t r, const Workspace& w, const Shared& shared) const {
    Row at_row = row(r);
    V sums(A(0));
    if (grad.grad_out.data) {
      widen(at<T>(p.out, at_row.b, at_row.h, at_row.i), p.out.dim, p.head_dim_v, dim_v, w.v);
      widen(at<T>(grad.grad_out, at_row.b, at_row.h, at_row.i), grad.grad_out.dim, p.head_dim_v, dim_v, w.grad_o);
      for (int64_t d = 0; d < dim_v; d += V::lanes) sums = sums + V::load(w.v + d) * V::load(w.grad_o + d);
    }
    A delta = 0;
    for (int lane = 0; lane < V::lanes; lane++) delta += sums.v[lane];
    if (grad.grad_lse.data) delta -= *at<A>(grad.grad_lse, at_row.b, at_row.h, at_row.i);
    shared.delta[r] = from_lse(*at<A>(p.lse, at_row.b, at_row.h, at_row.i)).l == A(0) ? A(0) : delta;
    std::memset(static_cast<void*>(shared.grad_q + r * dim), 0, dim * sizeof(A));
  }

  // Queries [i, i + n) of a head. An empty row takes no part, whatever it and its gradient hold.
  void pack_queries(const Sequence& s, int64_t h, int64_t i, int64_t n, const Workspace& w, const Shared& shared) const {
    pack(query_rows<T>(p.query, s, h), i, n, tile_queries, p.head_dim, dim, w.q);
    if (grad.grad_out.data)
      pack(query_rows<T>(grad.grad_out, s, h), i, n, tile_queries, p.head_dim_v, dim_v, w.grad_o);
    else
      std::memset(static_cast<void*>(w.grad_o), 0, tile_queries * dim_v * sizeof(A));
    int64_t r = (s.q_batch * p.heads_q + h) * p.rows_q + s.q_row + i;
    for (int64_t q = 0; q < tile_queries; q++) {
      w.lse[q] = q < n ? *at<A>(p.lse, s.q_batch, h, s.q_row + i + q) : A(0);
      w.delta[q] = q < n ? shared.delta[r + q] : A(0);
      if (from_lse(w.lse[q]).l != A(0)) continue;
      std::memset(static_cast<void*>(w.q + q * dim), 0, dim * sizeof(A));
      std::memset(static_cast<void*>(w.grad_o + q * dim_v), 0, dim_v * sizeof(A));
    }
    make_finite(w.q, tile_queries * dim, w.q_finite);
    transpose(w.q, dim, tile_queries, dim, w.q_t, tile_queries);
    transpose(w.grad_o, dim_v, tile_queries, dim_v, w.grad_o_t, tile_queries);
  }

  // P and dS of one group of queries; column is the group's place in the tile.
  template <bool masked>
  void weigh(const GroupScores<A>& score, int64_t column, int64_t n, const Workspace& w) const {
    const V scale(p.scale);
    unroll<kCols>([&](auto c) {
      int64_t lane = column + c * V::lanes;
      const V lse = V::load(w.lse + lane), delta = V::load(w.delta + lane);
      for (int64_t j = 0; j < n; j++) {
        A *p_at = w.p + j * tile_queries + lane, *ds_at = w.ds + j * tile_queries + lane;
        V dot = V::load(p_at), grad_p = V::load(ds_at);
        V capped = masked ? score.capped(dot) : dot * scale;
        V s = masked ? score(j, c, capped) : capped;
        V p = weight(s, lse);
        V ds = p * (grad_p - delta);
        if (masked) {
          ds = select(s == V(kHidden), V(A(0)), ds);
          ds.store(w.grad_bias + j * tile_queries + lane);
          ds = ds * score.capped_slope(capped);
        }
        p.store(p_at);
        ds.store(ds_at);
      }
    });
  }

  void run_tile(int64_t task, const Workspace& w, const Shared& shared) const {
    int64_t tile = task % key_tiles, kv_head = task / key_tiles % p.heads_kv, b = task / key_tiles / p.heads_kv;
    Sequence s = sequence(p, b);
    int64_t j0 = tile * tile_keys, n = min(tile_keys, s.band.kv_len - j0);
    if (n <= 0) return;
    Rows<T> keys = key_rows<T>(p, p.key, s, b, kv_head), values = key_rows<T>(p, p.value, s, b, kv_head);
    pack(keys, j0, n, round_up(n, kRows), p.head_dim, dim, w.k);
    pack(values, j0, n, round_up(n, kRows), p.head_dim_v, dim_v, w.v);
    make_finite(w.k, n * dim, w.k_finite);
    std::memset(static_cast<void*>(w.grad_k), 0, tile_keys * dim * sizeof(A));
    std::memset(static_cast<void*>(w.grad_v), 0, tile_keys * dim_v * sizeof(A));

    int64_t begin = s.band.first_query(j0) / tile_queries, end = min(s.q_len, s.band.end_query(j0 + n));
    for (int64_t g = 0; g < p.group(); g++)
      for (int64_t t = begin; t * tile_queries < end; t++) {
        int64_t h = kv_head * p.group() + g, i = t * tile_queries, queries = min(tile_queries, s.q_len - i);
        pack_queries(s, h, i, queries, w, shared);

        // S^T = K Q^T, dP^T = V dO^T
        multiply(Operand<A>{w.k, dim, 1}, w.q_t, tile_queries, n, tile_queries, p.head_dim,
                 [&](int64_t j, int64_t col, auto c, V sums) { sums.store(w.p + j * tile_queries + col + c * V::lanes); });
        multiply(Operand<A>{w.v, dim_v, 1}, w.grad_o_t, tile_queries, n, tile_queries, p.head_dim_v,
                 [&](int64_t j, int64_t col, auto c, V sums) { sums.store(w.ds + j * tile_queries + col + c * V::lanes); });
        for (int64_t column = 0; column < queries; column += group) {
          int64_t first = i + column, count = min(group, queries - column);
          GroupScores<A> score(p, s, b, h, first, count, j0, n, w.mask);
          if (plain && s.band.verdict(first, first + count, j0, j0 + n) == Verdict::full)
            weigh<false>(score, column, n, w);
          else
            weigh<true>(score, column, n, w);
        }
        if (grad.grad_mask.data) store_grad_mask(b, h, i, queries, j0, n, w);

        // dV += P^T dO, dK += dS^T Q
        add_product(Operand<A>{w.p, tile_queries, 1}, w.grad_o, dim_v, n, p.head_dim_v, queries, w.grad_v);
        add_product(Operand<A>{w.ds, tile_queries, 1}, w.q_finite, dim, n, p.head_dim, queries, w.grad_k);

        // dQ += dS K, when the tile of keys before has passed
        int64_t item = g * query_tiles + t;
        if (tile > 0)
          while (shared.progress[task - 1].load(std::memory_order_acquire) <= item) std::this_thread::yield();
        A* grad_q = shared.grad_q + ((s.q_batch * p.heads_q + h) * p.rows_q + s.q_row + i) * dim;
        add_product(Operand<A>{w.ds, 1, tile_queries}, w.k_finite, dim, queries, p.head_dim, n, grad_q);
        shared.progress[task].store(item + 1, std::memory_order_release);
      }

    for (int64_t j = 0; j < n; j++) {
      narrow(w.grad_k + j * dim, A(p.scale), p.head_dim, at<T>(grad.grad_key, s.k_batch, kv_head, s.k_row + j0 + j), grad.grad_key.dim);
      narrow(w.grad_v + j * dim_v, A(1), p.head_dim_v, at<T>(grad.grad_value, s.k_batch, kv_head, s.k_row + j0 + j), grad.grad_value.dim);
    }
  }

  // to[rows][width] += a b
  static void add_product(Operand<A> a, const A* b, int64_t width, int64_t rows, int64_t cols, int64_t depth, A* to) {
    multiply(a, b, width, rows, cols, depth, [&](int64_t row, int64_t col, auto c, V sums) {
      A* at_row = to + row * width + col + c * V::lanes;
      if (row < rows) (V::load(at_row) + sums).store(at_row);
    });
  }

  void store_grad_mask(int64_t b, int64_t h, int64_t i, int64_t queries, int64_t j0, int64_t n, const Workspace& w) const {
    for (int64_t q = 0; q < queries; q++)
      for (int64_t j = 0; j < n; j++)
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
    Arena arena(nullptr);
    take_shared(arena);
    return arena.used(nullptr) + workers * workspace_bytes();
  }

  void run(char* scratch, const Runner& runner) const {
    Arena arena(scratch + runner.workers * workspace_bytes());
    Shared shared = take_shared(arena);
    for (int64_t task = 0; task < tasks; task++) new (shared.progress + task) std::atomic<int64_t>(0);
    auto workspace = [&](int64_t worker) {
      Arena arena(scratch + worker * workspace_bytes());
      return take_workspace(arena);
    };
    constexpr int64_t chunk = 64;  // rows a task
    auto each_row = [&](auto f) {
      runner.run(ceil_div(rows, chunk), [&](int64_t worker, int64_t index) {
        Workspace w = workspace(worker);
        for (int64_t r = index * chunk; r < min(rows, (index + 1) * chunk); r++) f(r, w);
      });
    };
    each_row([&](int64_t r, const Workspace& w) { prepare(r, w, shared); });
    runner.run(tasks, [&](int64_t worker, int64_t task) {
      run_tile(task, workspace(worker), shared);
      shared.progress[task].store(INT64_MAX, std::memory_order_release);
    });
    each_row([&](int64_t r, const Workspace&) {
      Row at_row = row(r);
      narrow(shared.grad_q + r * dim, A(p.scale), p.head_dim, at<T>(grad.grad_query, at_row.b, at_row.h, at_row.i), grad.grad_query.dim);
    });
    if (grad.grad_sinks) runner.run(p.heads_q, [&](int64_t, int64_t h) { sum_grad_sink(h, shared); });
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
