// Vec<A>: one vector register of float or double, with the arithmetic that softmax.h and mask.h ask of a number.
// Everything in the namespace FLASHSOFTMAX_ISA is compiled once per instruction set: isa_*.cpp defines that name and
// FLASHSOFTMAX_VECTOR_BYTES, and includes these headers through kernels.inc.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../softmax.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

#define INLINE inline __attribute__((always_inline))
// For hot loops: everything called is inlined into the function, so that its sums stay in registers.
#define HOT __attribute__((flatten, noinline))

using flashsoftmax::abs;
using flashsoftmax::max;
using flashsoftmax::select;

constexpr int kVectorBytes = FLASHSOFTMAX_VECTOR_BYTES;

// A vector of GCC's own kind.
template <class E, int bytes> struct Native {
  typedef E type __attribute__((vector_size(bytes)));
};
template <class A> struct IntegerOf {
  using type = int32_t;
};
template <> struct IntegerOf<double> {
  using type = int64_t;
};
using Bits = Native<uint32_t, kVectorBytes>::type;  // the bits of a vector of float

// Calls f(0), ..., f(count - 1) with constants, so that arrays indexed by them become registers.
template <class F, int... i> INLINE void unroll(F&& f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int count, class F> INLINE void unroll(F&& f) { unroll(f, std::make_integer_sequence<int, count>{}); }

// The result of a comparison: all bits of a lane are set where it holds.
template <class A> struct Mask {
  typename Native<typename IntegerOf<A>::type, kVectorBytes>::type v;
  friend INLINE Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
};

// The mask whose lane n is the given bit of words[n].
template <class A> INLINE Mask<A> mask_of_words(const uint16_t* words, int bit) {
  using I = decltype(Mask<A>::v);
  typename Native<uint16_t, kVectorBytes / sizeof(A) * 2>::type narrow;
  std::memcpy(&narrow, words, sizeof(narrow));
  return {(__builtin_convertvector(narrow, I) & (1 << bit)) != 0};
}

template <class A> struct Vec {
  static constexpr int lanes = kVectorBytes / sizeof(A);
  using Elements = typename Native<A, kVectorBytes>::type;
  using Integers = typename Native<typename IntegerOf<A>::type, kVectorBytes>::type;
  Elements v;

  Vec() = default;
  INLINE Vec(Elements elements) : v(elements) {}
  INLINE explicit Vec(A x) : v(x - Elements{}) {}  // x - 0 keeps the sign of a zero, x + 0 would not
  template <class B, class = std::enable_if_t<std::is_arithmetic_v<B>>> INLINE explicit Vec(B x) : Vec(A(x)) {}

  static INLINE Vec load(const A* p) {
    Vec x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static INLINE Vec iota() {
    Vec x;
    unroll<lanes>([&](auto i) { x.v[i()] = A(i()); });
    return x;
  }
  INLINE void store(A* p) const { std::memcpy(p, &v, sizeof(v)); }

  friend INLINE Vec operator+(Vec a, Vec b) { return a.v + b.v; }
  friend INLINE Vec operator-(Vec a, Vec b) { return a.v - b.v; }
  friend INLINE Vec operator*(Vec a, Vec b) { return a.v * b.v; }
  friend INLINE Vec operator/(Vec a, Vec b) { return a.v / b.v; }
  friend INLINE Mask<A> operator==(Vec a, Vec b) { return {a.v == b.v}; }
  friend INLINE Mask<A> operator<(Vec a, Vec b) { return {a.v < b.v}; }
  friend INLINE Mask<A> operator<=(Vec a, Vec b) { return {a.v <= b.v}; }
  // A NaN in a is dropped, one in b stays.
  friend INLINE Vec max(Vec a, Vec b) { return a.v > b.v ? a.v : b.v; }
  friend INLINE Vec min(Vec a, Vec b) { return a.v < b.v ? a.v : b.v; }
  friend INLINE Vec select(Mask<A> condition, Vec a, Vec b) { return condition.v ? a.v : b.v; }
  friend INLINE Vec abs(Vec a) { return max(a, Vec(A(0)) - a); }

  // f(x) for each lane x.
  template <class F> static INLINE Vec each(Vec a, F f) {
    unroll<lanes>([&](auto i) { a.v[i()] = f(a.v[i()]); });
    return a;
  }
  // f(f(f(x_0, x_1), x_2), ...) over the lanes.
  template <class F> INLINE A fold(F f) const {
    A total = v[0];
    for (int lane = 1; lane < lanes; lane++) total = f(total, v[lane]);
    return total;
  }
};

// a * b + c with one rounding, where the instruction set has that. It is spelled out wherever it is wanted: the build
// forbids the compiler to merge any other product with a sum (-ffp-contract=off), so that a score has the same bits in
// the forward and in the backward.
#if FLASHSOFTMAX_VECTOR_BYTES == 64
INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return Vec<float>::Elements(_mm512_fmadd_ps(__m512(a.v), __m512(b.v), __m512(c.v)));
}
INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return Vec<double>::Elements(_mm512_fmadd_pd(__m512d(a.v), __m512d(b.v), __m512d(c.v)));
}
#elif FLASHSOFTMAX_VECTOR_BYTES == 32
INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return Vec<float>::Elements(_mm256_fmadd_ps(__m256(a.v), __m256(b.v), __m256(c.v)));
}
INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return Vec<double>::Elements(_mm256_fmadd_pd(__m256d(a.v), __m256d(b.v), __m256d(c.v)));
}
#else
template <class A> INLINE Vec<A> fma(Vec<A> a, Vec<A> b, Vec<A> c) { return a * b + c; }
#endif

// Lane n of a where bit n of `bits` is set, else of b.
template <class A, int... n> INLINE Vec<A> select_bits(uint32_t bits, Vec<A> a, Vec<A> b,
                                                       std::integer_sequence<int, n...>) {
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  if constexpr (sizeof(A) == 4) return typename Vec<A>::Elements(_mm512_mask_mov_ps(__m512(b.v), bits, __m512(a.v)));
  return typename Vec<A>::Elements(_mm512_mask_mov_pd(__m512d(b.v), bits, __m512d(a.v)));
#else
  using I = typename Vec<A>::Integers;
  return select(Mask<A>{((I{} + int(bits)) & I{1 << n...}) != 0}, a, b);
#endif
}
template <class A> INLINE Vec<A> select_bits(uint32_t bits, Vec<A> a, Vec<A> b) {
  return select_bits(bits, a, b, std::make_integer_sequence<int, Vec<A>::lanes>{});
}

// [a0 b0 a1 b1 ...] of the low or of the high halves of a and b.
template <class A, int... i> INLINE Vec<A> interleave(Vec<A> a, Vec<A> b, int start, std::integer_sequence<int, i...>) {
  using I = typename Vec<A>::Integers;
  constexpr int n = Vec<A>::lanes;
  if (start) return __builtin_shuffle(a.v, b.v, I{(i / 2 + n / 2 + (i % 2) * n)...});
  return __builtin_shuffle(a.v, b.v, I{(i / 2 + (i % 2) * n)...});
}
template <class A> INLINE Vec<A> interleave_low(Vec<A> a, Vec<A> b) {
  return interleave(a, b, 0, std::make_integer_sequence<int, Vec<A>::lanes>{});
}
template <class A> INLINE Vec<A> interleave_high(Vec<A> a, Vec<A> b) {
  return interleave(a, b, 1, std::make_integer_sequence<int, Vec<A>::lanes>{});
}

// Transposes a square of lanes x lanes numbers, by log2(lanes) perfect shuffles.
template <class A> INLINE void transpose(Vec<A> (&rows)[Vec<A>::lanes]) {
  constexpr int n = Vec<A>::lanes;
  for (int step = 1; step < n; step *= 2) {
    Vec<A> shuffled[n];
    unroll<n / 2>([&](auto i) {
      shuffled[2 * i] = interleave_low(rows[i], rows[i + n / 2]);
      shuffled[2 * i + 1] = interleave_high(rows[i], rows[i + n / 2]);
    });
    unroll<n>([&](auto i) { rows[i] = shuffled[i]; });
  }
}

// Lane i of the result is x[i] + x[i ^ w], or the same of y where i has the bit w.
template <int w, class A, int... i> INLINE Vec<A> add_across(Vec<A> x, Vec<A> y, std::integer_sequence<int, i...>) {
  using I = typename Vec<A>::Integers;
  constexpr int n = Vec<A>::lanes;
  return Vec<A>(__builtin_shuffle(x.v, y.v, I{(i & w ? n + i : i)...})) +
         Vec<A>(__builtin_shuffle(x.v, y.v, I{(i & w ? n + (i ^ w) : i ^ w)...}));
}
// Lane i of the result is the sum over the lanes of rows[i]. Every lane adds in the same order.
template <int w = 1, class A, int n> INLINE Vec<A> sum_lanes(Vec<A> (&rows)[n]) {
  if constexpr (w == n) {
    return rows[0];
  } else {
    unroll<n / (2 * w)>([&](auto i) {
      constexpr int at = 2 * w * i();
      rows[at] = add_across<w>(rows[at], rows[at + w], std::make_integer_sequence<int, n>{});
    });
    return sum_lanes<2 * w>(rows);
  }
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
