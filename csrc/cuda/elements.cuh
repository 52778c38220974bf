// Elements of a row in global memory, converted to and from float: several per access where the layout allows it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "../params.h"

namespace flashsoftmax::cuda {

template <class T, int kWidth> struct alignas(sizeof(T) * kWidth) Elements {
  T x[kWidth];
};

// Elements [d, d + kWidth) of a row of `dim` elements, in one access if `aligned`. Elements behind the row load as 0
// and are not stored.
template <int kWidth, class T>
__device__ __forceinline__ void load(const T* row, int64_t stride, int64_t d, int64_t dim, bool aligned,
                                     float (&to)[kWidth]) {
  Elements<T, kWidth> elements;
  if (aligned) elements = *reinterpret_cast<const Elements<T, kWidth>*>(row + d);
#pragma unroll
  for (int e = 0; e < kWidth; e++) {
    if (!aligned) elements.x[e] = d + e < dim ? row[(d + e) * stride] : T(0.0f);
    to[e] = static_cast<float>(elements.x[e]);
  }
}
template <int kWidth, class T>
__device__ __forceinline__ void store(T* row, int64_t stride, int64_t d, int64_t dim, bool aligned,
                                      const float (&from)[kWidth]) {
  Elements<T, kWidth> elements;
#pragma unroll
  for (int e = 0; e < kWidth; e++) {
    elements.x[e] = T(from[e]);
    if (!aligned && d + e < dim) row[(d + e) * stride] = elements.x[e];
  }
  if (aligned) *reinterpret_cast<Elements<T, kWidth>*>(row + d) = elements;
}

// Writes NaN to rows [row, row + rows) of one head, `dims` elements each: rows of a sequence whose lengths are
// impossible. The work is shared by all threads of `workers` blocks, of which this is number `worker`.
template <class T>
__device__ void write_nan(const Tensor4& x, int64_t batch, int64_t head, int64_t row, int64_t rows, int64_t dims,
                          int64_t worker = 0, int64_t workers = 1) {
  T* to = static_cast<T*>(x.data) + x.offset(batch, head, row);
  for (int64_t i = worker * blockDim.x + threadIdx.x; i < rows; i += workers * blockDim.x)
    for (int64_t d = 0; d < dims; d++) to[i * x.row + d * x.dim] = T(NAN);
}

// Likewise for the results of attention, of elements T.
template <class T>
__device__ void write_nan_results(const AttentionParams& args, int64_t batch, int64_t head, int64_t row, int64_t rows,
                                  int64_t worker = 0, int64_t workers = 1) {
  write_nan<T>(args.out, batch, head, row, rows, args.head_dim_v, worker, workers);
  write_nan<float>(args.lse, batch, head, row, rows, 1, worker, workers);
  if (args.lse_error.data) write_nan<float>(args.lse_error, batch, head, row, rows, 1, worker, workers);
}

// Writes lse of a finished row, and what it loses to rounding if that is wanted.
__device__ __forceinline__ void write_lse(const AttentionParams& args, int64_t batch, int64_t head, int64_t row,
                                          const State<float>& state) {
  const Tensor4 &to = args.lse, &error = args.lse_error;
  static_cast<float*>(to.data)[to.offset(batch, head, row)] = lse(state);
  if (error.data) static_cast<float*>(error.data)[error.offset(batch, head, row)] = lse_error(state);
}

}  // namespace flashsoftmax::cuda
