// Instructions of sm_80 that CUDA C++ has no name for: asynchronous copies to shared memory, matrix loads and products,
// named barriers, the fast power of two. All inline PTX of the project is here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashsoftmax::cuda {

// The address of shared memory as the instructions below take it, and the object at such an address.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
template <class V> __device__ __forceinline__ V& shared(uint32_t address) {
  return *static_cast<V*>(__cvta_shared_to_generic(address));
}

// Hides x from the optimizer, so that values derived from it are recomputed rather than kept in registers.
__device__ __forceinline__ int hide_from_optimizer(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Begins an asynchronous copy of 16 bytes from global to shared memory, or of zeros if they do not exist.
__device__ __forceinline__ void copy_async_if(bool exists, uint32_t to, const void* from) {
  const int bytes = exists ? 16 : 0;  // to be read; the rest becomes 0
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Closes a commit: all copies that this thread has begun since its previous commit.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all commits of this thread but the latest kPending are complete.
template <int kPending> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Named barrier number id (1 to 15) for `threads` threads of a block, whole warps.
__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane n passes the address of row n % 8 of matrix n / 8. It receives, of
// each matrix, elements 2 * (n % 4) and 2 * (n % 4) + 1 of row n / 4; transposed: of column n / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// sum[16][8] += a[16][16] b[16][8], each spread over the lanes of a warp.
template <class T> __device__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__half>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, within 2 units in the last place. Subnormal results become 0.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashsoftmax::cuda
