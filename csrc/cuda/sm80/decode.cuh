// Split-KV decode: attention of few queries over many keys.
//
// The queries of all heads that share a key head are the rows of one tile, so that its keys and values are read once. A
// block takes one split of the keys. Each of its warps takes kKeys keys at a time that no other warp takes, through its
// own ring of slots in shared memory; so warps wait for each other only at the end, when their states are merged. The
// number of a key alone decides which warp takes it.
#pragma once

#include "../elements.cuh"
#include "../overflow.cuh"
#include "../rows.cuh"
#include "../scores.cuh"
#include "launch.h"

namespace flashsoftmax::cuda::sm80 {

struct DecodeParams {
  AttentionParams args;
  Alignment aligned;
  Splits splits;
  uint32_t row_tiles;   // of 16 rows, per block
  uint32_t row_blocks;  // blocks with the same keys
};

// What a block works on, in shared memory to leave the registers to the accumulators.
struct DecodeBlock {
  uint32_t b, kv_head, split, first_row;
  Sequence seq;
  int64_t j0;       // the first key of the first tile
  int first, last;  // relative to j0, the keys [first, last) of the split that some query sees; 0, 0 if none
  TileRange visible;
  Visibility shown;  // to any of the rows of the key head
  bool readable;     // whether the pages of these keys exist; if not, the rows are NaN
  bool overflowed;   // whether a sum of weighted values is not finite

  // Blocks with the same keys are neighbours.
  template <int kTile> __device__ __forceinline__ void locate(const DecodeParams& params, uint32_t index) {
    const AttentionParams& args = params.args;
    const uint32_t splits = static_cast<uint32_t>(params.splits.count), heads_kv = static_cast<uint32_t>(args.heads_kv);
    first_row = index % params.row_blocks * params.row_tiles * 16;
    split = index / params.row_blocks % splits;
    kv_head = index / params.row_blocks / splits % heads_kv;
    b = index / params.row_blocks / splits / heads_kv;
    seq = sequence(args, b);
    const int64_t split_begin = split * params.splits.size;
    const int64_t split_end = min(split_begin + params.splits.size, seq.band.kv_len);
    const int64_t begin = max(split_begin, seq.band.first(0)), end = min(split_end, seq.band.end(seq.q_len - 1));
    j0 = begin / kTile * kTile;
    first = begin < end ? static_cast<int>(begin - j0) : 0;
    last = begin < end ? static_cast<int>(end - j0) : 0;
    visible = TileRange::of<kTile>(seq.band, 0, seq.q_len, j0);
    shown = visibility(args, seq, b, kv_head * args.group(), args.group());
    overflowed = false;
  }
};

template <class T, int kHeadDim> struct DecodeShape {
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr int kMinKeys = kIsFloat<T> ? 8 : 16;  // of a product
  static constexpr int kKeys = 4096 / kRowBytes > kMinKeys ? 4096 / kRowBytes : kMinKeys;
  static constexpr int kSlots = 4, kSlotBytes = kKeys * kRowBytes;  // of a ring: keys and values of two tiles
  static constexpr int kWarps = 65536 / (kSlots * kSlotBytes);      // that take different keys
  static constexpr int kTile = kWarps * kKeys;                      // keys of a block's tile
  static constexpr int kMaxRowTiles = 2;                            // of 16 rows, each with kWarps warps
  static constexpr int kMaxThreads = kWarp * kWarps * kMaxRowTiles;
  static constexpr int kBlocksPerSM = kRowBytes > 256 ? 1 : 2;
  static constexpr int kAccStride = kHeadDim + 8;  // floats of a row of results: without bank conflicts
  static_assert(kSplitStep % kTile == 0);

  // Shared memory holds first the rings [kWarps][kSlots] and the queries [rows], later in their place the results
  // [kWarps][rows] of the warps; behind them the states [kWarps][rows] of the warps and the DecodeBlock.
  static constexpr int kRingBytes = kSlots * kSlotBytes, kQueriesAt = kWarps * kRingBytes;
  FLASHSOFTMAX_INLINE static constexpr int states_at(int rows) {
    const int during = kQueriesAt + rows * kRowBytes, after = kWarps * rows * kAccStride * int(sizeof(float));
    return during > after ? during : after;
  }
  FLASHSOFTMAX_INLINE static constexpr int block_at(int rows) {
    return states_at(rows) + kWarps * rows * int(sizeof(State<float>));
  }
  static constexpr int shared_bytes(int rows) { return block_at(rows) + int(sizeof(DecodeBlock)); }
};

// A row of the block's tile: query i of head h, which may not exist. The head exists in any case.
struct DecodeRow {
  uint32_t h, i;
  bool exists;

  __device__ __forceinline__ DecodeRow(const DecodeParams& params, const DecodeBlock& block, uint32_t tile_row) {
    const uint32_t row = block.first_row + tile_row, queries = static_cast<uint32_t>(block.seq.q_len);
    const uint32_t group = static_cast<uint32_t>(params.args.group());
    exists = row < group * queries;
    const uint32_t head = exists ? row / queries : 0;
    h = block.kv_head * group + head;
    i = row - head * queries;
  }
};

// Copies one chunk of a row of `dims` elements to shared memory: zeros behind its end, and if there is no such row.
template <class T>
__device__ __forceinline__ void copy_chunk(uint32_t to, const T* row, bool exists, int chunk, int dims, int64_t stride,
                                           bool aligned) {
  const int column = chunk * kChunk<T>;
  if (aligned) return copy_async_if(exists && column < dims, to, row + column);
  alignas(16) T elements[kChunk<T>];
#pragma unroll
  for (int e = 0; e < kChunk<T>; e++) elements[e] = exists && column + e < dims ? row[(column + e) * stride] : T(0.0f);
  shared<uint4>(to) = reinterpret_cast<const uint4&>(elements);
}

// Copies kRows rows to a tile, by one warp. Lane n knows the address of row n. Rows outside [first, end) become zeros.
template <int kRows, class T, int kDim>
__device__ __forceinline__ void copy_rows(Tile<T, kDim> to, const T* row_of_lane, int first, int end, int dims,
                                          int64_t stride, bool aligned) {
  constexpr int kChunks = Tile<T, kDim>::kChunks, kCopies = kRows * kChunks / kWarp;
  const auto row_at = [&](int row) {
    return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(row_of_lane), row));
  };
  if (aligned) {
    // From one copy to the next, a lane keeps its chunk and goes down some rows, or goes across half a row.
    constexpr int kDown = kChunks < kWarp ? kWarp / kChunks : 1, kAcross = kChunks < kWarp ? 1 : kChunks / kWarp;
    const int lane = hide_from_optimizer(lane_id()), lane_row = lane / kChunks, lane_chunk = lane % kChunks;
    const uint32_t lane_to = to.address(lane_row, lane_chunk);
#pragma unroll
    for (int n = 0; n < kCopies; n++) {
      const int down = n / kAcross * kDown, across = n % kAcross * kWarp, row = lane_row + down;
      const int column = (lane_chunk + across) * kChunk<T>;
      copy_async_if(first <= row && row < end && column < dims,
                    (lane_to ^ down % 8 * 16) + down * Tile<T, kDim>::kRowBytes + across * 16, row_at(row) + column);
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

// Copies the block's queries to q_smem [rows][kHeadDim].
template <class T, int kHeadDim>
__device__ __forceinline__ void copy_queries(const DecodeParams& params, const DecodeBlock& block,
                                             Tile<T, kHeadDim> q_smem, uint32_t rows) {
  constexpr int kChunks = Tile<T, kHeadDim>::kChunks;
  const Tensor4& query = params.args.query;
  for (uint32_t n = threadIdx.x; n < rows * kChunks; n += blockDim.x) {
    const DecodeRow row(params, block, n / kChunks);
    const T* from = static_cast<const T*>(query.data);
    if (row.exists) from += query.offset(block.seq.q_batch, row.h, block.seq.q_row + row.i);
    copy_chunk(q_smem.address(n / kChunks, n % kChunks), from, row.exists, n % kChunks,
               static_cast<int>(params.args.head_dim), query.dim, params.aligned.query);
  }
  __syncwarp();
  commit_copies();
}

// The ring of slots through which the tiles of one warp pass, but those that the mask hides: the keys of the first tile,
// their values, the keys of the next, and so on. If the block has two row tiles, the two warps that take the same keys
// share a ring: one copies the keys, the other the values.
template <class T, int kHeadDim> struct DecodeRing {
  using Shape = DecodeShape<T, kHeadDim>;
  const DecodeParams& params;
  const DecodeBlock& block;
  uint32_t base;
  int key_warp, row_tile;
  int warp_key;  // the first key of the warp's first tile; its tiles are kTile keys apart
  int last;
  bool alone;
  int tile = 0;                     // whose keys and values are copied next
  uint32_t page = 0, page_row = 0;  // where this lane's key of that tile lies

  __device__ __forceinline__ DecodeRing(const DecodeParams& params, const DecodeBlock& block, uint32_t rings, int last)
      : params(params), block(block), last(last), alone(params.row_tiles == 1) {
    key_warp = warp_id() % Shape::kWarps;
    row_tile = warp_id() / Shape::kWarps;
    base = rings + key_warp * Shape::kRingBytes;
    warp_key = key_warp * Shape::kKeys;
  }
  // Slot n of the sequence above, a tile [kKeys][kHeadDim].
  __device__ __forceinline__ Tile<T, kHeadDim> slot(int n) const {
    return {base + n % Shape::kSlots * Shape::kSlotBytes};
  }
  // A barrier for the warps of the ring.
  __device__ __forceinline__ void sync() const { alone ? __syncwarp() : barrier(1 + key_warp, 2 * kWarp); }
  // Waits for slot n, n = 0, 1, ... in turn; then all warps of the ring are done with slot n - 1.
  __device__ __forceinline__ void wait() const {
    wait_for_copies<Shape::kSlots - 2>();
    sync();
  }
  // The first of the warp's tiles from `tile` on that the mask does not hide; else one that has no keys.
  __device__ __forceinline__ int next_shown(int tile) const {
    if (!block.shown.map) return tile;
#pragma unroll 1
    for (; tile * Shape::kTile + warp_key < last; tile++) {
      const int64_t j = block.j0 + tile * Shape::kTile + warp_key;
      // All rows are in the first cell of queries, so one stands for all.
      if (warp_verdict(block.shown, 0, 1, j, min(j + Shape::kKeys, block.seq.band.kv_len)) != Verdict::skip) break;
    }
    return tile;
  }
  // Goes on to the next tile to be copied, and looks up the page of this lane's key, a while before the copy needs it.
  __device__ __forceinline__ void advance(int from) {
    tile = next_shown(from);
    const AttentionParams& args = params.args;
    if (!args.block_table) return;
    const int key = tile * Shape::kTile + warp_key + lane_id();
    if (block.first <= key && key < last) {
      const uint32_t j = static_cast<uint32_t>(block.seq.first_key + block.j0 + key),
                     page_size = static_cast<uint32_t>(args.page_size);
      page = static_cast<uint32_t>(args.block_table.advanced(block.b * args.block_table_row)[j / page_size]);
      page_row = j % page_size;
    }
    __syncwarp();
  }
  // Begins and commits the copy to slot n, n = 0, 1, ... in turn.
  __device__ __forceinline__ void begin_copy(int n) {
    const AttentionParams& args = params.args;
    const bool values = n % 2 == 1;
    const int key = tile * Shape::kTile + warp_key;
    if (key < last && (alone || row_tile == values)) {
      const Tensor4 x = values ? args.value : args.key;
      const int64_t offset =
          args.block_table ? x.offset(page, block.kv_head, page_row)
                           : x.offset(block.seq.k_batch, block.kv_head, block.seq.k_row + block.j0 + key + lane_id());
      copy_rows<Shape::kKeys>(slot(n), static_cast<const T*>(x.data) + offset, block.first - key, last - key,
                              static_cast<int>(values ? args.head_dim_v : args.head_dim), x.dim,
                              values ? params.aligned.value : params.aligned.key);
    }
    commit_copies();
    if (values) advance(tile + 1);
  }
};

// Products become scores, in multiples of scale if they are plain: rows of the tile from row0 on, against keys j0 +
// key, j0 + key + 1, ...
template <int kColumns>
__device__ __forceinline__ void make_scores(Fragment<1, kColumns>& s, const DecodeParams& params,
                                            const DecodeBlock& block, uint32_t row0, int key, bool plain) {
  const AttentionParams& args = params.args;
  const Band& band = block.seq.band;
  const int64_t j0 = block.j0 + key;
  const DecodeRow rows[] = {{params, block, row0 + fragment_row(0, 0)}, {params, block, row0 + fragment_row(0, 1)}};
  Range visible[1][2];
#pragma unroll
  for (int h = 0; h < 2; h++) visible[0][h] = rows[h].exists ? keys_of(band, rows[h].i, j0) : Range{0, 0};
  if (plain) {
    hide(s, visible);
  } else {
    products_to_scores(s, visible, [&](float x, int, int h, int column) {
      // Found again for each key: to keep it for both rows would take more registers than there are.
      const HeadScores head = head_scores(args, block.seq, hide_from_optimizer(rows[h].h));
      return head.at(head.score.content(x), rows[h].i, j0 + column);
    });
  }
}

// Where the states [kWarps][rows] and the accumulators [kWarps][rows][kAccStride] of the warps meet in shared memory.
template <class Shape> struct DecodeResults {
  uint32_t base, rows;

  __device__ __forceinline__ uint32_t acc(int warp, int row, int column) const {
    return base + ((warp * rows + row) * Shape::kAccStride + column) * int(sizeof(float));
  }
  __device__ __forceinline__ uint32_t state(int warp, int row) const {
    return base + Shape::states_at(rows) + (warp * rows + row) * int(sizeof(State<float>));
  }
};

// Stores what a warp has found for the 16 rows from row0 on.
template <class Shape, int kColumns>
__device__ __forceinline__ void store_results(const DecodeResults<Shape>& results, int warp, int row0,
                                              const RowStates<1>& states, const Fragment<1, kColumns>& acc,
                                              bool readable) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + fragment_row(0, h);
    State<float> state = states.state[0][h];
    if (!readable) state.l = NAN;
    if (lane_id() % 4 == 0) shared<State<float>>(results.state(warp, row)) = state;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
      shared<float2>(results.acc(warp, row, fragment_column(c, 0))) = {acc.x[0][c][2 * h], acc.x[0][c][2 * h + 1]};
  }
}

// Writes the state of a row, and four elements of its accumulator: to scratch memory or, from a single split, as
// elements of out and lse.
template <class T>
__device__ __forceinline__ void write_state(const DecodeParams& params, const DecodeBlock& block, const DecodeRow& row,
                                            int column, const State<float>& state, float (&acc)[4]) {
  const AttentionParams& args = params.args;
  const Splits& splits = params.splits;
  if (splits.count > 1) {
    const int64_t at = splits.at(args, block.split, block.b, row.h, row.i);
    if (column == 0) splits.states[at] = make_float2(state.m, state.l);
    if (column < splits.width)
      *reinterpret_cast<float4*>(splits.acc + at * splits.width + column) = make_float4(acc[0], acc[1], acc[2], acc[3]);
    return;
  }
  const int64_t b = block.seq.q_batch, i = block.seq.q_row + row.i;
  if (column == 0) write_lse(args, b, row.h, i, state);
  if (column >= args.head_dim_v) return;
  const float inverse = inverse_sum(state);
#pragma unroll
  for (float& x : acc) x *= inverse;
  store(static_cast<T*>(args.out.data) + args.out.offset(b, row.h, i), args.out.dim, column, args.head_dim_v,
        params.aligned.out, acc);
}

// Merges the states of the warps in order, and writes the result: four elements of a row per thread at a time. The sink
// is the first state of the first split.
template <class T, int kHeadDim, class Shape>
__device__ __forceinline__ void merge_results(const DecodeParams& params, DecodeBlock& block,
                                              const DecodeResults<Shape>& results) {
  const AttentionParams& args = params.args;
  for (uint32_t n = threadIdx.x; n < results.rows * kHeadDim / 4; n += blockDim.x) {
    const int tile_row = n / (kHeadDim / 4), column = n % (kHeadDim / 4) * 4;
    const DecodeRow row(params, block, tile_row);
    if (!row.exists) continue;
    State<float> total;
    if (args.sinks.data && block.split == 0) total = {args.sinks.at<float>(row.h), 1};
    float acc[4] = {};
#pragma unroll
    for (int warp = 0; warp < Shape::kWarps; warp++) {
      const Factors<float> factors = merge(total, shared<State<float>>(results.state(warp, tile_row)));
      const float4 x = shared<float4>(results.acc(warp, tile_row, column));
      const float from[] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; e++) acc[e] = acc[e] * factors.into + from[e] * factors.from;
    }
    if constexpr (kMayOverflow<T>)  // inf * 0 is NaN
      if (acc[0] * 0 + acc[1] * 0 + acc[2] * 0 + acc[3] * 0 != 0) block.overflowed = true;
    write_state<T>(params, block, row, column, total, acc);
  }
}

// Handles the blocks that compute no attention: no queries, impossible lengths, or a split without a visible key. Else
// returns false, and block.readable and `last`, the end of the keys to be read.
template <class T>
__device__ __forceinline__ bool finished_early(const DecodeParams& params, DecodeBlock& block, uint32_t rows,
                                               int& last) {
  const AttentionParams& args = params.args;
  const Splits& splits = params.splits;
  const Sequence& seq = block.seq;
  if (seq.q_len <= 0) return true;
  if (!seq.valid) {
    if (block.split > 0 || block.first_row > 0) return true;
    for (int64_t h = block.kv_head * args.group(); h < (block.kv_head + 1) * args.group(); h++)
      write_nan_results<T>(args, seq.q_batch, h, seq.q_row, seq.q_len);
    return true;
  }
  if (block.first_row >= args.group() * seq.q_len) return true;
  const bool readable = pages_exist(args, seq, block.b, block.j0 + block.first, block.j0 + block.last);
  last = readable ? block.last : 0;
  if (last == 0 && readable && splits.count > 1 && !(args.sinks.data && block.split == 0)) {
    for (uint32_t n = threadIdx.x; n < rows; n += blockDim.x) {
      const DecodeRow row(params, block, n);
      if (row.exists) splits.states[splits.at(args, block.split, block.b, row.h, row.i)] = make_float2(kHidden, 0);
    }
    return true;
  }
  if (threadIdx.x == 0) block.readable = readable;
  return false;
}

// Grid: one block per (sequence, key head, split, row_blocks), the last fastest. Block: kWarps warps per row tile.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(DecodeShape<T, kHeadDim>::kMaxThreads, DecodeShape<T, kHeadDim>::kBlocksPerSM)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  using Shape = DecodeShape<T, kHeadDim>;
  constexpr int kKeys = Shape::kKeys, kTile = Shape::kTile;
  extern __shared__ __align__(1024) char memory[];
  const AttentionParams& args = params.args;
  const uint32_t rows = 16 * params.row_tiles, base = shared_address(memory);
  DecodeBlock& block = *reinterpret_cast<DecodeBlock*>(memory + Shape::block_at(rows));

  if (threadIdx.x == 0) block.locate<kTile>(params, blockIdx.x);
  __syncthreads();
  int last;
  if (finished_early<T>(params, block, rows, last)) return;

  const Tile<T, kHeadDim> q_smem{base + Shape::kQueriesAt};  // [rows][kHeadDim]
  copy_queries(params, block, q_smem, rows);
  DecodeRing<T, kHeadDim> ring(params, block, base, last);
  ring.advance(0);
#pragma unroll 1
  for (int n = 0; n < Shape::kSlots - 1; n++) ring.begin_copy(n);
  wait_for_copies<Shape::kSlots - 1>();
  __syncthreads();

  const int row0 = 16 * ring.row_tile;
  const bool plain = args.scale_in_exp();
  const float unit = plain ? static_cast<float>(args.scale) : 1;
  RowStates<1> states;
  Fragment<1, kHeadDim / 8> acc;  // [16][kHeadDim], of O
  acc.fill(0);
  int n = 0;  // tiles done
  for (int tile = ring.next_shown(0); tile * kTile + ring.warp_key < last; tile = ring.next_shown(tile + 1), n++) {
    // S = Q K^T and its weights, while the next values are copied.
    ring.wait();
    ring.begin_copy(2 * n + Shape::kSlots - 1);
    Fragment<1, kKeys / 8> s;  // [16][kKeys]
    s.fill(0);
    multiply_transposed(s, q_smem, row0, ring.slot(2 * n), 0, static_cast<int>(args.head_dim));
    if (!plain || block.visible.verdict(tile) != Verdict::full)
      make_scores(s, params, block, row0, tile * kTile + ring.warp_key, plain);
    float factors[1][2];
    states.template scores_to_weights<T>(s, factors, unit);
    rescale(acc, factors);

    // O += P V, while the next keys are copied.
    ring.wait();
    ring.begin_copy(2 * n + Shape::kSlots);
    const Operand<T, 1, kKeys / 8> p(s);  // [16][kKeys]
    multiply(acc, p, ring.slot(2 * n + 1), 0);
  }
  states.finish(unit);

  // The results of the warps, in place of rings and queries.
  __syncthreads();
  const DecodeResults<Shape> results{base, rows};
  store_results(results, ring.key_warp, row0, states, acc, block.readable);
  __syncthreads();
  merge_results<T, kHeadDim>(params, block, results);
  if constexpr (kMayOverflow<T>) {
    __syncthreads();
    if (!block.overflowed || params.splits.count > 1) return;  // the merge of several splits does this itself
    for (uint32_t n = warp_id(); n < rows; n += blockDim.x / kWarp) {
      const DecodeRow row(params, block, n);
      if (row.exists) recompute_row<T>(args, block.b, row.h, row.i, lane_id());
    }
  }
}

// scratch: decode_scratch(args) bytes
template <int kHeadDim> void decode(const AttentionParams& args, void* scratch, cudaStream_t stream) {
  const Splits splits(args, scratch);
  for_dtype("query", args.dtype, [&](auto element) {
    using T = decltype(element);
    using Shape = DecodeShape<T, kHeadDim>;
    if (args.heads_kv == 0) return;
    const int64_t rows = checked_product("query", "rows per key head", {args.group(), args.seqlen_q});
    const int64_t row_tiles = rows > 16 ? Shape::kMaxRowTiles : 1;
    const int64_t row_blocks = max<int64_t>(1, (rows + 16 * row_tiles - 1) / (16 * row_tiles));
    const int64_t blocks = checked_product("key", "splits", {args.sequences, args.heads_kv, splits.count, row_blocks});
    if (blocks == 0) return;
    const DecodeParams params{args, Alignment(args), splits, uint32_t(row_tiles), uint32_t(row_blocks)};
    const auto kernel = decode_kernel<T, kHeadDim>;
    // The limit is one per kernel, not per launch: a smaller one could meet the launch of another thread.
    constexpr int kMaxBytes = Shape::shared_bytes(16 * Shape::kMaxRowTiles);
    check("decode", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxBytes));
    kernel<<<blocks, kWarp * Shape::kWarps * row_tiles, Shape::shared_bytes(16 * row_tiles), stream>>>(params);
    check("decode", cudaGetLastError());
  });
  if (splits.count > 1) merge_splits(args, splits, stream);
}

}  // namespace flashsoftmax::cuda::sm80
