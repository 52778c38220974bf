// The map of a mask (MaskMap in mask.h): one pass over each distinct plane of the mask, before the kernel.
#include "map.h"
#include "tile.cuh"

namespace flashsoftmax::cuda {
namespace {

constexpr int kWarps = 8;
static_assert(kCellKeys == kWarp);

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(double x) { return bias_of(x); }
template <class U> __device__ __forceinline__ float number(U x) { return static_cast<float>(x); }

// Grid: one block per kWarps cells. Block: one warp per cell, a lane per key. U: bool, or the type of a bias.
template <class U>
__global__ void __launch_bounds__(kWarps* kWarp)
    map_kernel(const __grid_constant__ AttentionParams args, const __grid_constant__ MapShape shape) {
  const int64_t n = int64_t(blockIdx.x) * kWarps + warp_id();
  if (n >= shape.cells()) return;
  const int64_t key_cell = n % shape.key_cells, row = n / shape.key_cells, query_cell = row % shape.query_cells;
  const int64_t h = row / shape.query_cells % shape.heads, b = row / shape.query_cells / shape.heads;
  const int64_t i = query_cell * kCellQueries, j = key_cell * kCellKeys + lane_id();
  const int rows = static_cast<int>(min(kCellQueries, shape.queries - i));
  const bool exists = j < shape.keys;

  const Tensor4& mapped = args.mapped();
  const U* from = static_cast<const U*>(mapped.data) + mapped.offset(b, h, i) + (exists ? j * mapped.dim : 0);
  uint32_t word = 0;  // bit r: whether query i + r sees key j
#pragma unroll 4
  for (int r = 0; r < rows; r++) {
    const bool shown = sizeof(U) == 1 ? from[r * mapped.row] != U(0) : number(from[r * mapped.row]) != kHidden;
    if (exists && shown) word |= 1u << r;
  }
  uint32_t all = (1u << rows) - 1;
  if (mapped.row == 0) word = word ? 0xffff : 0, all = 0xffff;  // the row stands for all queries
  const bool some = __any_sync(~0u, word != 0), hidden = __any_sync(~0u, exists && word != all);
  const bool full = !hidden && args.map_bits.data;  // each score still has to be given its bias
  if (args.map_bits.data) static_cast<uint16_t*>(args.map_bits.data)[args.map_bits.offset(b, h, query_cell) + j] = word;
  if (lane_id() == 0)
    static_cast<uint8_t*>(args.map_cells.data)[args.map_cells.offset(b, h, query_cell) + key_cell] =
        static_cast<uint8_t>(!some  ? Verdict::skip
                             : full ? Verdict::full
                                    : Verdict::partial);
}

template <class U> void launch(const AttentionParams& args, cudaStream_t stream) {
  const MapShape shape(args);
  const int64_t blocks = checked_product("attn_mask", "cells", {(shape.cells() + kWarps - 1) / kWarps});
  map_kernel<U><<<blocks, kWarps * kWarp, 0, stream>>>(args, shape);
  check("map of the mask", cudaGetLastError());
}

}  // namespace

AttentionParams with_map(AttentionParams args, void* memory, cudaStream_t stream) {
  if (map_bytes(args) == 0) return args;
  place_map(args, memory);
  if (args.mask.data) {
    launch<uint8_t>(args, stream);
    args.mask = args.map_bits;
    return args;
  }
  switch (args.bias_dtype) {
    case DType::f16: launch<__half>(args, stream); break;
    case DType::bf16: launch<__nv_bfloat16>(args, stream); break;
    case DType::f32: launch<float>(args, stream); break;
    default: launch<double>(args, stream);
  }
  return args;
}

}  // namespace flashsoftmax::cuda
