// Copies rows into a cache or a new tensor, and rotates them on the way.
#include "elements.cuh"
#include "launch.h"

namespace flashsoftmax::cuda {
namespace {

constexpr int64_t kWarp = 32, kRows = 8;  // a warp per row

// Grid: one block per kRows rows. Block: lanes x kRows. C: the element type of the tables.
template <class T, class C>
__global__ void __launch_bounds__(kWarp* kRows) copy_rows_kernel(const __grid_constant__ CopyRowsParams args) {
  const Rotary& rotary = args.rotary;
  const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.y;
  const int64_t i = row % args.rows, h = row / args.rows % args.heads, b = row / args.rows / args.heads;
  if (b >= args.batch) return;
  const RowPlace place = row_place(args, b, i);
  if (!place.valid) return;
  const T* from = static_cast<const T*>(args.from.data) + args.from.offset(b, h, i);
  T* to = static_cast<T*>(args.to.data) + args.to.offset(place.slot, h, place.row);

  // The pairs are rotated. A position that the tables do not have gives NaN.
  const int64_t pairs = rotary.pairs, position = pairs > 0 ? rotary_position(rotary, b, i) : 0;
  const C* cos = static_cast<const C*>(rotary.cos.data) + position * rotary.cos.row;
  const C* sin = static_cast<const C*>(rotary.sin.data) + position * rotary.sin.row;
  for (int64_t n = threadIdx.x; n < pairs; n += kWarp) {
    const int64_t d = rotary.interleaved ? 2 * n : n, e = d + (rotary.interleaved ? 1 : pairs);
    const float x = static_cast<float>(from[d * args.from.dim]), y = static_cast<float>(from[e * args.from.dim]);
    const float c = position < 0 ? NAN : static_cast<float>(cos[n * rotary.cos.dim]);
    const float s = position < 0 ? NAN : static_cast<float>(sin[n * rotary.sin.dim]);
    to[d * args.to.dim] = T(x * c - y * s);
    to[e * args.to.dim] = T(x * s + y * c);
  }

  // The rest is copied.
  for (int64_t d = 2 * pairs + threadIdx.x; d < args.dim; d += kWarp) to[d * args.to.dim] = from[d * args.from.dim];
}

}  // namespace

int64_t copy_rows_scratch(const CopyRowsParams&) { return 0; }

void copy_rows(const CopyRowsParams& args, void*, void* stream) {
  const int64_t rows = checked_product("key", "rows", {args.batch, args.heads, args.rows}, INT32_MAX * kRows);
  if (rows == 0) return;
  const dim3 grid((rows + kRows - 1) / kRows), block(kWarp, kRows);
  for_dtype("key", args.dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = args.rotary.dtype == args.dtype ? copy_rows_kernel<T, T> : copy_rows_kernel<T, float>;
    kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check("copy of rows", cudaGetLastError());
}

}  // namespace flashsoftmax::cuda
