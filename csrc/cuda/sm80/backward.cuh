// Backward from the log-sum-exp. With P = e^(S - lse) and delta = rowsum(dO * O) - dlse:
//     dV = P^T dO,    dS = P * (dO V^T - delta),    dQ = scale dS K,    dK = scale dS^T Q.
//
// Keys and queries play the same part. A block owns a tile of rows of one side, goes through the tiles of the other
// side that meet it, and keeps the gradients of its rows in registers:
//     own rows   first, second   S, dP                   gradients
//     queries    Q, dO           Q K^T, dO V^T           dQ += dS K
//     keys       K, V            K Q^T, V dO^T           dK += dS^T Q, dV += P^T dO
// Each gradient is summed by one warp in one order: no atomics, the same bits on every run. The price is that S and dP
// are computed twice.
#pragma once

#include "../grad_rows.h"
#include "../rows.cuh"
#include "../scores.cuh"
#include "launch.h"

namespace flashsoftmax::cuda::sm80 {

struct Backward {
  AttentionGradParams grad;
  const GradRow* rows;
  bool query_packs, key_packs, value_packs, grad_out_packs;
  bool grad_query_packs, grad_key_packs, grad_value_packs;

  Backward(const AttentionGradParams& params, const void* scratch)
      : grad(params), rows(static_cast<const GradRow*>(scratch)) {
    const AttentionParams& p = grad.forward;
    const int64_t width = pack_width(p.dtype);
    const auto query_rows = [&](const Tensor4& x) { return rows_pack(x, p.batch(), p.heads_q, p.rows_q, width); };
    const auto key_rows = [&](const Tensor4& x) { return rows_pack(x, p.batch(), p.heads_kv, p.rows_k, width); };
    query_packs = query_rows(p.query);
    key_packs = key_rows(p.key);
    value_packs = key_rows(p.value);
    grad_out_packs = query_rows(grad.grad_out);
    grad_query_packs = query_rows(grad.grad_query) && p.head_dim % width == 0;
    grad_key_packs = key_rows(grad.grad_key) && p.head_dim % width == 0;
    grad_value_packs = key_rows(grad.grad_value) && p.head_dim_v % width == 0;
  }
};

// What a block looks up now and then. It lies in shared memory to leave the registers to the gradients.
struct BackwardBlock {
  Sequence s;
  HeadScores head;              // of the query head at hand
  int64_t kv_head, first_head;  // and its query heads, from first_head on
  int64_t own0, own1;           // the rows of the block
  int64_t begin;                // the rows of the other side that meet them, from the first of a tile on
  int heads, tiles;             // of the other side
  int full_begin, full_end;     // tiles whose rows all meet all rows of the block, at a plain score
  bool plain;
};

// The gradients that a kernel makes. Registers hold two of 128 columns.
enum class Wanted { query, key, value, key_and_value };

template <class T, int kDim, Wanted kWanted> struct BackwardTiles {
  static constexpr bool kOwnsKeys = kWanted != Wanted::query;
  static constexpr int kRowBytes = kDim * sizeof(T);
  static constexpr int kWarps = kRowBytes <= 512 ? 4 : 2, kThreads = kWarps * kWarp;
  static constexpr int kRows = kRowBytes <= (kOwnsKeys ? 128 : 256) ? 2 : 1;  // fragments of 16 rows that a warp owns
  static constexpr int kWarpRows = 16 * kRows;
  static constexpr int kOwn = kWarps * kWarpRows, kOther = kRowBytes <= 256 ? 32 : 16;  // rows of a tile
  static constexpr int kStages = kRowBytes <= 512 ? 2 : 1;                              // tiles of the other side
  static constexpr int kOwnBytes = kOwn * kRowBytes, kOtherBytes = kOther * kRowBytes;
  static constexpr int kQueryBytes = (kOwnsKeys ? kStages * kOther : kOwn) * sizeof(GradRow);
  static constexpr int kSharedBytes = 2 * kOwnBytes + kStages * 2 * kOtherBytes + kQueryBytes + sizeof(BackwardBlock);
  static_assert(kSharedBytes <= 99 * 1024);
};

// Rows [at, at + kRows) of keys and of values, to tiles `bytes` apart.
template <class T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_keys(const Backward& g, const Sequence& s, int64_t kv_head, int64_t at,
                                          uint32_t to, int bytes) {
  const AttentionParams& p = g.grad.forward;
  const int64_t len = s.band.kv_len;
  copy<kRows, kThreads>(Tile<T, kDim>{to}, source<T>(p.key, s.k_batch, kv_head, s.k_row, len, p.head_dim, g.key_packs),
                        at);
  copy<kRows, kThreads>(Tile<T, kDim>{to + bytes},
                        source<T>(p.value, s.k_batch, kv_head, s.k_row, len, p.head_dim_v, g.value_packs), at);
}
// Rows [at, at + kRows) of queries and of dO, and the GradRows.
template <class T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_queries(const Backward& g, const Sequence& s, int64_t h, int64_t at, uint32_t to,
                                             int bytes, uint32_t rows) {
  static_assert(kRows <= kThreads);
  const AttentionParams& p = g.grad.forward;
  const Tensor4& grad_out = g.grad.grad_out;
  const int64_t len = s.q_len, grad_len = grad_out.data ? len : 0;
  copy<kRows, kThreads>(Tile<T, kDim>{to}, source<T>(p.query, s.q_batch, h, s.q_row, len, p.head_dim, g.query_packs),
                        at);
  copy<kRows, kThreads>(Tile<T, kDim>{to + bytes},
                        source<T>(grad_out, s.q_batch, h, s.q_row, grad_len, p.head_dim_v, g.grad_out_packs), at);
  if (const int n = threadIdx.x; n < kRows)
    copy_async_8(rows + n * sizeof(GradRow), g.rows + (s.q_batch * p.heads_q + h) * p.rows_q + s.q_row + at + n,
                 at + n < len ? sizeof(GradRow) : 0);
}

// NaN and infinity become 0, by all threads of a block. Where such a row counts, its scores are not finite and neither
// are their gradients; where it is hidden, the gradient of the score is 0 and must not meet it.
template <int kRows, class T, int kDim> __device__ __forceinline__ void make_finite(Tile<T, kDim> tile) {
  for (int n = threadIdx.x; n < kRows * kDim; n += blockDim.x) {
    T& x = shared<T>(tile.element(n / kDim, n % kDim));
    const float y = static_cast<float>(x);
    if (y - y != 0) x = T(0.0f);
  }
}

// Like for_each and for_each_in_turn, for 16 rows of two fragments.
template <int kColumns, class F>
__device__ __forceinline__ void for_each(float (&s)[kColumns][4], float (&t)[kColumns][4], F&& f) {
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int n = 0; n < 4; n++) f(s[c][n], t[c][n], c, n / 2, n % 2);
}
template <int kColumns, class F>
__device__ __forceinline__ void for_each_in_turn(float (&s)[kColumns][4], float (&t)[kColumns][4], F&& f) {
#pragma unroll 1
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int n = 0; n < 4; n++) {
      f(s[0][n], t[0][n], c, n / 2, n % 2);
      const float first_s = s[0][n], first_t = t[0][n];
#pragma unroll
      for (int next = 1; next < kColumns; next++) {
        s[next - 1][n] = s[next][n];
        t[next - 1][n] = t[next][n];
      }
      s[kColumns - 1][n] = first_s;
      t[kColumns - 1][n] = first_t;
    }
}

// Empty rows become 0, by all threads of a block.
template <int kRows, class T, int kDim>
__device__ __forceinline__ void clear_empty(Tile<T, kDim> tile, uint32_t rows) {
  for (int n = threadIdx.x; n < kRows * kDim; n += blockDim.x)
    if (shared<GradRow>(rows + n / kDim * sizeof(GradRow)).lse == kHidden)
      shared<T>(tile.element(n / kDim, n % kDim)) = T(0.0f);
}

// The gradient of the queries of a sequence that cannot be computed: its rows [first, first + rows), and so on in steps.
template <class T>
__device__ void write_nan(const AttentionGradParams& grad, const Sequence& s, int64_t h, int64_t first, int64_t rows,
                          int64_t step) {
  for (; first < s.q_len; first += step)
    for (int64_t i = first + threadIdx.x; i < min(first + rows, s.q_len); i += blockDim.x) {
      T* to = static_cast<T*>(grad.grad_query.data) + grad.grad_query.offset(s.q_batch, h, s.q_row + i);
      for (int64_t d = 0; d < grad.forward.head_dim; d++) to[d * grad.grad_query.dim] = T(NAN);
    }
}

// A warp's rows, through its part of a tile that no other warp reads any more.
template <class T, int kDim, int kRows>
__device__ __forceinline__ void write_gradient(Fragment<kRows, kDim / 8>& x, float scale, Tile<T, kDim> tile,
                                               const Tensor4& to, int64_t b, int64_t h, int64_t row, int64_t rows,
                                               int64_t dims, bool packs) {
  const int tile_row = warp_id() * 16 * kRows;
  for_each(x, [&](float& y, int, int, int, int) { y *= scale; });
  put(tile, tile_row, x);
  __syncwarp();
  T* data = static_cast<T*>(to.data) + to.offset(b, h, row);
  write(Target<T>{data, to.row, to.dim, static_cast<int>(dims), packs}, tile, tile_row, static_cast<int>(rows));
}

template <class T, int kDim, Wanted kWanted>
__global__ void __launch_bounds__(BackwardTiles<T, kDim, kWanted>::kThreads, 2)
    backward_kernel(const __grid_constant__ Backward g, int64_t tiles) {
  using Tiles = BackwardTiles<T, kDim, kWanted>;
  constexpr bool kOwnsKeys = Tiles::kOwnsKeys;
  constexpr bool kGradValue = kWanted == Wanted::value || kWanted == Wanted::key_and_value;
  constexpr bool kGradFirst = kWanted != Wanted::value;  // of queries or keys
  constexpr int kRows = Tiles::kRows, kOwn = Tiles::kOwn, kOther = Tiles::kOther, kColumns = kOther / 8;
  constexpr int kThreads = Tiles::kThreads, kStages = Tiles::kStages;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, kDim> own_first{shared_address(memory)}, own_second{own_first.base + Tiles::kOwnBytes};
  const uint32_t others = own_second.base + Tiles::kOwnBytes, rows = others + kStages * 2 * Tiles::kOtherBytes;
  BackwardBlock& block = *reinterpret_cast<BackwardBlock*>(memory + Tiles::kSharedBytes - sizeof(BackwardBlock));
  const AttentionGradParams& grad = g.grad;
  const AttentionParams& p = grad.forward;
  const int own_row = warp_id() * Tiles::kWarpRows;  // the warp's first, in the block's tile

  // The block's tile. Those of a head are neighbours, the one with the most work under a causal mask first.
  {
    const int64_t group = p.group(), heads = kOwnsKeys ? 1 : group;
    const int64_t unit = blockIdx.x / heads / tiles, b = unit / p.heads_kv, kv_head = unit % p.heads_kv;
    const int64_t tile = blockIdx.x / heads % tiles, own0 = (kOwnsKeys ? tile : tiles - 1 - tile) * kOwn;
    const int64_t first_head = kv_head * group + blockIdx.x % heads;
    const Sequence s = sequence(p, b);
    if (!s.valid) {
      if (!kOwnsKeys) write_nan<T>(grad, s, first_head, own0, kOwn, tiles * kOwn);
      return;
    }
    const int64_t own1 = min(own0 + kOwn, kOwnsKeys ? s.band.kv_len : s.q_len);
    if (own0 >= own1) return;
    const int64_t begin = (kOwnsKeys ? s.band.first_query(own0) : s.band.first(own0)) / kOther * kOther;
    const int64_t end = kOwnsKeys ? min(s.q_len, s.band.end_query(own1)) : s.band.end(own1 - 1);
    const int64_t full_begin = kOwnsKeys ? s.band.first_query(own1 - 1) : s.band.first(own1 - 1);
    const int64_t full_end = kOwnsKeys ? min(s.q_len, s.band.end_query(own0 + 1)) : s.band.end(own0);
    const int64_t other_tiles = begin < end ? (end - begin + kOther - 1) / kOther : 0;
    const HeadScores head = head_scores(p, s.band, s.q_batch, first_head);
    if (threadIdx.x == 0)
      block = {
          s,
          head,
          kv_head,
          first_head,
          own0,
          own1,
          begin,
          static_cast<int>(group / heads),
          static_cast<int>(other_tiles),
          static_cast<int>(min((full_begin - begin + kOther - 1) / kOther, other_tiles)),
          head.plain && full_begin < full_end ? static_cast<int>(min((full_end - begin) / kOther, other_tiles)) : 0,
          head.plain};
    __syncthreads();
  }
  const Sequence& s = block.s;
  const auto copy_others = [&](int stage, int64_t h, int64_t at) {
    const uint32_t to = others + stage * 2 * Tiles::kOtherBytes;
    if constexpr (kOwnsKeys)
      copy_queries<T, kDim, kOther, kThreads>(g, s, h, at, to, Tiles::kOtherBytes,
                                              rows + stage * kOther * sizeof(GradRow));
    else
      copy_keys<T, kDim, kOther, kThreads>(g, s, block.kv_head, at, to, Tiles::kOtherBytes);
    commit_copies();
  };
  if constexpr (kOwnsKeys)
    copy_keys<T, kDim, kOwn, kThreads>(g, s, block.kv_head, block.own0, own_first.base, Tiles::kOwnBytes);
  else
    copy_queries<T, kDim, kOwn, kThreads>(g, s, block.first_head, block.own0, own_first.base, Tiles::kOwnBytes, rows);
  copy_others(0, block.first_head, block.begin);

  Fragment<kRows, kDim / 8> grad_first, grad_value;
  if constexpr (kGradFirst) grad_first.fill(0);
  if constexpr (kGradValue) grad_value.fill(0);
  int stage = 0;
#pragma unroll 1
  for (int head = 0; head < block.heads; head++)
#pragma unroll 1
    for (int tile = 0; tile < block.tiles; tile++) {
      const Tile<T, kDim> first{others + stage * 2 * Tiles::kOtherBytes}, second{first.base + Tiles::kOtherBytes};
      const uint32_t queries = rows + stage * kOther * sizeof(GradRow);  // of the other side
      const int64_t h = block.first_head + head, at = block.begin + int64_t(tile) * kOther;
      const auto copy_next = [&] {
        const bool last = tile + 1 == block.tiles;
        if (!last || head + 1 < block.heads)
          copy_others(kStages == 2 ? stage ^ 1 : 0, last ? h + 1 : h, last ? block.begin : at + kOther);
      };

      // This tile is here, and all warps are done with the one before.
      wait_for_copies<0>();
      bool some_empty = false;  // queries that take no part, whatever they and their gradients hold
      if constexpr (kOwnsKeys) {
        const int n = threadIdx.x;
        some_empty = __syncthreads_or(n < kOther && shared<GradRow>(queries + n * sizeof(GradRow)).lse == kHidden);
      } else {
        __syncthreads();
      }
      if (kStages == 2) copy_next();
      if (some_empty) {
        clear_empty<kOther>(first, queries);
        clear_empty<kOther>(second, queries);
        __syncthreads();
      }

      if (kOwnsKeys && !block.plain && tile == 0) {
        if (threadIdx.x == 0) block.head = head_scores(p, s.band, s.q_batch, h);
        __syncthreads();
      }

      // How the warp's rows meet the tile.
      const bool full = block.full_begin <= tile && tile < block.full_end && !some_empty;  // those of all warps
      const int64_t w0 = block.own0 + own_row, w1 = min(w0 + Tiles::kWarpRows, block.own1);
      Verdict verdict = Verdict::full;
      if (!full) {
        const int64_t end = min(at + kOther, kOwnsKeys ? s.q_len : s.band.kv_len);
        verdict = w0 >= w1    ? Verdict::skip
                  : kOwnsKeys ? s.band.verdict(at, end, w0, w1)
                              : s.band.verdict(w0, w1, at, end);
        if (verdict == Verdict::full && (!block.plain || some_empty || end < at + kOther)) verdict = Verdict::partial;
      }

      // S and dP.
      Fragment<kRows, kColumns> weights, grads;
      weights.fill(0);
      grads.fill(0);
      if (verdict != Verdict::skip) {
        multiply_transposed(weights, own_first, own_row, first, 0, static_cast<int>(p.head_dim));
        if constexpr (kGradFirst)
          multiply_transposed(grads, own_second, own_row, second, 0, static_cast<int>(p.head_dim_v));
      }

      // P and dS.
      const auto row_of = [&](int r, int c, int half, int e) -> const GradRow& {
        const int n = kOwnsKeys ? fragment_column(c, e) : own_row + fragment_row(r, half);
        return shared<GradRow>((kOwnsKeys ? queries : rows) + n * sizeof(GradRow));
      };
      const auto visible_to = [&](int r, int half) {
        const int64_t own = w0 + fragment_row(r, half);
        Range range = kOwnsKeys ? queries_of(s.band, own, at) : keys_of(s.band, own, at);
        if (kOwnsKeys) range.end = ::min(range.end, near(s.q_len - at));
        return own < w1 ? range : Range{0, 0};
      };
      bool spoils = false;  // a score that is hidden is not finite
      const auto hide = [&](float& x, float& ds) {
        spoils = spoils || x - x != 0;
        x = ds = 0;
      };
      const auto weigh_plain = [&](auto edge) {
        constexpr bool kEdge = decltype(edge)::value;
        const float scale = block.head.score.scale;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          Range visible[2];
          if constexpr (kEdge) visible[0] = visible_to(r, 0), visible[1] = visible_to(r, 1);
          for_each(weights.x[r], grads.x[r], [&](float& x, float& ds, int c, int half, int e) {
            const GradRow& row = row_of(r, c, half, e);
            if (kEdge && (!visible[half].holds(fragment_column(c, e)) || row.lse == kHidden)) return hide(x, ds);
            x = weight_for<T>(__fmul_rn(x, scale), row.lse);  // not contracted: lse is made of rounded scores
            ds = x * (ds - row.delta);
          });
        }
      };
      if (verdict == Verdict::full) {
        weigh_plain(std::false_type());
      } else if (verdict == Verdict::partial && block.plain) {
        weigh_plain(std::true_type());
      } else if (verdict == Verdict::partial) {
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          const Range visible[2] = {visible_to(r, 0), visible_to(r, 1)};
          for_each_in_turn(weights.x[r], grads.x[r], [&](float& x, float& ds, int c, int half, int e) {
            const int64_t own = w0 + opaque(fragment_row(r, half)), other = at + opaque(fragment_column(c, e));
            const int64_t i = kOwnsKeys ? other : own, j = kOwnsKeys ? own : other;
            const GradRow row = row_of(r, c, half, e);
            const bool shown = visible[half].holds(fragment_column(c, e)) && row.lse != kHidden;
            const float content = block.head.score.content(x), score = shown ? block.head.at(content, i, j) : kHidden;
            if (score == kHidden) return hide(x, ds);
            x = weight_for<T>(score, row.lse);
            ds = x * (ds - row.delta);
            if (!kOwnsKeys && grad.grad_mask.data) {
              float* to = static_cast<float*>(grad.grad_mask.data) + grad.grad_mask.offset(s.q_batch, h, i);
              to[j * grad.grad_mask.dim] = ds;
            }
            ds *= block.head.score.content_slope(content);
          });
        }
      }
      if (kGradFirst && !full && __syncthreads_or(spoils)) {
        make_finite<kOther>(first);
        __syncthreads();
      }

      // dV += P^T dO, then dK += dS^T Q or dQ += dS K.
      if (verdict != Verdict::skip) {
        if constexpr (kGradValue) multiply(grad_value, Operand<T, kRows, kColumns>(weights), second, 0);
        if constexpr (kGradFirst) multiply(grad_first, Operand<T, kRows, kColumns>(grads), first, 0);
      }
      if constexpr (kStages == 1) {
        __syncthreads();
        copy_next();
      } else {
        stage ^= 1;
      }
    }

  wait_for_copies<0>();
  __syncthreads();
  const float scale = static_cast<float>(p.scale);
  const int64_t w0 = block.own0 + own_row, w1 = min(w0 + Tiles::kWarpRows, block.own1);
  if (w0 >= w1) return;
  if constexpr (kOwnsKeys) {
    if constexpr (kGradFirst)
      write_gradient(grad_first, scale, own_first, grad.grad_key, s.k_batch, block.kv_head, s.k_row + w0, w1 - w0,
                     p.head_dim, g.grad_key_packs);
    if constexpr (kGradValue)
      write_gradient(grad_value, 1, own_second, grad.grad_value, s.k_batch, block.kv_head, s.k_row + w0, w1 - w0,
                     p.head_dim_v, g.grad_value_packs);
  } else {
    for_each(grad_first, [&](float& x, int r, int, int half, int) {
      if (shared<GradRow>(rows + (own_row + fragment_row(r, half)) * sizeof(GradRow)).lse == kHidden) x = 0;
    });
    write_gradient(grad_first, scale, own_first, grad.grad_query, s.q_batch, block.first_head, s.q_row + w0, w1 - w0,
                   p.head_dim, g.grad_query_packs);
  }
}

template <class T, int kDim, Wanted kWanted> void launch_backward(const Backward& g, cudaStream_t stream) {
  using Tiles = BackwardTiles<T, kDim, kWanted>;
  const AttentionParams& p = g.grad.forward;
  const int64_t rows = Tiles::kOwnsKeys ? p.seqlen_k : min(p.seqlen_q, p.rows_q);
  const int64_t tiles = (rows + Tiles::kOwn - 1) / Tiles::kOwn;
  const int64_t blocks = tiles * p.sequences * (Tiles::kOwnsKeys ? p.heads_kv : p.heads_q);
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::invalid_argument("query: more than 2^31 tiles of queries or keys on CUDA");
  const auto kernel = backward_kernel<T, kDim, kWanted>;
  check("backward", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::kSharedBytes));
  kernel<<<blocks, Tiles::kThreads, Tiles::kSharedBytes, stream>>>(g, tiles);
  check("backward", cudaGetLastError());
}

template <int kHeadDim> void backward(const AttentionGradParams& grad, void* scratch, cudaStream_t stream) {
  const Backward g(grad, scratch);
  for_dtype("query", grad.forward.dtype, [&](auto element) {
    using T = decltype(element);
    launch_backward<T, kHeadDim, Wanted::query>(g, stream);
    if constexpr (kHeadDim <= 128) {
      launch_backward<T, kHeadDim, Wanted::key_and_value>(g, stream);
    } else {
      launch_backward<T, kHeadDim, Wanted::key>(g, stream);
      launch_backward<T, kHeadDim, Wanted::value>(g, stream);
    }
  });
}

}  // namespace flashsoftmax::cuda::sm80
