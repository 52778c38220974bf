// The limits of the processor: multiply-adds that never leave the registers, and a plain read of memory.
// Compiled for the processor it runs on.

#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = uint64_t __attribute__((vector_size(kVectorBytes)));
using UnalignedWords = uint64_t __attribute__((vector_size(kVectorBytes), aligned(8)));

constexpr int kFloats = kVectorBytes / sizeof(float);
constexpr int kChains = 12;  // cover the latency of two FMA units, and fit 16 registers beside two operands

template <class Work>
void on_threads(int threads, Work work) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& other : others) other.join();
}

// Hides x from the optimizer, so that the work on it is not removed; x stays in a register.
template <class T>
inline void hide(T& x) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

template <class Step>
void chains(int64_t steps, Step step) {
  Floats c0{}, c1{}, c2{}, c3{}, c4{}, c5{}, c6{}, c7{}, c8{}, c9{}, c10{}, c11{};
  for (int64_t i = 0; i < steps; ++i) {
    step(c0), step(c1), step(c2), step(c3), step(c4), step(c5);
    step(c6), step(c7), step(c8), step(c9), step(c10), step(c11);
  }
}

extern "C" {

// Returns the number of floating-point operations.
double fma_float32(int threads, int64_t steps) {
  on_threads(threads, [=](int) {
    Floats a = Floats{} + 0.5f, b = Floats{} + 1.0f;
    hide(a), hide(b);
    chains(steps, [=](Floats& c) {
      c = c * a + b;
      hide(c);
    });
  });
  return 2.0 * kChains * kFloats * steps * threads;
}

#if defined(__AVX512BF16__)
double dot_bfloat16(int threads, int64_t steps) {
  on_threads(threads, [=](int) {
    __m512 ones = _mm512_set1_ps(1);
    __m512bh a = _mm512_cvtne2ps_pbh(ones, ones);
    hide(a);
    chains(steps, [=](Floats& c) {
      c = (Floats)_mm512_dpbf16_ps((__m512)c, a, a);
      hide(c);
    });
  });
  return 4.0 * kChains * kFloats * steps * threads;
}
#endif

// Reads `bytes` from k and as many from v, `passes` times. Each thread reads four streams side by side.
void read_both(const char* k, const char* v, int64_t bytes, int threads, int passes) {
  constexpr int64_t step = 2 * kVectorBytes;
  int64_t half = bytes / threads / (2 * step) * step;
  on_threads(threads, [=](int thread) {
    Words x0{}, x1{};
    const char *k_share = k + thread * 2 * half, *v_share = v + thread * 2 * half;
    for (int pass = 0; pass < passes; ++pass)
      for (int64_t i = 0; i < half; i += step)
        for (const char* place : {k_share, k_share + half, v_share, v_share + half}) {
          auto* words = reinterpret_cast<const UnalignedWords*>(place + i);
          x0 ^= words[0], x1 ^= words[1];
        }
    hide(x0), hide(x1);
  });
}
}
