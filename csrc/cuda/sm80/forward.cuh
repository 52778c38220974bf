// The tiled forward. A block owns a tile of queries and loops over the tiles of keys that any of them sees: scores
// S = Q K^T, weights P by the online softmax, and O += P V. Queries, keys and values pass through shared memory;
// scores, weights and the accumulator of O stay in registers.
#pragma once

#include "../elements.cuh"
#include "../kept.cuh"
#include "../overflow.cuh"
#include "../rows.cuh"
#include "../scores.cuh"
#include "launch.h"

namespace flashsoftmax::cuda::sm80 {

// What a block looks up now and then, in shared memory to leave the registers to the accumulators.
template <class T, int kWarps> struct ForwardBlock {
  Sequence seq;
  HeadScores head;
  KeptWeights kept;  // if some weights are dropped
  Visibility visible;
  Source<T> query, key, value;
  int64_t i0, i1;  // the block's queries
  int64_t j0;      // the first key of the first tile
  int tiles;       // of keys that the band shows to the block's queries
  TileRange seen[kWarps];
};

// Shared memory holds up to 32 KiB of queries and a ring of three slots of up to 16 KiB, in which keys and values of
// the tiles follow each other. So two blocks fit the 164 KiB of an sm_80 SM, and one computes scores while the other is
// in its softmax.
//
// A warp has 32 rows where 255 registers hold their accumulators. A matrix that it reads from shared memory then serves
// two products, and reading takes half as long as multiplying; with 16 rows it would take as long. Queries are read
// again for every tile of keys: a fifth of the reads, but no registers.
template <class T, int kHeadDim> struct ForwardShape {
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr int kQueries = min(128, (32 << 10) / kRowBytes);                  // of a tile
  static constexpr int kKeys = (16 << 10) / (sizeof(T) * max(kHeadDim, 128));        // of a tile
  static constexpr int kStrips = kQueries == 128 ? 2 : 1, kWarpRows = 16 * kStrips;  // of a warp
  static constexpr int kWarps = kQueries / kWarpRows, kThreads = kWarps * kWarp;
  static constexpr int kBlocksPerSM = 2;
  static constexpr int kQueryBytes = kQueries * kRowBytes, kSlots = 3, kSlotBytes = kKeys * kRowBytes;
  static constexpr int kBlockAt = kQueryBytes + kSlots * kSlotBytes;
  static constexpr int kSharedBytes = kBlockAt + sizeof(ForwardBlock<T, kWarps>);
};

struct ForwardTask {
  int64_t b, h, q_tile;
};

// The order of the blocks. The outermost loop takes sections of as many key heads as the L2 cache holds; the next takes
// tiles of queries from the last, which has most keys under a causal mask; the innermost takes the query heads, those
// of one key head together.
struct ForwardOrder {
  uint32_t q_tiles, section, heads_kv, group;
  uint32_t units;  // sequences * heads_kv

  __device__ __forceinline__ ForwardTask task(uint32_t block) const {
    const uint32_t first = block / (section * q_tiles * group) * section;
    const uint32_t rest = block % (section * q_tiles * group);
    const uint32_t heads = (units - first < section ? units - first : section) * group;
    const uint32_t unit = first + rest % heads / group;
    return {unit / heads_kv, unit % heads_kv * group + rest % group, q_tiles - 1 - rest / heads};
  }
};

struct ForwardParams {
  AttentionParams args;
  Alignment aligned;
  ForwardOrder order;
};

// Fills `block`. Returns whether there is an output to compute.
template <class Shape, class T>
__device__ __forceinline__ bool locate(const ForwardParams& params, const ForwardTask& task,
                                       ForwardBlock<T, Shape::kWarps>& block) {
  constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys;
  const AttentionParams& args = params.args;
  const Sequence seq = sequence(args, task.b);
  if (!seq.valid) {  // it may have more rows than tiles have been launched for
    write_nan_results<T>(args, seq.q_batch, task.h, seq.q_row, seq.q_len, task.q_tile, params.order.q_tiles);
    return false;
  }
  const int64_t i0 = task.q_tile * kQueries, i1 = min(i0 + kQueries, seq.q_len);
  if (i0 >= seq.q_len) return false;
  const int64_t begin = seq.band.first(i0), end = seq.band.end(i1 - 1), j0 = begin / kKeys * kKeys;
  if (!pages_exist(args, seq, task.b, begin, end)) {
    write_nan_results<T>(args, seq.q_batch, task.h, seq.q_row + i0, i1 - i0);
    return false;
  }
  const int64_t kv_head = task.h / args.group();
  if (threadIdx.x == 0) {
    block.seq = seq;
    block.head = head_scores(args, seq, task.h);
    if (args.drops_weights()) block.kept = kept_weights(args, task.b, task.h);
    block.visible = visibility(args, seq, seq.q_batch, task.h);
    block.query = source<T>(args.query, seq.q_batch, task.h, seq.q_row, seq.q_len, args.head_dim, params.aligned.query);
    block.key = source<T>(args, args.key, seq, task.b, kv_head, begin, end, args.head_dim, params.aligned.key);
    block.value = source<T>(args, args.value, seq, task.b, kv_head, begin, end, args.head_dim_v, params.aligned.value);
    block.i0 = i0;
    block.i1 = i1;
    block.j0 = j0;
    block.tiles = end <= begin ? 0 : static_cast<int>((end - j0 + kKeys - 1) / kKeys);
  }
  const int warp = warp_id();
  const int64_t w0 = i0 + warp * Shape::kWarpRows, w1 = min(w0 + Shape::kWarpRows, i1);
  if (lane_id() == 0) block.seen[warp] = TileRange::of<kKeys>(seq.band, w0, w1, j0);
  __syncthreads();
  return true;
}

// Products become scores, in multiples of head.unit: queries i0, i0 + 1, ... against keys j0, j0 + 1, ...
template <int kStrips, int kColumns>
__device__ __forceinline__ void make_scores(Fragment<kStrips, kColumns>& s, const HeadScores& head, const Sequence& seq,
                                            int64_t i0, int64_t j0, Verdict verdict) {
  if (head.plain && verdict == Verdict::full) return;
  Range visible[kStrips][2];
#pragma unroll
  for (int r = 0; r < kStrips; r++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int64_t i = i0 + fragment_row(r, h);
      visible[r][h] = i < seq.q_len ? keys_of(seq.band, i, j0) : Range{0, 0};
    }
  if (head.plain)
    hide(s, visible);
  else
    products_to_scores(s, visible, [&](float x, int r, int h, int column) {
      return head.at(head.score.content(x), i0 + hide_from_optimizer(fragment_row(r, h)), j0 + column,
                     verdict == Verdict::full);
    });
}

// Whether the warp skips a tile, sees it whole, or has to look at each element.
template <class Shape, class Block> __device__ __forceinline__ Verdict verdict_of(const Block& block, int warp,
                                                                                  int tile) {
  const Verdict in_band = block.seen[warp].verdict(tile);
  if (in_band == Verdict::skip || !block.visible.map) return in_band;
  const int64_t w0 = block.i0 + warp * Shape::kWarpRows, j = block.j0 + int64_t(tile) * Shape::kKeys;
  return joined(in_band, warp_verdict(block.visible, w0, min(w0 + Shape::kWarpRows, block.i1), j,
                                      min(j + Shape::kKeys, block.seq.band.kv_len)));
}

// Writes O = acc / l and lse of a warp's rows, with the sink as one more key of value 0. O passes through the rows of
// q_smem from warp_row on, which no other warp reads.
template <class Shape, class T, int kHeadDim, int kStrips>
__device__ __forceinline__ void write_output(const ForwardParams& params, const ForwardTask& task,
                                             const ForwardBlock<T, Shape::kWarps>& block, Tile<T, kHeadDim> q_smem,
                                             int warp_row, Fragment<kStrips, kHeadDim / 8>& acc,
                                             RowStates<kStrips>& rows) {
  const AttentionParams& args = params.args;
  float factors[kStrips][2];
  for (int r = 0; r < kStrips; r++)
    for (int h = 0; h < 2; h++) {
      State<float>& state = rows.state[r][h];
      factors[r][h] = args.sinks.data ? merge(state, {args.sinks.at<float>(task.h), 1}).into : 1;
      factors[r][h] *= inverse_sum(state) * args.kept_scale<float>();
    }
  for_each(acc, [&](float& x, int r, int, int h, int) { x *= factors[r][h]; });
  __syncwarp();
  store_fragment(q_smem, warp_row, acc);

  const Sequence& seq = block.seq;
  const int64_t w0 = block.i0 + warp_row, w1 = min(w0 + Shape::kWarpRows, block.i1);
  if (w0 >= w1) return;
  write_rows(target<T>(args.out, seq.q_batch, task.h, seq.q_row + w0, args.head_dim_v, params.aligned.out), q_smem,
             warp_row, static_cast<int>(w1 - w0));
  if (lane_id() % 4 != 0) return;
  for (int r = 0; r < kStrips; r++)
    for (int h = 0; h < 2; h++) {
      const int64_t i = w0 + fragment_row(r, h);
      if (i < w1) write_lse(args, seq.q_batch, task.h, seq.q_row + i, rows.state[r][h]);
    }
}

// Grid: one block per tile of kQueries queries, in ForwardOrder. Block: kThreads, each warp for 16 * kStrips queries.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(ForwardShape<T, kHeadDim>::kThreads, ForwardShape<T, kHeadDim>::kBlocksPerSM)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using Shape = ForwardShape<T, kHeadDim>;
  constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys, kStrips = Shape::kStrips, kThreads = Shape::kThreads;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, kHeadDim> q_smem{shared_address(memory)};          // [kQueries][kHeadDim]
  Tile<T, kHeadDim> k_smem{q_smem.base + Shape::kQueryBytes};      // [kKeys][kHeadDim]
  Tile<T, kHeadDim> v_smem{k_smem.base + Shape::kSlotBytes};       // [kKeys][kHeadDim]
  Tile<T, kHeadDim> next_k_smem{v_smem.base + Shape::kSlotBytes};  // [kKeys][kHeadDim]
  auto& block = *reinterpret_cast<ForwardBlock<T, Shape::kWarps>*>(memory + Shape::kBlockAt);
  const AttentionParams& args = params.args;

  const ForwardTask task = params.order.task(blockIdx.x);
  const int warp = warp_id(), warp_row = warp * Shape::kWarpRows;  // the warp's first row in q_smem
  if (!locate<Shape>(params, task, block)) return;

  RowStates<kStrips> rows;
  Fragment<kStrips, kHeadDim / 8> acc;  // [kWarpRows][kHeadDim], of O
  acc.fill(0);
  const auto next_from = [&](int tile) {
    return next_shown<kKeys>(block.visible, block.i0, block.i1, block.j0, tile, block.tiles);
  };
  int tile = next_from(0);
  if (tile < block.tiles) {
    copy<kQueries, kThreads>(q_smem, block.query, block.i0);
    copy<kKeys, kThreads>(k_smem, block.key, block.j0 + tile * kKeys);
    commit_copies();
    copy<kKeys, kThreads>(v_smem, block.value, block.j0 + tile * kKeys);
    commit_copies();
  }
  while (tile < block.tiles) {
    const int next = next_from(tile + 1);
    // S = Q K^T and its weights, while this tile's values and the next keys are copied.
    wait_for_copies<1>();
    __syncthreads();
    if (next < block.tiles) copy<kKeys, kThreads>(next_k_smem, block.key, block.j0 + next * kKeys);
    commit_copies();
    const Verdict verdict = verdict_of<Shape>(block, warp, tile);
    Operand<T, kStrips, kKeys / 8> p;  // [kWarpRows][kKeys]
    float factors[kStrips][2];
    if (verdict != Verdict::skip) {
      Fragment<kStrips, kKeys / 8> s;  // [kWarpRows][kKeys]
      s.fill(0);
      multiply_transposed(s, q_smem, warp_row, k_smem, 0, args.head_dim);
      make_scores(s, block.head, block.seq, block.i0 + warp_row, block.j0 + tile * kKeys, verdict);
      rows.template scores_to_weights<T>(s, factors, block.head.unit);
      p = Operand<T, kStrips, kKeys / 8>(s);
      if (args.drops_weights()) drop(p, block.kept, block.i0 + warp_row, block.j0 + tile * kKeys);
    }
    // O += P V, while the next keys and values are copied.
    wait_for_copies<1>();
    __syncthreads();
    if (next < block.tiles) copy<kKeys, kThreads>(k_smem, block.value, block.j0 + next * kKeys);
    commit_copies();
    if (verdict != Verdict::skip) {
      rescale(acc, factors);
      multiply(acc, p, v_smem, 0, args.head_dim_v);
    }
    const Tile<T, kHeadDim> done = v_smem;
    v_smem = k_smem;
    k_smem = next_k_smem;
    next_k_smem = done;
    tile = next;
  }
  rows.finish(block.head.unit);
  const bool overflowed = kMayOverflow<T> && !all_finite(acc);
  write_output<Shape>(params, task, block, q_smem, warp_row, acc, rows);
  if constexpr (kMayOverflow<T>)
    if (__any_sync(~0u, overflowed))
      for (int64_t i = block.i0 + warp_row; i < min(block.i0 + warp_row + Shape::kWarpRows, block.i1); i++)
        recompute_row<T>(args, task.b, task.h, i, lane_id());
}

template <int kHeadDim> void forward(const AttentionParams& args, void*, cudaStream_t stream) {
  for_dtype("query", args.dtype, [&](auto element) {
    using T = decltype(element);
    using Shape = ForwardShape<T, kHeadDim>;
    constexpr int64_t kSectionBytes = 16 << 20;  // of keys and values: well within the L2 cache
    const int64_t q_tiles = (min(args.seqlen_q, args.rows_q) + Shape::kQueries - 1) / Shape::kQueries;
    const int64_t blocks = checked_product("query", "tiles of queries", {q_tiles, args.sequences, args.heads_q});
    if (blocks == 0) return;
    const int64_t units = args.sequences * args.heads_kv;
    const int64_t key_bytes = max<int64_t>(1, (args.head_dim + args.head_dim_v) * sizeof(T));
    const int64_t head_bytes = min(args.seqlen_k, kSectionBytes) * key_bytes;
    const int64_t section = min(max<int64_t>(1, kSectionBytes / max<int64_t>(1, head_bytes)), units);
    const ForwardOrder order{uint32_t(q_tiles), uint32_t(section), uint32_t(args.heads_kv), uint32_t(args.group()),
                             uint32_t(units)};
    const auto kernel = forward_kernel<T, kHeadDim>;
    check("forward", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
    kernel<<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>({args, Alignment(args), order});
    check("forward", cudaGetLastError());
  });
}

}  // namespace flashsoftmax::cuda::sm80
