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

struct DecodeParams {
  Attention attention;
  Splits splits;
  uint32_t rows;                             // of a kv head
  uint32_t row_tiles;                        // of a block
  uint32_t row_blocks;                       // that share keys
  bool query_packs, key_packs, value_packs;  // whether rows are read in 16 bytes
};

// What a block works on. It lies in shared memory to leave the registers to the accumulators.
struct DecodeBlock {
  uint32_t b, kv_head, split, first_row;
  Sequence s;
  int64_t split_begin, split_end;  // the keys of the split that exist
  int64_t j0;                      // the first key of the first tile
  int first, last;                 // from j0 on the keys [first, last) of the split that some query sees; 0 if none
  TileRange visible;
  bool readable;  // whether the split's pages exist: if not its rows are NaN

  // Blocks that share keys are neighbours.
  template <int kTile> __device__ __forceinline__ void take(const DecodeParams& params, uint32_t index) {
    const AttentionParams& p = params.attention.p;
    const uint32_t splits = static_cast<uint32_t>(params.splits.count), heads_kv = static_cast<uint32_t>(p.heads_kv);
    first_row = index % params.row_blocks * params.row_tiles * 16;
    split = index / params.row_blocks % splits;
    kv_head = index / params.row_blocks / splits % heads_kv;
    b = index / params.row_blocks / splits / heads_kv;
    s = sequence(p, b);
    split_begin = split * params.splits.size;
    split_end = min(split_begin + params.splits.size, s.band.kv_len);
    const int64_t begin = max(split_begin, s.band.first(0)), end = min(split_end, s.band.end(s.q_len - 1));
    j0 = begin / kTile * kTile;
    first = begin < end ? static_cast<int>(begin - j0) : 0;
    last = begin < end ? static_cast<int>(end - j0) : 0;
    visible = TileRange::of<kTile>(s.band, 0, s.q_len, j0);
  }
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

// A row of the tile: a query of one of the heads that share a kv head. Where there is none the head exists all the same.
struct DecodeRow {
  uint32_t h, i;
  bool exists;

  __device__ __forceinline__ DecodeRow(const DecodeParams& params, const DecodeBlock& block, uint32_t tile_row) {
    const uint32_t row = block.first_row + tile_row, seqlen_q = static_cast<uint32_t>(params.attention.p.seqlen_q);
    const uint32_t head = row < params.rows ? row / seqlen_q : 0;
    h = block.kv_head * static_cast<uint32_t>(params.attention.p.group()) + head;
    i = row - head * seqlen_q;
    exists = row < params.rows && i < block.s.q_len;
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
    __syncwarp();
  }
}

// Products become scores, in units of scale where they are plain: rows of the tile from row0 on against keys from `key` on.
template <int kColumns>
__device__ __forceinline__ void score(Fragment<1, kColumns>& s, const DecodeParams& params, const DecodeBlock& block,
                                      uint32_t row0, int key, bool plain) {
  const AttentionParams& p = params.attention.p;
  const Band& band = block.s.band;
  const int64_t j0 = block.j0 + key;
  const DecodeRow rows[] = {{params, block, row0 + fragment_row(0, 0)}, {params, block, row0 + fragment_row(0, 1)}};
  Range keys[2];
#pragma unroll
  for (int h = 0; h < 2; h++) keys[h] = rows[h].exists ? keys_of(band, rows[h].i, j0) : Range{0, 0};
  if (plain) {
    for_each(s, [&](float& x, int, int c, int h, int e) {
      if (!keys[h].holds(fragment_column(c, e))) x = kHidden;
    });
  } else {
    const HeadScores heads[] = {head_scores(p, band, block.b, rows[0].h), head_scores(p, band, block.b, rows[1].h)};
    for_each_in_turn(s, [&](float& x, int, int c, int h, int e) {
      const int column = fragment_column(c, e);
      const bool visible = keys[h].holds(column);
      x = visible ? heads[h].at(heads[h].score.content(x), rows[h].i, j0 + column) : kHidden;
    });
  }
}

// Four elements of a row of out.
template <class T>
__device__ __forceinline__ void store(T* to, int64_t stride, int64_t left, bool packs, const float (&x)[4]) {
  struct alignas(4 * sizeof(T)) Four {
    T elements[4];
  } four;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    four.elements[e] = T(x[e]);
    if (!packs && e < left) to[e * stride] = four.elements[e];
  }
  if (packs) *reinterpret_cast<Four*>(to) = four;
}

// The state of a row and four elements of its accumulator, to scratch memory or, where that is all, to out and lse.
template <class T>
__device__ __forceinline__ void finish(const DecodeParams& params, const DecodeBlock& block, const DecodeRow& row,
                                       int column, const State<float>& state, float (&acc)[4]) {
  const AttentionParams& p = params.attention.p;
  const Splits& splits = params.splits;
  if (splits.count > 1) {
    const int64_t at = splits.at(p, block.split, block.b, row.h, row.i);
    if (column == 0) splits.states[at] = make_float2(state.m, state.l);
    if (column < splits.width)
      *reinterpret_cast<float4*>(splits.acc + at * splits.width + column) = make_float4(acc[0], acc[1], acc[2], acc[3]);
    return;
  }
  const Sequence& s = block.s;
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

  const uint32_t rows = 16 * params.row_tiles;
  DecodeBlock& block = *reinterpret_cast<DecodeBlock*>(memory + Shape::block_at(rows));
  const Sequence& s = block.s;
  if (threadIdx.x == 0) block.take<kTile>(params, blockIdx.x);
  __syncthreads();
  if (s.q_len <= 0) return;
  if (!s.valid) {
    if (block.split == 0 && block.first_row == 0) write_nan<T>(p, s, block.kv_head);
    return;
  }
  const bool readable = pages_exist(p, block.b, block.split_begin, block.split_end);
  const int last = readable ? block.last : 0;
  if (last == 0 && readable && splits.count > 1 && !(p.sinks.data && block.split == 0)) {
    for (uint32_t n = threadIdx.x; n < rows; n += blockDim.x) {
      const DecodeRow row(params, block, n);
      if (row.exists) splits.states[splits.at(p, block.split, block.b, row.h, row.i)] = make_float2(kHidden, 0);
    }
    return;
  }

  if (threadIdx.x == 0) block.readable = readable;

  // Q
  const uint32_t rings = shared_address(memory);
  const KvTile q_smem{rings + Shape::kRingBytes};
  for (uint32_t n = threadIdx.x; n < rows * KvTile::kChunks; n += blockDim.x) {
    const DecodeRow row(params, block, n / KvTile::kChunks);
    const T* query = static_cast<const T*>(p.query.data);
    if (row.exists) query += p.query.offset(s.q_batch, row.h, s.q_row + row.i);
    copy_chunk(q_smem.address(n / KvTile::kChunks, n % KvTile::kChunks), query, row.exists, n % KvTile::kChunks,
               static_cast<int>(p.head_dim), p.query.dim, params.query_packs);
  }
  __syncwarp();
  commit_copies();

  // The warps of other row tiles that take the same keys share a ring, and the work of filling it
  const int key_warp = warp_id() % Shape::kWarps, row_tile = warp_id() / Shape::kWarps;
  const bool alone = params.row_tiles == 1;
  const auto sync = [&] { alone ? __syncwarp() : barrier(1 + key_warp, 2 * kWarp); };
  const uint32_t ring = rings + key_warp * Shape::kSlots * Shape::kSlotBytes;
  const auto slot = [&](int n) { return KvTile{ring + n % Shape::kSlots * Shape::kSlotBytes}; };

  const int warp_key = key_warp * kKeys;  // of its first tile; from one tile to the next it is kTile

  // Where this lane's key of the next tile lies: in which page, and which row of it. Asked for a while before it is used
  uint32_t page = 0, page_row = 0;
  const auto find = [&](int tile) {
    if (!p.block_table) return;
    const int key = tile * kTile + warp_key + lane_id();
    if (block.first <= key && key < last) {
      const uint32_t j = static_cast<uint32_t>(block.j0 + key), page_size = static_cast<uint32_t>(p.page_size);
      page = static_cast<uint32_t>(p.block_table.advanced(block.b * p.block_table_row)[j / page_size]);
      page_row = j % page_size;
    }
    __syncwarp();
  };
  // The copies to the slots: keys of tile 0, its values, keys of tile 1, ...
  const auto begin_copy = [&](int n) {
    const bool values = n % 2 == 1;
    const int key = n / 2 * kTile + warp_key;
    if (key < last && (alone || row_tile == values)) {
      const Tensor4 x = values ? p.value : p.key;
      const int64_t offset = p.block_table ? x.offset(page, block.kv_head, page_row)
                                           : x.offset(s.k_batch, block.kv_head, s.k_row + block.j0 + key + lane_id());
      copy_rows<kKeys>(slot(n), static_cast<const T*>(x.data) + offset, block.first - key, last - key,
                       static_cast<int>(values ? p.head_dim_v : p.head_dim), x.dim,
                       values ? params.value_packs : params.key_packs);
    }
    commit_copies();
    if (values) find(n / 2 + 1);
  };
  find(0);
#pragma unroll 1
  for (int n = 0; n < Shape::kSlots - 1; n++) begin_copy(n);
  wait_for_copies<Shape::kSlots - 1>();
  __syncthreads();

  const int row0 = 16 * row_tile;
  const bool plain = p.scale_in_exp();
  const float unit = plain ? static_cast<float>(p.scale) : 1;
  RowStates<1> states;
  Fragment<1, kHeadDim / 8> acc;
  acc.fill(0);
  for (int tile = 0; tile * kTile + warp_key < last; tile++) {
    // S = Q K^T, while the next values are on their way
    wait_for_copies<Shape::kSlots - 2>();
    sync();
    begin_copy(2 * tile + Shape::kSlots - 1);
    Fragment<1, kKeys / 8> s_reg;
    s_reg.fill(0);
    multiply_transposed(s_reg, q_smem, row0, slot(2 * tile), 0, static_cast<int>(p.head_dim));
    if (!plain || block.visible.verdict(tile) != Verdict::full)
      score(s_reg, params, block, row0, tile * kTile + warp_key, plain);

    // P, and O += P V, while the next keys are
    float factors[1][2];
    states.template take<T>(s_reg, factors, unit);
    rescale(acc, factors);
    wait_for_copies<Shape::kSlots - 2>();
    sync();
    begin_copy(2 * tile + Shape::kSlots);
    multiply(acc, Operand<T, 1, kKeys / 8>(s_reg), slot(2 * tile + 1), 0);
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
    if (!block.readable) state.l = NAN;
    if (lane_id() % 4 == 0) shared<State<float>>(state_smem(key_warp, row)) = state;
#pragma unroll
    for (int c = 0; c < kHeadDim / 8; c++)
      shared<float2>(acc_smem(key_warp, row, fragment_column(c, 0))) = {acc.x[0][c][2 * h], acc.x[0][c][2 * h + 1]};
  }
  __syncthreads();

  // Their merge, in order
  for (uint32_t n = threadIdx.x; n < rows * kHeadDim / 4; n += blockDim.x) {
    const int tile_row = n / (kHeadDim / 4), column = n % (kHeadDim / 4) * 4;
    const DecodeRow row(params, block, tile_row);
    if (!row.exists) continue;
    State<float> total;
    if (p.sinks.data && block.split == 0) total = {p.sinks.at<float>(row.h), 1};
    float sum[4] = {};
#pragma unroll
    for (int warp = 0; warp < Shape::kWarps; warp++) {
      const Factors<float> factors = merge(total, shared<State<float>>(state_smem(warp, tile_row)));
      const float4 x = shared<float4>(acc_smem(warp, tile_row, column));
      const float from[] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; e++) sum[e] = sum[e] * factors.into + from[e] * factors.from;
    }
    finish<T>(params, block, row, column, total, sum);
  }
}

// scratch: decode_scratch(p) bytes
template <int kHeadDim> void decode(const AttentionParams& p, void* scratch, cudaStream_t stream) {
  const Splits splits(p, scratch);
  for_dtype("query", p.dtype, [&](auto element) {
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
