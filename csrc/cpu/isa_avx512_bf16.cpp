// The kernels for AVX-512 with products of bfloat16 pairs (vdpbf16ps).
#if defined(__x86_64__)
#include "standard.h"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

#define FLASHSOFTMAX_ISA avx512_bf16
#define FLASHSOFTMAX_ISA_NAME "AVX-512-BF16"
#define FLASHSOFTMAX_BF16_PAIRS
#define FLASHSOFTMAX_VECTOR_BYTES 64
#define FLASHSOFTMAX_BLOCK_ROWS 8
#define FLASHSOFTMAX_BLOCK_COLS 2

namespace flashsoftmax::avx512_bf16 {
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
}  // namespace flashsoftmax::avx512_bf16

#include "kernels.inc"
#endif
