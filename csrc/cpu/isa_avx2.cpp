// The kernels for AVX2, FMA and F16C.
#if defined(__x86_64__)
#include "standard.h"
#pragma GCC target("avx2,fma,f16c")

#define FLASHSOFTMAX_ISA avx2
#define FLASHSOFTMAX_ISA_NAME "AVX2"
#define FLASHSOFTMAX_VECTOR_BYTES 32
#define FLASHSOFTMAX_BLOCK_ROWS 4
#define FLASHSOFTMAX_BLOCK_COLS 2

namespace flashsoftmax::avx2 {
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
}  // namespace flashsoftmax::avx2

#include "kernels.inc"
#endif
