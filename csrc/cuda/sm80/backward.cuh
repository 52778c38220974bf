// The backward, from the log-sum-exp of the forward. With P = e^(S - lse) and delta = rowsum(dO * O) - dlse:
//     dV = P^T dO,    dS = P * (dO V^T - delta),    dQ = scale dS K,    dK = scale dS^T Q.
//
// One kernel text serves queries and keys. A block owns a tile of rows of one side, loops over the tiles of the other
// side that meet it, and keeps the gradients of its rows in registers:
//     own rows   own_qk, own_vdo   S, dP                  gradients
//     queries    Q, dO             Q K^T, dO V^T          dQ += dS K
//     keys       K, V              K Q^T, V dO^T          dK += dS^T Q, dV += P^T dO
// Each gradient is summed by one warp in one order: no atomics, and the same bits on every run. The price is that S and
// dP are computed twice.
//
// Where weights are dropped, P in dV and dO V^T in dS are multiplied by the factors of the weights, 0 or kept_scale.
#pragma once

#include "../backward_rows.h"
#include "../bias_sum.h"
#include "../elements.cuh"
#include "../kept.cuh"
#include "../rows.cuh"
#include "../scores.cuh"
#include "launch.h"

namespace flashsoftmax::cuda::sm80 {

struct BackwardParams {
  AttentionBackwardParams args;
  const BackwardRow* rows;
  Alignment aligned;
  bool grad_out_aligned, grad_query_aligned, grad_key_aligned, grad_value_aligned;

  BackwardParams(const AttentionBackwardParams& args, const void* scratch)
      : args(args), rows(static_cast<const BackwardRow*>(scratch)), aligned(args.forward) {
    const AttentionParams& f = args.forward;
    grad_out_aligned = aligned.q_rows(f, args.grad_out, f.head_dim_v);
    grad_query_aligned = aligned.q_rows(f, args.grad_query, f.head_dim);
    grad_key_aligned = aligned.kv_rows(f, args.grad_key, f.head_dim);
    grad_value_aligned = aligned.kv_rows(f, args.grad_value, f.head_dim_v);
  }
};

// What a block looks up now and then, in shared memory to leave the registers to the gradients.
struct BackwardBlock {
  Sequence seq;
  Visibility visible;           // to any of the block's query heads
  HeadScores head;              // of the query head at hand
  KeptWeights kept;             // likewise, if some weights are dropped
  int64_t b;                    // the sequence
  int64_t kv_head, first_head;  // the key head, and the first of its query heads that the block goes through
  int64_t own0, own1;           // the block's own rows
  int64_t begin;                // the first row of the first tile of the other side
  int heads, tiles;             // query heads, and tiles of the other side, that the block goes through
  int full_begin, full_end;     // tiles of which all rows meet all rows of the block, with plain scores
  bool plain;                   // and no mask hides keys
  bool plain_scores;
};

// The gradients that a kernel makes. Registers hold two of 128 columns.
enum class Wanted { query, key, value, key_and_value, bias };

template <class T, int kHeadDim, Wanted kWanted> struct BackwardShape {
  static constexpr bool kSumsBias = kWanted == Wanted::bias;
  static constexpr bool kOwnsKeys = kWanted != Wanted::query && !kSumsBias;
  static constexpr bool kMakesDv = kWanted == Wanted::value || kWanted == Wanted::key_and_value;
  static constexpr bool kMakesDqk = kWanted != Wanted::value && !kSumsBias;  // dQ or dK
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr int kWarps = kRowBytes <= 512 ? 4 : 2, kThreads = kWarps * kWarp;
  static constexpr int kStrips = !kSumsBias && kRowBytes <= (kOwnsKeys ? 128 : 256) ? 2 : 1, kWarpRows = 16 * kStrips;
  static constexpr int kOwn = kWarps * kWarpRows;  // rows of the block's own tile
  // Rows of a tile of the other side, and such tiles in shared memory.
  static constexpr int kOther = kSumsBias ? (kRowBytes <= 256   ? 64
                                             : kRowBytes <= 512 ? 32
                                                                : 16)
                                          : (kRowBytes <= 256 ? 32 : 16);
  static constexpr int kStages = !kSumsBias && kRowBytes <= 512 ? 2 : 1;
  static constexpr int kBlocksPerSM = 2;

  // Shared memory: own_qk and own_vdo; qk and vdo of each stage; the BackwardRows of the queries; the BackwardBlock.
  static constexpr int kOwnBytes = kOwn * kRowBytes, kOtherBytes = kOther * kRowBytes;
  static constexpr int kRowsAt = 2 * kOwnBytes + kStages * 2 * kOtherBytes;
  static constexpr int kBlockAt = kRowsAt + (kOwnsKeys ? kStages * kOther : kOwn) * int(sizeof(BackwardRow));
  static constexpr int kSharedBytes = kBlockAt + sizeof(BackwardBlock);
  static_assert(kSharedBytes <= 99 * 1024);
};

// The addresses of a block's tiles, and of the BackwardRows of its queries, in shared memory.
template <class T, int kHeadDim, Wanted kWanted> struct BackwardSmem {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  uint32_t base;

  // [kOwn][kHeadDim]
  __device__ __forceinline__ Tile<T, kHeadDim> own_qk() const { return {base}; }
  __device__ __forceinline__ Tile<T, kHeadDim> own_vdo() const { return {base + Shape::kOwnBytes}; }
  // [kOther][kHeadDim]
  __device__ __forceinline__ Tile<T, kHeadDim> qk(int stage) const {
    return {base + 2 * Shape::kOwnBytes + stage * 2 * Shape::kOtherBytes};
  }
  __device__ __forceinline__ Tile<T, kHeadDim> vdo(int stage) const { return {qk(stage).base + Shape::kOtherBytes}; }
  // [kOwn] if the block owns queries, else [kOther]
  __device__ __forceinline__ uint32_t rows(int stage) const {
    const uint32_t rows = base + Shape::kRowsAt;
    return Shape::kOwnsKeys ? rows + stage * Shape::kOther * int(sizeof(BackwardRow)) : rows;
  }
};

// Number n of the BackwardRows at an address in shared memory.
__device__ __forceinline__ const BackwardRow& row_at(uint32_t rows, int n) {
  return shared<BackwardRow>(rows + n * sizeof(BackwardRow));
}

// Copies rows [at, at + kRows) of keys and of values to the tiles k_smem and v_smem. If some lie before row 0, they are
// copied by elements: only that path of `copy` leaves them out.
template <int kRows, int kThreads, class T, int kHeadDim>
__device__ __forceinline__ void copy_keys(const BackwardParams& params, const BackwardBlock& block, int64_t at,
                                          Tile<T, kHeadDim> k_smem, Tile<T, kHeadDim> v_smem) {
  const AttentionParams& forward = params.args.forward;
  const Sequence& seq = block.seq;
  const int64_t len = seq.band.kv_len;
  const bool k_aligned = params.aligned.key && at >= 0, v_aligned = params.aligned.value && at >= 0;
  copy<kRows, kThreads>(
      k_smem, source<T>(forward.key, seq.k_batch, block.kv_head, seq.k_row, len, forward.head_dim, k_aligned), at);
  copy<kRows, kThreads>(
      v_smem, source<T>(forward.value, seq.k_batch, block.kv_head, seq.k_row, len, forward.head_dim_v, v_aligned), at);
}
// Copies rows [at, at + kRows) of the queries of head h, of dO and of the BackwardRows.
template <int kRows, int kThreads, class T, int kHeadDim>
__device__ __forceinline__ void copy_queries(const BackwardParams& params, const BackwardBlock& block, int64_t h,
                                             int64_t at, Tile<T, kHeadDim> q_smem, Tile<T, kHeadDim> do_smem,
                                             uint32_t rows) {
  static_assert(kRows <= kThreads);
  const AttentionParams& forward = params.args.forward;
  const Tensor4& grad_out = params.args.grad_out;
  const Sequence& seq = block.seq;
  const int64_t len = seq.q_len, grad_len = grad_out.data ? len : 0;
  copy<kRows, kThreads>(
      q_smem, source<T>(forward.query, seq.q_batch, h, seq.q_row, len, forward.head_dim, params.aligned.query), at);
  copy<kRows, kThreads>(
      do_smem, source<T>(grad_out, seq.q_batch, h, seq.q_row, grad_len, forward.head_dim_v, params.grad_out_aligned),
      at);
  if (const int n = threadIdx.x; n < kRows)
    copy_async_if(at + n < len, rows + n * sizeof(BackwardRow),
                  params.rows + (seq.q_batch * forward.heads_q + h) * forward.rows_q + seq.q_row + at + n);
}

// Copies the block's own rows; and the rows from `at` on of the other side, for query head h, to a stage.
template <class T, int kHeadDim, Wanted kWanted>
__device__ __forceinline__ void copy_own(const BackwardParams& params, const BackwardBlock& block,
                                         const BackwardSmem<T, kHeadDim, kWanted>& smem) {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  constexpr int kRows = Shape::kOwn, kThreads = Shape::kThreads;
  if constexpr (Shape::kOwnsKeys)
    copy_keys<kRows, kThreads>(params, block, block.own0, smem.own_qk(), smem.own_vdo());
  else
    copy_queries<kRows, kThreads>(params, block, block.first_head, block.own0, smem.own_qk(), smem.own_vdo(),
                                  smem.rows(0));
}
template <class T, int kHeadDim, Wanted kWanted>
__device__ __forceinline__ void copy_other(const BackwardParams& params, const BackwardBlock& block,
                                           const BackwardSmem<T, kHeadDim, kWanted>& smem, int stage, int64_t h,
                                           int64_t at) {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  constexpr int kRows = Shape::kOther, kThreads = Shape::kThreads;
  if constexpr (Shape::kOwnsKeys)
    copy_queries<kRows, kThreads>(params, block, h, at, smem.qk(stage), smem.vdo(stage), smem.rows(stage));
  else
    copy_keys<kRows, kThreads>(params, block, at, smem.qk(stage), smem.vdo(stage));
  commit_copies();
}

// Replaces NaN and infinity in a tile by 0, by all threads of a block. If such a row is visible, its scores and so the
// gradients are not finite anyway; if it is hidden, its dS is 0, and 0 * NaN must not reach the sum.
template <int kRows, class T, int kHeadDim> __device__ __forceinline__ void make_finite(Tile<T, kHeadDim> tile) {
  for (int n = threadIdx.x; n < kRows * kHeadDim; n += blockDim.x) {
    T& x = shared<T>(tile.element(n / kHeadDim, n % kHeadDim));
    const float y = static_cast<float>(x);
    if (y - y != 0) x = T(0.0f);
  }
}

// Waits until a tile of the other side has arrived and all warps are done with the one before. Returns whether it has
// queries that see no key: neither they nor their dO may reach a sum.
template <class Shape> __device__ __forceinline__ bool wait_for_tile(uint32_t rows) {
  wait_for_copies<0>();
  if constexpr (Shape::kOwnsKeys) {
    const int n = threadIdx.x;
    return __syncthreads_or(n < Shape::kOther && row_at(rows, n).lse == kHidden);
  } else {
    __syncthreads();
    return false;
  }
}

// Replaces the queries that see no key, and their dO, by 0: by all threads of a block.
template <int kRows, class T, int kHeadDim>
__device__ __forceinline__ void clear_empty(Tile<T, kHeadDim> q_smem, Tile<T, kHeadDim> do_smem, uint32_t rows) {
  for (const Tile<T, kHeadDim> tile : {q_smem, do_smem})
    for (int n = threadIdx.x; n < kRows * kHeadDim; n += blockDim.x)
      if (row_at(rows, n / kHeadDim).lse == kHidden) shared<T>(tile.element(n / kHeadDim, n % kHeadDim)) = T(0.0f);
  __syncthreads();
}

// Fills `block`. Returns whether it has gradients to compute. The tiles of a head are neighbours, the one with the most
// work under a causal mask first.
template <class Shape, class T>
__device__ __forceinline__ bool locate(const BackwardParams& params, int64_t tiles, BackwardBlock& block) {
  constexpr bool kOwnsKeys = Shape::kOwnsKeys;
  constexpr int kOwn = Shape::kOwn, kOther = Shape::kOther;
  const AttentionBackwardParams& args = params.args;
  const AttentionParams& forward = args.forward;
  const int64_t group = forward.group(), heads = kOwnsKeys ? 1 : group;  // heads: blocks that differ in the query head
  const int64_t unit = blockIdx.x / heads / tiles, b = unit / forward.heads_kv, kv_head = unit % forward.heads_kv;
  const int64_t nth = blockIdx.x / heads % tiles, tile = kOwnsKeys ? nth : tiles - 1 - nth, own0 = tile * kOwn;
  const int64_t first_head = kv_head * group + blockIdx.x % heads;
  const Sequence seq = sequence(forward, b);
  if (!seq.valid) {
    if (!kOwnsKeys)
      write_nan<T>(args.grad_query, seq.q_batch, first_head, seq.q_row, seq.q_len, forward.head_dim, tile, tiles);
    return false;
  }
  const Band& band = seq.band;
  const int64_t own1 = min(own0 + kOwn, kOwnsKeys ? band.kv_len : seq.q_len);
  if (own0 >= own1) return false;
  const int64_t begin = (kOwnsKeys ? band.first_query(own0) : band.first(own0)) / kOther * kOther;
  const int64_t end = kOwnsKeys ? min(seq.q_len, band.end_query(own1)) : band.end(own1 - 1);
  const int64_t full_begin = kOwnsKeys ? band.first_query(own1 - 1) : band.first(own1 - 1);
  const int64_t full_end = kOwnsKeys ? min(seq.q_len, band.end_query(own0 + 1)) : band.end(own0);
  const int64_t other_tiles = begin < end ? (end - begin + kOther - 1) / kOther : 0;
  const HeadScores head = head_scores(forward, seq, first_head);
  if (threadIdx.x == 0)
    block = {seq,
             visibility(forward, seq, seq.q_batch, first_head, group / heads),
             head,
             forward.drops_weights() ? kept_weights(forward, b, first_head) : KeptWeights{},
             b,
             kv_head,
             first_head,
             own0,
             own1,
             begin,
             static_cast<int>(group / heads),
             static_cast<int>(other_tiles),
             static_cast<int>(min((full_begin - begin + kOther - 1) / kOther, other_tiles)),
             head.plain && full_begin < full_end ? static_cast<int>(min((full_end - begin) / kOther, other_tiles)) : 0,
             head.plain,
             forward.plain_scores()};
  __syncthreads();
  return true;
}

// The verdict of the map of the mask on rows [own0, own1) of the block's side, and the tile of the other side from `at`
// on. By all lanes of a warp together.
template <class Shape>
__device__ __forceinline__ Verdict map_verdict(const BackwardBlock& block, int64_t own0, int64_t own1, int64_t at) {
  const Visibility& visible = block.visible;
  const int64_t end = min(at + Shape::kOther, Shape::kOwnsKeys ? block.seq.q_len : visible.band.kv_len);
  return Shape::kOwnsKeys ? warp_verdict(visible, at, end, own0, own1) : warp_verdict(visible, own0, own1, at, end);
}
// The first tile of the other side from `tile` on that the mask does not hide from the block; block.tiles if none.
template <class Shape> __device__ __forceinline__ int next_shown(const BackwardBlock& block, int tile) {
  if (!block.visible.map) return tile;
#pragma unroll 1
  for (; tile < block.tiles; tile++) {
    const int64_t at = block.begin + int64_t(tile) * Shape::kOther;
    if (map_verdict<Shape>(block, block.own0, block.own1, at) != Verdict::skip) break;
  }
  return tile;
}

// A warp's rows of a block and one tile of the other side: which elements are visible, and what becomes of S and dP.
template <class T, int kHeadDim, Wanted kWanted> struct BackwardScores {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  static constexpr bool kOwnsKeys = Shape::kOwnsKeys;
  static constexpr int kStrips = Shape::kStrips, kColumns = Shape::kOther / 8;
  using Scores = Fragment<kStrips, kColumns>;  // [kWarpRows][kOther]

  const BackwardParams& params;
  const BackwardBlock& block;
  uint32_t rows;       // BackwardRows: of the block if it owns queries, else of the tile
  int own_row;         // the warp's first row in the block's tile
  int64_t w0, w1, at;  // the warp's rows, and the first row of the tile
  int64_t h;           // the query head

  __device__ __forceinline__ Verdict verdict(bool some_empty) const {
    const Band& band = block.seq.band;
    const int64_t end = min(at + Shape::kOther, kOwnsKeys ? block.seq.q_len : band.kv_len);
    Verdict verdict = w0 >= w1    ? Verdict::skip
                      : kOwnsKeys ? band.verdict(at, end, w0, w1)
                                  : band.verdict(w0, w1, at, end);
    if (verdict != Verdict::skip && block.visible.map) verdict = joined(verdict, map_verdict<Shape>(block, w0, w1, at));
    if (verdict == Verdict::full && (!block.plain_scores || some_empty || end < at + Shape::kOther))
      verdict = Verdict::partial;
    return verdict;
  }
  // The columns of the tile that meet a row of the warp.
  __device__ __forceinline__ Range visible_to(int r, int half) const {
    const int64_t own = w0 + fragment_row(r, half);
    Range range = kOwnsKeys ? queries_of(block.seq.band, own, at) : keys_of(block.seq.band, own, at);
    if (kOwnsKeys) range.end = ::min(range.end, clamp_to_int(block.seq.q_len - at));
    return own < w1 ? range : Range{0, 0};
  }
  __device__ __forceinline__ const BackwardRow& row_of(int r, int c, int half, int e) const {
    return row_at(rows, kOwnsKeys ? fragment_column(c, e) : own_row + fragment_row(r, half));
  }
  // Which elements are kept: kStripBits bits per strip, as kept_in_strip has them.
  static constexpr int kStripBits = 4 * kColumns;
  __device__ __forceinline__ uint32_t kept() const {
    static_assert(kStrips * kStripBits <= 32);
    if (Shape::kSumsBias && at % 8 != 0) return kept_one_by_one();
    uint32_t found = 0;
#pragma unroll
    for (int r = 0; r < kStrips; r++) {
      const int64_t own = w0 + 16 * r;
      found |= kept_in_strip<kColumns, kOwnsKeys>(block.kept, kOwnsKeys ? at : own, kOwnsKeys ? own : at)
               << r * kStripBits;
    }
    return found;
  }
  // The same for a tile whose first key may be any: one call of the generator per element.
  __device__ __forceinline__ uint32_t kept_one_by_one() const {
    uint32_t found = 0;
#pragma unroll 1
    for (int n = 0; n < kStripBits; n++) {
      const uint32_t i = uint32_t(w0 + fragment_row(0, n / 2 % 2)), j = uint32_t(at + fragment_column(n / 4, n % 2));
      found |= (block.kept.bits(i, j & ~3u) >> j % 4 & 1) << n;
    }
    return found;
  }
  __device__ __forceinline__ static void keep_elements(Scores& x, uint32_t kept, float scale) {
#pragma unroll
    for (int r = 0; r < kStrips; r++) keep(x.x[r], kept >> r * kStripBits, scale);
  }
  // Hides an element. spoils becomes true if its product is NaN or infinite.
  __device__ __forceinline__ static void hide(float& s, float& dp, bool& spoils) {
    spoils = spoils || s - s != 0;
    s = dp = 0;
  }

  // Plain scores: S becomes P and dP becomes dS, in place. kEdge: some elements are hidden.
  template <bool kEdge> __device__ __forceinline__ void weigh_plain(Scores& s, Scores& dp, bool& spoils) const {
    const float scale = block.head.score.scale;
#pragma unroll
    for (int r = 0; r < kStrips; r++) {
      Range visible[2];
      if constexpr (kEdge) visible[0] = visible_to(r, 0), visible[1] = visible_to(r, 1);
      for_each(s.x[r], dp.x[r], [&](float& x, float& ds, int c, int half, int e) {
        const BackwardRow& row = row_of(r, c, half, e);
        if (kEdge && (!visible[half].holds(fragment_column(c, e)) || row.lse == kHidden)) return hide(x, ds, spoils);
        // The score is rounded before lse is subtracted, as it was in the forward.
        x = weight_in_row<T>(__fmul_rn(x, scale), row.lse, row.lse_error);
        ds = x * (ds - row.delta);
      });
    }
  }

  // Other scores: likewise. For the gradient of a bias, dS is the derivative by the score; for the others, by the
  // product scale * q.k.
  __device__ __forceinline__ void weigh(Scores& s, Scores& dp, bool& spoils) const {
#pragma unroll
    for (int r = 0; r < kStrips; r++) {
      const Range visible[2] = {visible_to(r, 0), visible_to(r, 1)};
      for_each_rotating(s.x[r], dp.x[r], [&](float& x, float& ds, int c, int half, int e) {
        const int64_t own = w0 + hide_from_optimizer(fragment_row(r, half));
        const int64_t other = at + hide_from_optimizer(fragment_column(c, e));
        const int64_t i = kOwnsKeys ? other : own, j = kOwnsKeys ? own : other;
        const BackwardRow row = row_of(r, c, half, e);
        const bool shown = visible[half].holds(fragment_column(c, e)) && row.lse != kHidden;
        const float content = block.head.score.content(x), score = shown ? block.head.at(content, i, j) : kHidden;
        if (score == kHidden) return hide(x, ds, spoils);
        x = weight_in_row<T>(score, row.lse, row.lse_error);
        ds = x * (ds - row.delta);
        if (!Shape::kSumsBias) ds *= block.head.score.content_slope(content);
      });
    }
  }
};

// Writes the gradient x of a warp's rows, `row` being the first in the tensor and tile_row in a tile that no other warp
// reads any more.
template <class T, int kHeadDim, int kStrips>
__device__ __forceinline__ void write_gradient(Fragment<kStrips, kHeadDim / 8>& x, float scale, Tile<T, kHeadDim> tile,
                                               int tile_row, Target<T> to, int64_t rows) {
  for_each(x, [&](float& y, int, int, int, int) { y *= scale; });
  store_fragment(tile, tile_row, x);
  write_rows(to, tile, tile_row, static_cast<int>(rows));
}

// Writes the gradients of a warp's rows, through its own rows in shared memory.
template <class T, int kHeadDim, Wanted kWanted, int kStrips>
__device__ __forceinline__ void write_gradients(const BackwardParams& params, const BackwardBlock& block,
                                                const BackwardSmem<T, kHeadDim, kWanted>& smem,
                                                Fragment<kStrips, kHeadDim / 8>& dqk,
                                                Fragment<kStrips, kHeadDim / 8>& dv) {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  const AttentionBackwardParams& args = params.args;
  const AttentionParams& forward = args.forward;
  const Sequence& seq = block.seq;
  const float scale = static_cast<float>(forward.scale);
  const int own_row = warp_id() * Shape::kWarpRows;
  const int64_t w0 = block.own0 + own_row, w1 = min(w0 + Shape::kWarpRows, block.own1);
  if (w0 >= w1) return;
  if constexpr (Shape::kOwnsKeys) {
    if constexpr (Shape::kMakesDqk)
      write_gradient(dqk, scale, smem.own_qk(), own_row,
                     target<T>(args.grad_key, seq.k_batch, block.kv_head, seq.k_row + w0, forward.head_dim,
                               params.grad_key_aligned),
                     w1 - w0);
    if constexpr (Shape::kMakesDv)
      write_gradient(dv, forward.kept_scale<float>(), smem.own_vdo(), own_row,
                     target<T>(args.grad_value, seq.k_batch, block.kv_head, seq.k_row + w0, forward.head_dim_v,
                               params.grad_value_aligned),
                     w1 - w0);
  } else {
    for_each(dqk, [&](float& x, int r, int, int half, int) {
      if (row_at(smem.rows(0), own_row + fragment_row(r, half)).lse == kHidden) x = 0;
    });
    write_gradient(dqk, scale, smem.own_qk(), own_row,
                   target<T>(args.grad_query, seq.q_batch, block.first_head, seq.q_row + w0, forward.head_dim,
                             params.grad_query_aligned),
                   w1 - w0);
  }
}

// Grid: one block per tile of kOwn own rows of each (sequence, query head) or, if it owns keys, (sequence, key head).
// Block: kThreads, each warp for kWarpRows own rows.
template <class T, int kHeadDim, Wanted kWanted>
__global__ void __launch_bounds__(BackwardShape<T, kHeadDim, kWanted>::kThreads,
                                  BackwardShape<T, kHeadDim, kWanted>::kBlocksPerSM)
    backward_kernel(const __grid_constant__ BackwardParams params, int64_t tiles) {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  constexpr bool kOwnsKeys = Shape::kOwnsKeys;
  constexpr int kStrips = Shape::kStrips, kOther = Shape::kOther, kColumns = kOther / 8, kStages = Shape::kStages;
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardSmem<T, kHeadDim, kWanted> smem{shared_address(memory)};
  BackwardBlock& block = *reinterpret_cast<BackwardBlock*>(memory + Shape::kBlockAt);
  const AttentionParams& forward = params.args.forward;
  const int own_row = warp_id() * Shape::kWarpRows;  // the warp's first, in the block's tile

  if (!locate<Shape, T>(params, tiles, block)) return;
  const int first_tile = next_shown<Shape>(block, 0);
  copy_own(params, block, smem);
  copy_other(params, block, smem, 0, block.first_head, block.begin + int64_t(first_tile) * kOther);

  Fragment<kStrips, kHeadDim / 8> dqk, dv;  // [kWarpRows][kHeadDim]; dqk is dQ or dK
  if constexpr (Shape::kMakesDqk) dqk.fill(0);
  if constexpr (Shape::kMakesDv) dv.fill(0);
  int stage = 0;
#pragma unroll 1
  for (int head = 0; head < block.heads; head++)
#pragma unroll 1
    for (int tile = first_tile, next; tile < block.tiles; tile = next) {
      next = next_shown<Shape>(block, tile + 1);
      const Tile<T, kHeadDim> qk = smem.qk(stage), vdo = smem.vdo(stage);  // [kOther][kHeadDim]
      const int64_t h = block.first_head + head, at = block.begin + int64_t(tile) * kOther;
      const auto copy_next = [&] {
        const bool last = next >= block.tiles;
        if (!last || head + 1 < block.heads)
          copy_other(params, block, smem, kStages == 2 ? stage ^ 1 : 0, last ? h + 1 : h,
                     block.begin + int64_t(last ? first_tile : next) * kOther);
      };

      const bool some_empty = wait_for_tile<Shape>(smem.rows(stage));
      if (kStages == 2) copy_next();
      if (some_empty) clear_empty<kOther>(qk, vdo, smem.rows(stage));
      const bool drops = forward.drops_weights();
      if (kOwnsKeys && (!block.plain || drops) && tile == first_tile) {
        if (threadIdx.x == 0) {
          block.head = head_scores(forward, block.seq, h);
          if (drops) block.kept = kept_weights(forward, block.b, h);
        }
        __syncthreads();
      }

      // S and dP.
      const bool full = block.full_begin <= tile && tile < block.full_end && !some_empty;  // for all warps
      const int64_t w0 = block.own0 + own_row, w1 = min(w0 + Shape::kWarpRows, block.own1);
      const BackwardScores<T, kHeadDim, kWanted> scores{params, block, smem.rows(stage), own_row, w0, w1, at, h};
      Verdict verdict = Verdict::full;
      if (!full) verdict = scores.verdict(some_empty);
      Fragment<kStrips, kColumns> s, dp;  // [kWarpRows][kOther]
      s.fill(0);
      dp.fill(0);
      if (verdict != Verdict::skip) {
        multiply_transposed(s, smem.own_qk(), own_row, qk, 0, static_cast<int>(forward.head_dim));
        if constexpr (Shape::kMakesDqk)
          multiply_transposed(dp, smem.own_vdo(), own_row, vdo, 0, static_cast<int>(forward.head_dim_v));
      }

      // S becomes P, and dP becomes dS.
      uint32_t kept;  // if weights are dropped
      if (drops && verdict != Verdict::skip) {
        kept = scores.kept();
        scores.keep_elements(dp, kept, forward.kept_scale<float>());
      }
      bool spoils = false;  // whether a product that is hidden is not finite
      if (verdict == Verdict::full)
        scores.template weigh_plain<false>(s, dp, spoils);
      else if (verdict == Verdict::partial && block.plain)
        scores.template weigh_plain<true>(s, dp, spoils);
      else if (verdict == Verdict::partial)
        scores.weigh(s, dp, spoils);
      if (Shape::kMakesDqk && !full && __syncthreads_or(spoils)) {
        make_finite<kOther>(qk);
        __syncthreads();
      }

      // dV += P^T dO, then dK += dS^T Q or dQ += dS K.
      if (verdict != Verdict::skip) {
        if constexpr (Shape::kMakesDv) {
          if (drops) scores.keep_elements(s, kept, 1);
          multiply(dv, Operand<T, kStrips, kColumns>(s), vdo, 0);
        }
        if constexpr (Shape::kMakesDqk) multiply(dqk, Operand<T, kStrips, kColumns>(dp), qk, 0);
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
  write_gradients(params, block, smem, dqk, dv);
}

// Fills `block` for the tile of queries from own0 on of head h of sequence b, by one thread.
template <class Shape>
__device__ __forceinline__ void locate_scores(const AttentionParams& forward, int64_t b, int64_t h, int64_t own0,
                                              BackwardBlock& block) {
  block.seq = sequence(forward, b);
  block.visible = visibility(forward, block.seq, b, h);
  block.head = head_scores(forward, block.seq, h);
  if (forward.drops_weights()) block.kept = kept_weights(forward, b, h);
  block.kv_head = h / forward.group();
  block.first_head = h;
  block.own0 = own0;
  block.own1 = min(own0 + Shape::kOwn, block.seq.q_len);
  block.plain = block.plain_scores = false;
}
// Whether none of the block's queries sees a key of the tile from `at` on, which may begin before the sequence.
template <class Shape> __device__ __forceinline__ bool is_hidden(const BackwardBlock& block, int64_t at) {
  const Band& band = block.seq.band;
  const int64_t own0 = block.own0, own1 = block.own1, end = min(at + Shape::kOther, band.kv_len);
  if (own0 >= own1 || end <= max<int64_t>(at, 0) || band.verdict(own0, own1, at, end) == Verdict::skip) return true;
  return block.visible.map && map_verdict<Shape>(block, own0, own1, at) == Verdict::skip;
}

// The gradient of a bias. A block owns a tile of the gradient. It computes all tiles of dS that share
// this tile once more (along a broadcast axis all tiles, along another axis one) and adds them in order. If the sum is
// cut into parts, the block makes one of them. Grid: sum.parts blocks per tile of kOwn queries and kOther keys. Block:
// kThreads, each warp for kWarpRows queries.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(BackwardShape<T, kHeadDim, Wanted::bias>::kThreads,
                                  BackwardShape<T, kHeadDim, Wanted::bias>::kBlocksPerSM)
    bias_gradient_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ BiasSum sum) {
  using Shape = BackwardShape<T, kHeadDim, Wanted::bias>;
  constexpr int kStrips = Shape::kStrips, kOwn = Shape::kOwn, kOther = Shape::kOther, kColumns = kOther / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardSmem<T, kHeadDim, Wanted::bias> smem{shared_address(memory)};
  BackwardBlock& block = *reinterpret_cast<BackwardBlock*>(memory + Shape::kBlockAt);
  const AttentionParams& forward = params.args.forward;
  const int own_row = warp_id() * Shape::kWarpRows;

  // The tile of the gradient: head h of sequence b, queries from i0 on and keys from j0 on.
  const int64_t query_tiles = (sum.rows + kOwn - 1) / kOwn, key_tiles = (sum.keys + kOther - 1) / kOther;
  const int64_t part = blockIdx.x % sum.parts, tile = blockIdx.x / sum.parts, head = tile / key_tiles / query_tiles;
  const int64_t i0 = tile / key_tiles % query_tiles * kOwn, j0 = tile % key_tiles * kOther;
  const int64_t h = head % sum.heads, b = head / sum.heads;
  // The tiles of dS along each axis. The first three axes together are cut into parts.
  const int64_t sequences = forward.sequences / sum.sequences, heads = forward.heads_q / sum.heads;
  const int64_t rows = sum.rows < forward.rows_q ? (forward.rows_q + kOwn - 1) / kOwn : 1;
  const int64_t j1 = sum.keys < forward.seqlen_k ? forward.seqlen_k : j0 + 1;
  const int64_t terms = sequences * heads * rows, per_part = (terms + sum.parts - 1) / sum.parts;
  const int64_t begin = part * per_part, end = min(begin + per_part, terms);

  Fragment<kStrips, kColumns> sums;  // [kWarpRows][kOther]
  sums.fill(0);
#pragma unroll 1
  for (int64_t n = begin; n < end; n++) {
    __syncthreads();
    if (threadIdx.x == 0)
      locate_scores<Shape>(forward, b + n / rows / heads, h + n / rows % heads, i0 + n % rows * kOwn, block);
    __syncthreads();
#pragma unroll 1
    for (int64_t j = j0; j < j1; j += kOther) {
      const int64_t at = j - block.seq.first_key;
      if (is_hidden<Shape>(block, at)) continue;
      copy_own(params, block, smem);
      copy_other(params, block, smem, 0, block.first_head, at);
      wait_for_tile<Shape>(smem.rows(0));

      // S and dP, then dS in place of dP.
      const int64_t w0 = block.own0 + own_row, w1 = min(w0 + Shape::kWarpRows, block.own1);
      const BackwardScores<T, kHeadDim, Wanted::bias> scores{params, block, smem.rows(0), own_row,
                                                             w0,     w1,    at,           block.first_head};
      if (scores.verdict(false) != Verdict::skip) {
        Fragment<kStrips, kColumns> s, dp;  // [kWarpRows][kOther]
        s.fill(0);
        dp.fill(0);
        multiply_transposed(s, smem.own_qk(), own_row, smem.qk(0), 0, static_cast<int>(forward.head_dim));
        multiply_transposed(dp, smem.own_vdo(), own_row, smem.vdo(0), 0, static_cast<int>(forward.head_dim_v));
        if (forward.drops_weights()) scores.keep_elements(dp, scores.kept(), forward.kept_scale<float>());
        bool spoils = false;
        scores.weigh(s, dp, spoils);
        for_each(sums, [&](float& x, int r, int c, int half, int e) { x += dp.x[r][c][2 * half + e]; });
      }
      __syncthreads();
    }
  }

  // The tile [kOwn][kOther] in shared memory, and within it the sum along broadcast axes.
  float* tile_smem = reinterpret_cast<float*>(memory);
  for_each(sums, [&](float& x, int r, int c, int half, int e) {
    tile_smem[(own_row + fragment_row(r, half)) * kOther + fragment_column(c, e)] = x;
  });
  __syncthreads();
  const int queries = static_cast<int>(min(kOwn, forward.rows_q - i0));
  const int keys = static_cast<int>(min(kOther, forward.seqlen_k - j0));
  const int per_row = sum.rows < forward.rows_q ? queries : 1, per_key = sum.keys < forward.seqlen_k ? keys : 1;
  const Tensor4& grad_bias = params.args.grad_bias;
  float* to = static_cast<float*>(grad_bias.data) + part * sum.elements() + grad_bias.offset(b, h, i0);
  for (int n = threadIdx.x; n < queries / per_row * (keys / per_key); n += Shape::kThreads) {
    const int i = n / (keys / per_key), j = n % (keys / per_key);
    double x = 0;
    for (int query = i; query < i + per_row; query++)
      for (int key = j; key < j + per_key; key++) x += tile_smem[query * kOther + key];
    to[i * grad_bias.row + (j0 + j) * grad_bias.dim] = static_cast<float>(x);
  }
}

template <class T, int kHeadDim>
void launch_bias_gradient(const BackwardParams& params, const BiasSum& sum, cudaStream_t stream) {
  using Shape = BackwardShape<T, kHeadDim, Wanted::bias>;
  const int64_t query_tiles = (sum.rows + Shape::kOwn - 1) / Shape::kOwn;
  const int64_t key_tiles = (sum.keys + Shape::kOther - 1) / Shape::kOther;
  const int64_t blocks = checked_product("attn_bias", "tiles of its gradient",
                                         {sum.sequences, sum.heads, query_tiles, key_tiles, sum.parts});
  if (blocks == 0) return;
  const auto kernel = bias_gradient_kernel<T, kHeadDim>;
  const char* what = "backward, gradient of the bias";
  check(what, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
  kernel<<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>(params, sum);
  check(what, cudaGetLastError());
}

template <class T, int kHeadDim, Wanted kWanted>
void launch_backward(const BackwardParams& params, cudaStream_t stream) {
  using Shape = BackwardShape<T, kHeadDim, kWanted>;
  const AttentionParams& forward = params.args.forward;
  // At least one tile of queries: it writes NaN to the rows of a sequence that is longer than max_seqlen_q.
  const int64_t rows = Shape::kOwnsKeys ? forward.seqlen_k : max<int64_t>(1, min(forward.seqlen_q, forward.rows_q));
  const int64_t tiles = (rows + Shape::kOwn - 1) / Shape::kOwn;
  const int64_t heads = Shape::kOwnsKeys ? forward.heads_kv : forward.heads_q;
  const int64_t blocks =
      checked_product(Shape::kOwnsKeys ? "key" : "query", "tiles", {tiles, forward.sequences, heads});
  if (blocks == 0) return;
  const auto kernel = backward_kernel<T, kHeadDim, kWanted>;
  check("backward", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
  kernel<<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>(params, tiles);
  check("backward", cudaGetLastError());
}

template <int kHeadDim> void backward(const AttentionBackwardParams& args, void* scratch, cudaStream_t stream) {
  BackwardParams params(args, scratch);
  const BiasSum bias(args);
  for_dtype("query", args.forward.dtype, [&](auto element) {
    using T = decltype(element);
    if (bias.wanted) launch_bias_gradient<T, kHeadDim>(params, bias, stream);
    launch_backward<T, kHeadDim, Wanted::query>(params, stream);
    if constexpr (kHeadDim <= 128) {
      launch_backward<T, kHeadDim, Wanted::key_and_value>(params, stream);
    } else {
      launch_backward<T, kHeadDim, Wanted::key>(params, stream);
      launch_backward<T, kHeadDim, Wanted::value>(params, stream);
    }
  });
}

}  // namespace flashsoftmax::cuda::sm80
