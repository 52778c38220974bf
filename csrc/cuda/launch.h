// What all launchers have in common.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../kernels.h"

namespace flashsoftmax::cuda {

inline void check(const char* kernel, cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(error));
}

// Calls launch(T()) for the element type of an argument.
template <class Launch> void for_dtype(const char* argument, DType dtype, Launch&& launch) {
  switch (dtype) {
    case DType::f16: return launch(__half());
    case DType::bf16: return launch(__nv_bfloat16());
    case DType::f32: return launch(float());
    default:
      throw std::invalid_argument(std::string(argument) + ": float64, wanted float16, bfloat16 or float32 on CUDA");
  }
}

// Elements in 16 bytes.
inline int64_t pack_width(DType dtype) { return dtype == DType::f32 ? 4 : 8; }

// Whether the rows of a tensor with these sizes begin where width elements, at most 16 bytes, can be accessed at a time.
inline bool rows_pack(const Tensor4& x, int64_t batch, int64_t heads, int64_t rows, int64_t width) {
  const auto apart = [&](int64_t size, int64_t stride) { return size == 1 || stride % width == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.dim == 1 && apart(batch, x.batch) && apart(heads, x.head) &&
         apart(rows, x.row);
}

}  // namespace flashsoftmax::cuda
