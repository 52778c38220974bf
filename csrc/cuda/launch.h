// What every launcher needs: error checks, the dispatch on the element type, grid sizes, and whether the rows of a
// tensor can be accessed in chunks of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "../kernels.h"

namespace flashsoftmax::cuda {

inline void check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next check would report it again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// The product of factors that are not negative, or an error if it is more than `most`. A grid has at most INT32_MAX
// blocks.
inline int64_t checked_product(const char* argument, const char* what, std::initializer_list<int64_t> factors,
                               int64_t most = INT32_MAX) {
  int64_t product = 1;
  for (int64_t factor : factors)
    if (factor == 0) return 0;
  for (int64_t factor : factors)
    if (__builtin_mul_overflow(product, factor, &product) || product > most)
      throw std::invalid_argument(std::string(argument) + ": more than " + std::to_string(most) + " " + what +
                                  ", wanted fewer on CUDA");
  return product;
}

// Calls launch(T()) for the element type T of an argument.
template <class Launch> void for_dtype(const char* argument, DType dtype, Launch&& launch) {
  switch (dtype) {
    case DType::f16: return launch(__half());
    case DType::bf16: return launch(__nv_bfloat16());
    case DType::f32: return launch(float());
    default:
      throw std::invalid_argument(std::string(argument) + ": float64, wanted float16, bfloat16 or float32 on CUDA");
  }
}

// Elements in a chunk of 16 bytes.
inline int64_t chunk_elements(DType dtype) { return dtype == DType::f32 ? 4 : 8; }

// Whether rows of `dim` elements can be accessed `width` elements at a time, which are at most 16 bytes: each begins at
// a multiple of that size, and dim is a multiple of width.
inline bool rows_aligned(const Tensor4& x, int64_t batch, int64_t heads, int64_t rows, int64_t dim, int64_t width) {
  const auto aligned = [&](int64_t size, int64_t stride) { return size == 1 || stride % width == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.dim == 1 && dim % width == 0 && aligned(batch, x.batch) &&
         aligned(heads, x.head) && aligned(rows, x.row);
}

}  // namespace flashsoftmax::cuda
