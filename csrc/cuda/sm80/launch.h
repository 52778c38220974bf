// The kernels' launchers for head dims up to 64, 128 and 256, and what they have in common.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../../kernels.h"

namespace flashsoftmax::cuda::sm80 {

// Of head_dim and head_dim_v the larger decides.
template <int kHeadDim> void forward(const AttentionParams&, void* scratch, cudaStream_t);
template <int kHeadDim> void decode(const AttentionParams&, void* scratch, cudaStream_t);
template <int kHeadDim> void backward(const AttentionGradParams&, void* scratch, cudaStream_t);
int64_t decode_scratch(const AttentionParams&);

// The launcher of a family for these head dims: pick(forward<64>, forward<128>, forward<256>, p).
template <class Launcher>
Launcher pick(Launcher of_64, Launcher of_128, Launcher of_256, const AttentionParams& p) {
  const int64_t dim = max(p.head_dim, p.head_dim_v);
  return dim <= 64 ? of_64 : dim <= 128 ? of_128 : of_256;
}

inline void check(const char* kernel, cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(error));
}

// Whether 16 bytes can be read or written at a time of the rows of a tensor with these sizes.
inline bool packs(const Tensor4& x, int64_t batch, int64_t heads, int64_t rows, DType dtype) {
  const int64_t width = dtype == DType::f32 ? 4 : 8;
  const auto apart = [&](int64_t size, int64_t stride) { return size == 1 || stride % width == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.dim == 1 && apart(batch, x.batch) && apart(heads, x.head) &&
         apart(rows, x.row);
}

// What kernels of attention take.
struct Attention {
  AttentionParams p;
  bool query_packs, key_packs, value_packs;
  bool out_packs;  // and its rows end with 16 bytes

  explicit Attention(const AttentionParams& params)
      : p(params),
        query_packs(packs(p.query, batch(p), p.heads_q, p.rows_q, p.dtype)),
        key_packs(packs(p.key, p.block_table ? p.pages : batch(p), p.heads_kv, p.rows_k, p.dtype)),
        value_packs(packs(p.value, p.block_table ? p.pages : batch(p), p.heads_kv, p.rows_k, p.dtype)),
        out_packs(packs(p.out, batch(p), p.heads_q, p.rows_q, p.dtype) &&
                  p.head_dim_v % (p.dtype == DType::f32 ? 4 : 8) == 0) {}

  static int64_t batch(const AttentionParams& p) { return p.cu_seqlens_q ? 1 : p.sequences; }
};

// Calls launch(T()) for the element type.
template <class Launch> void for_dtype(DType dtype, Launch&& launch) {
  switch (dtype) {
    case DType::f16: return launch(__half());
    case DType::bf16: return launch(__nv_bfloat16());
    case DType::f32: return launch(float());
    default: throw std::invalid_argument("query: float64, wanted float16, bfloat16 or float32 on CUDA");
  }
}

}  // namespace flashsoftmax::cuda::sm80
