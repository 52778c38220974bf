// The tiled forward: a block has a tile of queries and goes over the tiles of keys that they see.
#pragma once

#include <cmath>

#include "../rows.cuh"
#include "../scores.cuh"
#include "launch.h"

namespace flashsoftmax::cuda::sm80 {

// What a block looks up now and then. It lies in shared memory to leave the registers to the accumulators.
template <class T, int kWarps> struct ForwardBlock {
  Sequence s;
  HeadScores head;
  Source<T> query, key, value;
  int64_t i0, i1;  // its queries
  int64_t begin;   // the first key of the first tile that any of them sees
  TileRange seen[kWarps];
};

// A block has up to 32 KiB of queries and a ring of three slots of up to 16 KiB, for the keys and the values of a tile
// in turn: so two blocks fit the 164 KiB of an sm_80 multiprocessor, and one computes scores while the other is in its
// softmax. A warp has 32 rows where 255 registers hold their accumulators: then a matrix read from shared memory serves
// two products, and reading takes half the time of multiplying. (With 16 rows it would take all of it.) Queries are
// read again for every tile of keys, which is a fifth of those reads and leaves the registers to the accumulators.
template <class T, int kHeadDim> struct ForwardTile {
  static constexpr int kDimBytes = kHeadDim * sizeof(T);
  static constexpr int kQueries = min(128, (32 << 10) / kDimBytes);
  static constexpr int kKeys = (16 << 10) / (sizeof(T) * max(kHeadDim, 128));
  static constexpr int kRows = kQueries == 128 ? 2 : 1;  // of 16 queries, in a warp
  static constexpr int kThreads = kQueries / (16 * kRows) * kWarp;
  static constexpr int kSlots = 3, kSlotBytes = kKeys * kDimBytes, kQueryBytes = kQueries * kDimBytes;
  static constexpr int kSharedBytes = kQueryBytes + kSlots * kSlotBytes + sizeof(ForwardBlock<T, kThreads / kWarp>);
  static constexpr int kBlocks = 2;  // on a multiprocessor
};

// Blocks are issued in this order: sections of as many heads of keys as the L2 cache holds; in a section tiles of
// queries from the last, which under a causal mask has most to do; for a tile the heads, those that share keys
// together.
struct ForwardOrder {
  uint32_t q_tiles, section, heads_kv, group;
  uint32_t units;  // sequences * heads_kv
};

struct ForwardParams {
  Attention attention;
  ForwardOrder order;
};

struct ForwardTask {
  int64_t b, h, q_tile;

  __device__ __forceinline__ ForwardTask(const ForwardOrder& order, uint32_t block) {
    const uint32_t first = block / (order.section * order.q_tiles * order.group) * order.section;
    const uint32_t rest = block % (order.section * order.q_tiles * order.group);
    const uint32_t heads = (order.units - first < order.section ? order.units - first : order.section) * order.group;
    const uint32_t unit = first + rest % heads / order.group;
    q_tile = order.q_tiles - 1 - rest / heads;
    b = unit / order.heads_kv;
    h = unit % order.heads_kv * order.group + rest % order.group;
  }
};

// The rows of a sequence that cannot be computed.
template <class T>
__device__ void write_nan(const AttentionParams& p, const Sequence& s, int64_t h, int64_t i0, int64_t i1) {
  for (int64_t i = i0 + threadIdx.x; i < i1; i += blockDim.x) {
    T* out = static_cast<T*>(p.out.data) + p.out.offset(s.q_batch, h, s.q_row + i);
    for (int64_t d = 0; d < p.head_dim_v; d++) out[d * p.out.dim] = T(NAN);
    static_cast<float*>(p.lse.data)[p.lse.offset(s.q_batch, h, s.q_row + i)] = NAN;
  }
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(ForwardTile<T, kHeadDim>::kThreads, ForwardTile<T, kHeadDim>::kBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using Shape = ForwardTile<T, kHeadDim>;
  constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys, kRows = Shape::kRows, kThreads = Shape::kThreads;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, kHeadDim> q_smem{shared_address(memory)};
  Tile<T, kHeadDim> k_smem{q_smem.base + Shape::kQueryBytes};
  Tile<T, kHeadDim> v_smem{k_smem.base + Shape::kSlotBytes};
  Tile<T, kHeadDim> free_smem{v_smem.base + Shape::kSlotBytes};
  using Block = ForwardBlock<T, kThreads / kWarp>;
  Block& block = *reinterpret_cast<Block*>(memory + Shape::kQueryBytes + Shape::kSlots * Shape::kSlotBytes);
  const Attention& a = params.attention;
  const AttentionParams& p = a.p;

  // Which queries, and which keys any of them sees.
  const ForwardTask task(params.order, blockIdx.x);
  const int warp = warp_id(), warp_row = warp * 16 * kRows;  // its first, in the block's tile
  int tiles;
  {
    const Sequence s = sequence(p, task.b);
    const int64_t i0 = task.q_tile * kQueries, i1 = min(i0 + kQueries, s.q_len);
    if (i0 >= s.q_len) return;
    if (!s.valid || !pages_exist(p, task.b, s.band.kv_len)) return write_nan<T>(p, s, task.h, i0, i1);
    const int64_t begin = s.band.first(i0) / kKeys * kKeys, end = s.band.end(i1 - 1);
    const int64_t kv_head = task.h / p.group();
    tiles = end <= begin ? 0 : static_cast<int>((end - begin + kKeys - 1) / kKeys);
    if (threadIdx.x == 0) {
      block.s = s;
      block.head = head_scores(p, s.band, s.q_batch, task.h);
      block.query = source<T>(p.query, s.q_batch, task.h, s.q_row, s.q_len, p.head_dim, a.query_packs);
      block.key = source<T>(p, p.key, s, task.b, kv_head, p.head_dim, a.key_packs);
      block.value = source<T>(p, p.value, s, task.b, kv_head, p.head_dim_v, a.value_packs);
      block.i0 = i0;
      block.i1 = i1;
      block.begin = begin;
    }
    if (lane_id() == 0) {
      const int64_t w0 = i0 + warp_row, w1 = min(w0 + 16 * kRows, i1);
      block.seen[warp] = TileRange::of<kKeys>(s.band, w0, w1, begin);
    }
    __syncthreads();
  }

  RowStates<kRows> rows;
  Fragment<kRows, kHeadDim / 8> acc;
  acc.fill(0);

  if (tiles > 0) {
    copy<kQueries, kThreads>(q_smem, block.query, block.i0);
    copy<kKeys, kThreads>(k_smem, block.key, block.begin);
    commit_copies();
    copy<kKeys, kThreads>(v_smem, block.value, block.begin);
    commit_copies();
  }
  for (int tile = 0; tile < tiles; tile++) {
    // Weights of this tile's keys, while its values and the next keys are on their way.
    wait_for_copies<1>();
    __syncthreads();
    if (tile + 1 < tiles) copy<kKeys, kThreads>(free_smem, block.key, block.begin + (tile + 1) * kKeys);
    commit_copies();
    const Verdict verdict = block.seen[warp].verdict(tile);
    Operand<T, kRows, kKeys / 8> left;
    float factors[kRows][2];
    if (verdict != Verdict::skip) {
      Fragment<kRows, kKeys / 8> weights;
      weights.fill(0);
      multiply_transposed(weights, q_smem, warp_row, k_smem, 0, p.head_dim);
      score(weights, block.head, block.s.band, block.s.q_len, block.i0 + warp_row, block.begin + tile * kKeys, verdict);
      rows.template take<T>(weights, factors, block.head.unit);
      left = Operand<T, kRows, kKeys / 8>(weights);
    }
    // Values, while the next keys and values are on their way.
    wait_for_copies<1>();
    __syncthreads();
    if (tile + 1 < tiles) copy<kKeys, kThreads>(k_smem, block.value, block.begin + (tile + 1) * kKeys);
    commit_copies();
    if (verdict != Verdict::skip) {
      rescale(acc, factors);
      multiply(acc, left, v_smem, 0, p.head_dim_v);
    }
    const Tile<T, kHeadDim> done = v_smem;
    v_smem = k_smem;
    k_smem = free_smem;
    free_smem = done;
  }

  // Output through the shared memory of the warp's queries, which no other warp reads.
  rows.finish(block.head.unit);
  float factors[kRows][2];
  for (int r = 0; r < kRows; r++)
    for (int h = 0; h < 2; h++) {
      State<float>& state = rows.state[r][h];
      factors[r][h] = p.sinks.data ? merge(state, {p.sinks.at<float>(task.h), 1}).into : 1;
      factors[r][h] *= inverse_sum(state);
    }
  for_each(acc, [&](float& x, int r, int, int h, int) { x *= factors[r][h]; });
  __syncwarp();
  put(q_smem, warp_row, acc);
  __syncwarp();
  const int64_t w0 = block.i0 + warp_row, w1 = min(w0 + 16 * kRows, block.i1);
  if (w0 >= w1) return;
  T* out = static_cast<T*>(p.out.data) + p.out.offset(block.s.q_batch, task.h, block.s.q_row + w0);
  write(Target<T>{out, p.out.row, p.out.dim, static_cast<int>(p.head_dim_v), a.out_packs}, q_smem, warp_row,
        static_cast<int>(w1 - w0));
  if (lane_id() % 4 != 0) return;
  for (int r = 0; r < kRows; r++)
    for (int h = 0; h < 2; h++) {
      const int64_t i = w0 + fragment_row(r, h);
      if (i < w1)
        static_cast<float*>(p.lse.data)[p.lse.offset(block.s.q_batch, task.h, block.s.q_row + i)] =
            lse(rows.state[r][h]);
    }
}

template <int kHeadDim> void forward(const AttentionParams& p, void*, cudaStream_t stream) {
  for_dtype("query", p.dtype, [&](auto element) {
    using T = decltype(element);
    using Shape = ForwardTile<T, kHeadDim>;
    constexpr int64_t kSectionBytes = 16 << 20;  // of keys and values: well within the L2 cache
    const int64_t units = p.sequences * p.heads_kv, head_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * sizeof(T);
    const int64_t section = min(max<int64_t>(1, kSectionBytes / max<int64_t>(1, head_bytes)), units);
    const int64_t q_tiles = (p.seqlen_q + Shape::kQueries - 1) / Shape::kQueries;
    const int64_t blocks = q_tiles * units * p.group();
    if (blocks == 0) return;
    if (blocks > INT32_MAX) throw std::invalid_argument("query: more than 2^31 tiles of queries on CUDA");
    const ForwardOrder order{uint32_t(q_tiles), uint32_t(section), uint32_t(p.heads_kv), uint32_t(p.group()),
                             uint32_t(units)};
    const auto kernel = forward_kernel<T, kHeadDim>;
    check("forward", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
    kernel<<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>({Attention(p), order});
    check("forward", cudaGetLastError());
  });
}

}  // namespace flashsoftmax::cuda::sm80
