// Split-KV decode: few queries against many keys.
//
// The queries of all heads that share a kv head are rows of one tile, so that its keys and values are read once. A block
// takes one split of the keys. Each of its warps takes kKeys keys at a time, which no other warp does, through a ring in
// shared memory of its own, so that warps wait for each other only at the end, when their states are merged. Which warp
// takes which keys depends on nothing but the keys' numbers.
#pragma once

#include <cmath>

#include "../rows.cuh"
#include "../scores.cuh"
#include "../splits.h"
#include "launch.h"

namespace flashsoftmax::cuda::sm80 {

// It lies in shared memory to leave the registers to the accumulators.
struct DecodeBlock {
  Sequence s;
  TileRange visible;
};

template <class T, int kHeadDim> struct DecodeShape {
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr int kLeastKeys = kIsFloat<T> ? 8 : 16;  // of a product
  static constexpr int kKeys = 4096 / kRowBytes > kLeastKeys ? 4096 / kRowBytes : kLeastKeys;
  static constexpr int kSlotBytes = kKeys * kRowBytes;
  static constexpr int kSlots = 4;  // of a warp's ring: keys and values of two tiles
  static constexpr int kWarps = 65536 / (kSlots * kSlotBytes);
  static constexpr int kTile = kWarps * kKeys;
  static constexpr int kRowTiles = 2;              // at most, of 16 rows, each with warps of its own
  static constexpr int kAccStride = kHeadDim + 8;  // floats of a row of a warp's results: without bank conflicts
  static constexpr int kMaxThreads = kWarp * kWarps * kRowTiles;
  static constexpr int kBlocks = kRowBytes > 256 ? 1 : 2;  // of so many threads on a multiprocessor
  static_assert(kSplitStep % kTile == 0);

  // Shared memory: rings [kWarps][kSlots] and queries [rows], of whose place the results [kWarps][rows] of the warps make
  // use when all keys are done; the states [kWarps][rows] of the warps; what the block looks up now and then.
  static constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;
  FLASHSOFTMAX_INLINE static constexpr int states_at(int rows) {
    const int during = kRingBytes + rows * kRowBytes, after = kWarps * rows * kAccStride * int(sizeof(float));
    return during > after ? during : after;
  }
  FLASHSOFTMAX_INLINE static constexpr int block_at(int rows) {
    return states_at(rows) + kWarps * rows * int(sizeof(State<float>));
  }
  static constexpr int shared_bytes(int rows) { return block_at(rows) + int(sizeof(DecodeBlock)); }
};

struct DecodeParams {
  Attention attention;
  Splits splits;
  uint32_t rows;                             // of a kv head
  uint32_t row_tiles;                        // of a block
  uint32_t row_blocks;                       // that share keys
  bool query_packs, key_packs, value_packs;  // whether rows are read in 16 bytes
};

// A row of the tile: a query of one of the heads that share a kv head.
struct DecodeRow {
  uint32_t h, i;
  bool exists;

  __device__ __forceinline__ DecodeRow(const DecodeParams& params, const Sequence& s, uint32_t kv_head, uint32_t row)
      : h(kv_head * group(params) + row / seqlen_q(params)),
        i(row % seqlen_q(params)),
        exists(row < params.rows && i < s.q_len) {}
  __device__ __forceinline__ static uint32_t group(const DecodeParams& params) {
    return static_cast<uint32_t>(params.attention.p.group());
  }
  __device__ __forceinline__ static uint32_t seqlen_q(const DecodeParams& params) {
    return static_cast<uint32_t>(params.attention.p.seqlen_q);
  }
};

// A chunk of 16 bytes of the row of `dims` elements at data, to shared memory; zeros behind its end or where there is no
// row.
template <class T>
__device__ __forceinline__ void copy_chunk(uint32_t to, const T* data, bool exists, int chunk, int dims, int64_t stride,
                                           bool packs) {
  const int column = chunk * kPack<T>;
  if (packs) return copy_async(to, data + column, exists && column < dims);
  alignas(16) T elements[kPack<T>];
#pragma unroll
  for (int e = 0; e < kPack<T>; e++) elements[e] = exists && column + e < dims ? data[(column + e) * stride] : T(0.0f);
  shared<uint4>(to) = reinterpret_cast<const uint4&>(elements);
}

// kRows rows by a warp. Lane n knows where row n lies; there are those from `first` to `end`, the others are zeros.
template <int kRows, class T, int kDim>
__device__ __forceinline__ void copy_rows(Tile<T, kDim> to, const T* row_of_lane, int first, int end, int dims,
                                          int64_t stride, bool packs) {
  constexpr int kChunks = Tile<T, kDim>::kChunks, kCopies = kRows * kChunks / kWarp;
  const auto row_at = [&](int row) {
    return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(row_of_lane), row));
  };
  if (packs) {
    // From one copy to the next a lane keeps its chunk, and goes down some rows or across half a row.
    constexpr int kDown = kChunks < kWarp ? kWarp / kChunks : 1, kAcross = kChunks < kWarp ? 1 : kChunks / kWarp;
    const int lane = opaque(lane_id()), lane_row = lane / kChunks, lane_chunk = lane % kChunks;
    const uint32_t lane_to = to.address(lane_row, lane_chunk);
#pragma unroll
    for (int n = 0; n < kCopies; n++) {
      const int down = n / kAcross * kDown, across = n % kAcross * kWarp, row = lane_row + down;
      const int column = (lane_chunk + across) * kPack<T>;
      copy_async((lane_to ^ down % 8 * 16) + down * Tile<T, kDim>::kRowBytes + across * 16, row_at(row) + column,
                 first <= row && row < end && column < dims);
    }
  } else {
#pragma unroll 1
    for (int n = lane_id(); n < kRows * kChunks; n += kWarp) {
      const int row = n / kChunks, chunk = n % kChunks;
      copy_chunk(to.address(row, chunk), row_at(row), first <= row && row < end, chunk, dims, stride, false);
    }
  }
}

// Products become scores, in units of scale where they are plain: rows of the tile from row0 on against keys j0, j0 + 1,
// ...
template <int kColumns>
__device__ __forceinline__ void score(Fragment<1, kColumns>& s, const DecodeParams& params, const Sequence& sequence,
                                      uint32_t b, uint32_t kv_head, uint32_t row0, int64_t j0, bool plain) {
  const AttentionParams& p = params.attention.p;
  const DecodeRow rows[] = {{params, sequence, kv_head, row0 + fragment_row(0, 0)},
                            {params, sequence, kv_head, row0 + fragment_row(0, 1)}};
  Range keys[2];
#pragma unroll
  for (int h = 0; h < 2; h++) keys[h] = rows[h].exists ? keys_of(sequence.band, rows[h].i, j0) : Range{0, 0};
  if (plain) {
    for_each(s, [&](float& x, int, int c, int h, int e) {
      if (!keys[h].holds(fragment_column(c, e))) x = kHidden;
    });
  } else {
    const HeadScores heads[] = {head_scores(p, sequence.band, b, rows[0].h),
                                head_scores(p, sequence.band, b, rows[1].h)};
    for_each_in_turn(s, [&](float& x, int, int c, int h, int e) {
      const int column = fragment_column(c, e);
      const bool visible = keys[h].holds(column);
      x = visible ? heads[h].biased(heads[h].rule.capped(x), rows[h].i, j0 + column) : kHidden;
    });
  }
}

// Four elements of a row of out.
template <class T>
__device__ __forceinline__ void store(T* to, int64_t stride, int64_t left, bool packs, const float (&x)[4]) {
  if (packs) {
    if constexpr (kIsFloat<T>)
      *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    else
      *reinterpret_cast<uint2*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (e < left) to[e * stride] = T(x[e]);
  }
}

// The state of a row and four elements of its accumulator, to scratch memory or, where that is all, to out and lse.
template <class T>
__device__ __forceinline__ void finish(const DecodeParams& params, const Sequence& s, int64_t b, int64_t split,
                                       const DecodeRow& row, int column, const State<float>& state, float (&acc)[4]) {
  const AttentionParams& p = params.attention.p;
  const Splits& splits = params.splits;
  if (splits.count > 1) {
    const int64_t at = splits.at(p, split, b, row.h, row.i);
    if (column == 0) splits.states[at] = state;
    if (column < splits.width)
      *reinterpret_cast<float4*>(splits.acc + at * splits.width + column) = {acc[0], acc[1], acc[2], acc[3]};
    return;
  }
  const int64_t i = s.q_row + row.i;
  if (column == 0) static_cast<float*>(p.lse.data)[p.lse.offset(s.q_batch, row.h, i)] = lse(state);
  if (column >= p.head_dim_v) return;
  const float inverse = inverse_sum(state);
#pragma unroll
  for (float& x : acc) x *= inverse;
  T* out = static_cast<T*>(p.out.data) + p.out.offset(s.q_batch, row.h, i) + column * p.out.dim;
  store(out, p.out.dim, p.head_dim_v - column, params.attention.out_packs, acc);
}

// All rows that a sequence of impossible lengths has.
template <class T> __device__ void write_nan(const AttentionParams& p, const Sequence& s, int64_t kv_head) {
  const int64_t dims = p.head_dim_v + 1;  // and lse
  for (int64_t n = threadIdx.x; n < p.group() * s.q_len * dims; n += blockDim.x) {
    const int64_t h = kv_head * p.group() + n / dims / s.q_len, i = s.q_row + n / dims % s.q_len, d = n % dims;
    if (d < p.head_dim_v)
      static_cast<T*>(p.out.data)[p.out.offset(s.q_batch, h, i) + d * p.out.dim] = T(NAN);
    else
      static_cast<float*>(p.lse.data)[p.lse.offset(s.q_batch, h, i)] = NAN;
  }
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(DecodeShape<T, kHeadDim>::kMaxThreads, DecodeShape<T, kHeadDim>::kBlocks)
    decode_split(const __grid_constant__ DecodeParams params) {
  using Shape = DecodeShape<T, kHeadDim>;
  using KvTile = Tile<T, kHeadDim>;
  constexpr int kKeys = Shape::kKeys, kTile = Shape::kTile;
  extern __shared__ __align__(1024) char memory[];
  const AttentionParams& p = params.attention.p;
  const Splits& splits = params.splits;

  // Blocks that share keys are neighbours
  const uint32_t split_count = static_cast<uint32_t>(splits.count), heads_kv = static_cast<uint32_t>(p.heads_kv);
  uint32_t index = blockIdx.x;
  const uint32_t rows = 16 * params.row_tiles, first_row = index % params.row_blocks * rows;
  index /= params.row_blocks;
  const uint32_t split = index % split_count;
  index /= split_count;
  const uint32_t kv_head = index % heads_kv, b = index / heads_kv;

  DecodeBlock& block = *reinterpret_cast<DecodeBlock*>(memory + Shape::block_at(rows));
  const Sequence& s = block.s;
  if (threadIdx.x == 0) block.s = sequence(p, b);
  __syncthreads();
  if (s.q_len <= 0) return;
  if (!s.valid) {
    if (split == 0 && first_row == 0) write_nan<T>(p, s, kv_head);
    return;
  }

  // The keys of this split that some query sees
  const int64_t split_begin = split * splits.size, split_end = min(split_begin + splits.size, s.band.kv_len);
  const int64_t begin = max(split_begin, s.band.first(0));
  int64_t end = min(split_end, s.band.end(s.q_len - 1));
  bool pages_exist = true;
  const IntVector pages = p.block_table.advanced(b * p.block_table_row);
  if (p.block_table && split_begin < split_end) {
    const int64_t pages_end = (split_end - 1) / p.page_size + 1;
    for (int64_t n = split_begin / p.page_size + threadIdx.x; n < pages_end; n += blockDim.x)
      pages_exist = pages_exist && 0 <= pages[n] && pages[n] < p.pages;
    pages_exist = __syncthreads_and(pages_exist);
    if (!pages_exist) end = begin;
  }
  if (begin >= end && pages_exist && splits.count > 1 && !(p.sinks.data && split == 0)) {
    for (uint32_t n = threadIdx.x; n < rows; n += blockDim.x) {
      const DecodeRow row(params, s, kv_head, first_row + n);
      if (row.exists) splits.states[splits.at(p, split, b, row.h, row.i)] = State<float>{};
    }
    return;
  }

  // Q
  const uint32_t rings = shared_address(memory);
  const KvTile q_smem{rings + Shape::kRingBytes};
  for (uint32_t n = threadIdx.x; n < rows * KvTile::kChunks; n += blockDim.x) {
    const DecodeRow row(params, s, kv_head, first_row + n / KvTile::kChunks);
    const T* query = static_cast<const T*>(p.query.data);
    if (row.exists) query += p.query.offset(s.q_batch, row.h, s.q_row + row.i);
    copy_chunk(q_smem.address(n / KvTile::kChunks, n % KvTile::kChunks), query, row.exists, n % KvTile::kChunks,
               static_cast<int>(p.head_dim), p.query.dim, params.query_packs);
  }
  commit_copies();

  // The warps of other row tiles that take the same keys share a ring, and the work of filling it
  const int key_warp = warp_id() % Shape::kWarps, row_tile = warp_id() / Shape::kWarps;
  const bool alone = params.row_tiles == 1;
  const auto sync = [&] { alone ? __syncwarp() : barrier(1 + key_warp, 2 * kWarp); };
  const uint32_t ring = rings + key_warp * Shape::kSlots * Shape::kSlotBytes;
  const auto slot = [&](int n) { return KvTile{ring + n % Shape::kSlots * Shape::kSlotBytes}; };

  // Keys are counted from j0, the first of a tile; a warp's are those from first on, then kTile further, up to last
  const int64_t j0 = begin / kTile * kTile;
  const int first = static_cast<int>(begin - j0), last = static_cast<int>(max(end, begin) - j0);

  // Where a key lies: in which batch or page, and which row of it
  struct Place {
    int64_t batch, row;
  };
  const auto find = [&](int key) -> Place {
    if (!p.block_table) return {s.k_batch, s.k_row + j0 + key};
    if (key < first || key >= last) return {0, 0};
    const uint32_t j = static_cast<uint32_t>(j0 + key), page_size = static_cast<uint32_t>(p.page_size);
    return {pages[j / page_size], j % page_size};
  };

  // Copies to the slots in turn: keys, values, keys, ...
  int copies = 0, next = key_warp * kKeys;
  Place place = find(next + lane_id());
  const auto copy_next = [&] {
    const bool values = copies % 2 == 1;
    if (next < last && (alone || row_tile == values)) {
      const Tensor4 x = values ? p.value : p.key;
      const T* row = static_cast<const T*>(x.data) + x.offset(place.batch, kv_head, place.row);
      copy_rows<kKeys>(slot(copies), row, first - next, last - next,
                       static_cast<int>(values ? p.head_dim_v : p.head_dim), x.dim,
                       values ? params.value_packs : params.key_packs);
    }
    commit_copies();
    copies++;
    if (values) {
      next += kTile;
      place = find(next + lane_id());
    }
  };
  if (threadIdx.x == 0) block.visible = TileRange::of<kTile>(s.band, 0, s.q_len, j0);
#pragma unroll 1
  for (int n = 1; n < Shape::kSlots; n++) copy_next();
  wait_for_copies<Shape::kSlots - 1>();
  __syncthreads();

  const int row0 = 16 * row_tile;
  const bool plain = p.softcap == 0 && !p.alibi_slopes.data && !p.mask.data && p.scale > 0;
  const float unit = plain ? static_cast<float>(p.scale) : 1;
  RowStates<1> states;
  Fragment<1, kHeadDim / 8> acc;
  acc.fill(0);
  int used = 0;  // slots
  for (int key = key_warp * kKeys; key < last; key += kTile) {
    // S = Q K^T, while the next values are on their way
    wait_for_copies<Shape::kSlots - 2>();
    sync();
    copy_next();
    Fragment<1, kKeys / 8> s_reg;
    s_reg.fill(0);
    multiply_transposed(s_reg, q_smem, row0, slot(used++), 0, static_cast<int>(p.head_dim));
    if (!plain || block.visible.verdict(key / kTile) != Verdict::full)
      score(s_reg, params, s, b, kv_head, first_row + row0, j0 + key, plain);

    // P, and O += P V, while the next keys are
    float factors[1][2];
    states.template take<T>(s_reg, factors, unit);
    rescale(acc, factors);
    wait_for_copies<Shape::kSlots - 2>();
    sync();
    copy_next();
    multiply(acc, Operand<T, 1, kKeys / 8>(s_reg), slot(used++), 0);
  }
  states.finish(unit);

  // The results of the warps
  __syncthreads();
  const uint32_t states_smem = rings + Shape::states_at(rows);
  const auto acc_smem = [&](int warp, int row, int column) {
    return rings + ((warp * rows + row) * Shape::kAccStride + column) * int(sizeof(float));
  };
  const auto state_smem = [&](int warp, int row) {
    return states_smem + (warp * rows + row) * int(sizeof(State<float>));
  };
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + fragment_row(0, h);
    State<float> state = states.state[0][h];
    if (!pages_exist) state.l = NAN;
    if (lane_id() % 4 == 0) shared<State<float>>(state_smem(key_warp, row)) = state;
#pragma unroll
    for (int c = 0; c < kHeadDim / 8; c++)
      shared<float2>(acc_smem(key_warp, row, fragment_column(c, 0))) = {acc.x[0][c][2 * h], acc.x[0][c][2 * h + 1]};
  }
  __syncthreads();

  // Their merge, in order
  for (uint32_t n = threadIdx.x; n < rows * kHeadDim / 4; n += blockDim.x) {
    const int tile_row = n / (kHeadDim / 4), column = n % (kHeadDim / 4) * 4;
    const DecodeRow row(params, s, kv_head, first_row + tile_row);
    if (!row.exists) continue;
    State<float> total;
    if (p.sinks.data && split == 0) total = {p.sinks.at<float>(row.h), 1};
    float sum[4] = {};
#pragma unroll
    for (int warp = 0; warp < Shape::kWarps; warp++) {
      const Factors<float> factors = merge(total, shared<State<float>>(state_smem(warp, tile_row)));
      const float4 x = shared<float4>(acc_smem(warp, tile_row, column));
      const float from[] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; e++) sum[e] = sum[e] * factors.into + from[e] * factors.from;
    }
    finish<T>(params, s, b, split, row, column, total, sum);
  }
}

// scratch: decode_scratch(p) bytes
template <int kHeadDim> void decode(const AttentionParams& p, void* scratch, cudaStream_t stream) {
  const Splits splits(p, scratch);
  for_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    using Shape = DecodeShape<T, kHeadDim>;
    const int64_t rows = p.group() * p.seqlen_q;
    const int64_t row_tiles = rows > 16 ? Shape::kRowTiles : 1;
    const int64_t row_blocks = max<int64_t>(1, (rows + 16 * row_tiles - 1) / (16 * row_tiles));
    const int64_t blocks = p.sequences * p.heads_kv * splits.count * row_blocks;
    if (blocks == 0) return;
    if (blocks > INT32_MAX) throw std::invalid_argument("key: more than 2^31 splits on CUDA");
    const Attention a(p);
    const bool whole = p.head_dim % kPack<T> == 0, whole_v = p.head_dim_v % kPack<T> == 0;
    const DecodeParams params{a,
                              splits,
                              uint32_t(rows),
                              uint32_t(row_tiles),
                              uint32_t(row_blocks),
                              a.query_packs && whole,
                              a.key_packs && whole,
                              a.value_packs && whole_v};
    const auto kernel = decode_split<T, kHeadDim>;
    const int bytes = Shape::shared_bytes(16 * row_tiles);
    check("decode", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<blocks, kWarp * Shape::kWarps * row_tiles, bytes, stream>>>(params);
    check("decode", cudaGetLastError());
  });
  if (splits.count > 1) merge_splits(p, splits, stream);
}

}  // namespace flashsoftmax::cuda::sm80
