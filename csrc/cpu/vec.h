// Vectors of one instruction set, as numbers that softmax.h and mask.h compute with.
// Included by isa_*.cpp only, which define FLASHSOFTMAX_ISA (a namespace) and FLASHSOFTMAX_VECTOR_BYTES.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../softmax.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

#define INLINE inline __attribute__((always_inline))
// A hot loop: all that it calls becomes a part of it, so that its sums stay in registers.
#define HOT __attribute__((flatten, noinline))

using flashsoftmax::abs;
using flashsoftmax::exp;
using flashsoftmax::log;
using flashsoftmax::max;
using flashsoftmax::select;
using flashsoftmax::tanh;

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// What scores, statistics and sums of T are kept in.
template <class T> struct AccumulateOf {
  using type = float;
};
template <> struct AccumulateOf<double> {
  using type = double;
};
template <class T> using Accumulate = typename AccumulateOf<T>::type;

// Two bfloat16 side by side along the depth of a product, as vdpbf16ps multiplies them.
struct bf16x2 {
  bf16 low, high;
};

// What T is packed into for a product, how many elements of depth one of these holds, and the type of its sums.
template <class T> struct PackedOf {
  using type = Accumulate<T>;
};
#ifdef FLASHSOFTMAX_BF16_PAIRS
template <> struct PackedOf<bf16> {
  using type = bf16x2;
};
#endif
template <class T> using Packed = typename PackedOf<T>::type;
template <class E> constexpr int kDepth = std::is_same_v<E, bf16x2> ? 2 : 1;

constexpr int kVectorBytes = FLASHSOFTMAX_VECTOR_BYTES;
template <class E, int bytes> struct Native {
  typedef E type __attribute__((vector_size(bytes)));
};
template <class A> struct IntegerOf {
  using type = int32_t;
};
template <> struct IntegerOf<double> {
  using type = int64_t;
};

// f(0), ..., f(count - 1) with constants, so that arrays indexed by them become registers.
template <class F, int... i> INLINE void unroll(F&& f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int count, class F> INLINE void unroll(F&& f) { unroll(f, std::make_integer_sequence<int, count>{}); }

using Bits = Native<uint32_t, kVectorBytes>::type;  // of a vector of float
using Halves = Native<uint16_t, kVectorBytes / 2>::type;
using Shorts = Native<uint16_t, kVectorBytes>::type;

template <class A> struct Mask {
  typename Native<typename IntegerOf<A>::type, kVectorBytes>::type v;
  friend INLINE Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
};

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

  template <class F> static INLINE Vec each(Vec a, F f) {
    unroll<lanes>([&](auto i) { a.v[i()] = f(a.v[i()]); });
    return a;
  }
  friend INLINE Vec log(Vec a) {
    return each(a, [](A x) { return std::log(x); });
  }
};

// 1.5 * 2^23: adding it to a float rounds to an integer, which then lies in the low bits.
constexpr float kRoundingShift = 12582912.0f;

constexpr double kLog2e = 1.44269504088896341;

INLINE Vec<double> exp2(Vec<double> x) {
  return Vec<double>::each(x, [](double e) { return std::exp2(e); });
}
INLINE Vec<double> exp(Vec<double> x) {
  return Vec<double>::each(x, [](double e) { return std::exp(e); });
}
INLINE Vec<double> tanh(Vec<double> x) {
  return Vec<double>::each(x, [](double e) { return std::tanh(e); });
}

// 2^x = 2^n 2^f with n = floor(x). The polynomial's relative error is below 9.5e-8, and it is 1 at 0. A NaN stays, and
// what is below 2^-126 may become 0.
INLINE Vec<float> exp2(Vec<float> x) {
  using V = Vec<float>;
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  V f = V::Elements(_mm512_maskz_reduce_ps(0xffff, __m512(x.v), _MM_FROUND_TO_NEG_INF));  // 0 for an infinity
#else
  x = min(V(128.0f), max(V(-160.0f), x));  // 2^128 is infinity
  V shifted = x - V(0.5f) + V(kRoundingShift);
  V n = shifted - V(kRoundingShift), f = x - n;
#endif
  V p(1.86713052e-3f);
  p = p * f + V(9.01702978e-3f);
  p = p * f + V(5.57999127e-2f);
  p = p * f + V(2.40164444e-1f);
  p = p * f + V(6.93151295e-1f);
  p = p * f + V(1.0f);
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  return V::Elements(_mm512_maskz_scalef_ps(0xffff, __m512(p.v), __m512(x.v)));  // p 2^floor(x)
#else
  V power = reinterpret_cast<V::Elements>((reinterpret_cast<Bits>(shifted.v) << 23) + (127u << 23));
  return select(n < V(-126.0f), V(0.0f), p * power);
#endif
}
// The rounding of the product adds |x| 2^-24 to the relative error.
INLINE Vec<float> exp(Vec<float> x) { return exp2(x * Vec<float>(kLog2e)); }

// The exponential of differences of scores that are yet to be multiplied by scale.
template <class A> struct ScaledExp {
  Vec<A> factor;
  INLINE explicit ScaledExp(double scale) : factor(scale * kLog2e) {}
  INLINE Vec<A> operator()(Vec<A> x) const { return exp2(x * factor); }
};

INLINE Vec<float> tanh(Vec<float> x) {
  using V = Vec<float>;
  // Near 0 an odd polynomial, else 1 - 2 / (e^2|x| + 1); |x| beyond 10 is 1 either way and must not overflow.
  V square = x * x;
  V p(-5.70498872745e-3f);
  p = p * square + V(2.06390887954e-2f);
  p = p * square + V(-5.37397155531e-2f);
  p = p * square + V(1.33314422036e-1f);
  p = p * square + V(-3.33332819422e-1f);
  V near = p * square * x + x;
  V magnitude = abs(x);
  V far = V(1.0f) - V(2.0f) / (exp(magnitude + magnitude) + V(1.0f));
  far = select(x < V(0.0f), V(0.0f) - far, far);
  return select(V(0.625f) <= magnitude, far, near);
}

INLINE Bits widen_halves(Halves x) {
#if FLASHSOFTMAX_VECTOR_BYTES == 64  // of which GCC 12 makes five instructions
  return Bits(_mm512_maskz_cvtepu16_epi32(0xffff, __m256i(x)));
#else
  return __builtin_convertvector(x, Bits);
#endif
}

#ifdef FLASHSOFTMAX_BF16_PAIRS
// Pairs of the lanes of two vectors, rounded to bfloat16.
template <int... i> INLINE Shorts interleave_halves(Shorts x, std::integer_sequence<int, i...>) {
  return __builtin_shuffle(x, Shorts{(i / 2 + i % 2 * 16)...});
}
INLINE void store_pairs(Vec<float> low, Vec<float> high, bf16x2* to) {
  Shorts halves = (Shorts)_mm512_cvtne2ps_pbh(__m512(high.v), __m512(low.v));  // of low, then of high
  halves = interleave_halves(halves, std::make_integer_sequence<int, 32>{});
  std::memcpy(to, &halves, sizeof(halves));
}
#endif

// Conversions of single elements.
INLINE float to_float(float x) { return x; }
INLINE double to_float(double x) { return x; }
INLINE float to_float(bool attend) { return attend ? 0.0f : kHidden; }
INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
INLINE float to_float(f16 x) {
  // The exponent is rebased by a multiplication, which also normalises subnormals.
  uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float y;
  std::memcpy(&y, &magnitude, 4);
  y *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &y, 4);
  if (magnitude >= 0x0f800000) bits |= 0x7f800000;  // infinity or NaN
  bits |= uint32_t(x.bits & 0x8000) << 16;
  std::memcpy(&y, &bits, 4);
  return y;
}

template <class T> INLINE T from_float(Accumulate<T> x) { return x; }
template <> INLINE bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <> INLINE f16 from_float<f16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds to 65536 or more
  if (magnitude < 0x38800000) {                                   // subnormal: let an addition do the rounding
    float y;
    std::memcpy(&y, &magnitude, 4);
    y += 0.5f;
    std::memcpy(&magnitude, &y, 4);
    return {uint16_t(sign | (magnitude - 0x3f000000))};
  }
  magnitude += 0xfff + ((magnitude >> 13) & 1) - 0x38000000;
  return {uint16_t(sign | (magnitude >> 13))};
}

// A vector of T, widened.
INLINE Vec<float> load(const float* p) { return Vec<float>::load(p); }
INLINE Vec<double> load(const double* p) { return Vec<double>::load(p); }
INLINE Vec<float> load(const bf16* p) {
  Halves narrow;
  std::memcpy(&narrow, p, sizeof(narrow));
  return reinterpret_cast<Vec<float>::Elements>(widen_halves(narrow) << 16);
}
INLINE Vec<float> load(const f16* p) {
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  return Vec<float>(
      Vec<float>::Elements(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#elif FLASHSOFTMAX_VECTOR_BYTES == 32
  return Vec<float>(Vec<float>::Elements(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#else
  Vec<float> x;
  unroll<Vec<float>::lanes>([&](auto i) { x.v[i()] = to_float(p[i]); });
  return x;
#endif
}
template <class T> INLINE Vec<Accumulate<T>> load(const T* p, int64_t count) {  // the first count lanes, 0 beyond
  T padded[Vec<Accumulate<T>>::lanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

// Factors of a product: vectors of E, loaded from E or from elements of a tensor, and sum + a * b.
template <class E> struct Factor {
  using Vector = Vec<E>;
  static INLINE Vector splat(E x) { return Vector(x); }
  template <class T> static INLINE Vector load(const T* p) { return ::flashsoftmax::FLASHSOFTMAX_ISA::load(p); }
  template <class T> static INLINE Vector load(const T* p, int64_t count) {
    return ::flashsoftmax::FLASHSOFTMAX_ISA::load(p, count);
  }
  // Of the row, or of the two rows where E is a pair of them, the vector at d; all of it or count elements.
  template <class T> static INLINE Vector load_across(const T* const* rows, int64_t d) { return load(rows[0] + d); }
  template <class T> static INLINE Vector load_across(const T* const* rows, int64_t d, int64_t count) {
    return load(rows[0] + d, count);
  }
  static INLINE void store_across(const Vec<E> (&rows)[1], E* p) { rows[0].store(p); }
  static INLINE void store(Vec<E> x, E* p) { x.store(p); }
  static INLINE Vec<E> multiply_add(Vec<E> sum, Vector a, Vector b) { return sum + a * b; }
};
#ifdef FLASHSOFTMAX_BF16_PAIRS
template <> struct Factor<bf16x2> {
  using Vector = __m512i;
  static INLINE Vector splat(bf16x2 x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return _mm512_set1_epi32(bits);
  }
  static INLINE Vector load(const void* p) { return _mm512_loadu_si512(p); }
  static INLINE Vector load(const bf16* p, int64_t count) { return _mm512_maskz_loadu_epi16((1u << count) - 1, p); }
  static INLINE Vector load_across(const bf16* const* rows, int64_t d, int64_t count = 16) {
    const __mmask16 mask = (1u << count) - 1;
    Bits low = widen_halves(Halves(_mm256_maskz_loadu_epi16(mask, rows[0] + d)));
    Bits high = widen_halves(Halves(_mm256_maskz_loadu_epi16(mask, rows[1] + d)));
    return Vector(low | (high << 16));
  }
  static INLINE void store_across(const Vec<float> (&rows)[2], bf16x2* p) { store_pairs(rows[0], rows[1], p); }
  static INLINE void store(Vec<float> x, bf16x2* p) {
    const auto halves = _mm512_cvtneps_pbh(__m512(x.v));
    std::memcpy(p, &halves, sizeof(halves));
  }
  static INLINE Vec<float> multiply_add(Vec<float> sum, Vector a, Vector b) {
    return Vec<float>::Elements(_mm512_dpbf16_ps(__m512(sum.v), __m512bh(a), __m512bh(b)));
  }
};
#endif

INLINE void store(Vec<float> x, float* p) { x.store(p); }
INLINE void store(Vec<double> x, double* p) { x.store(p); }
INLINE void store(Vec<float> x, bf16* p) {
  Bits bits = reinterpret_cast<Bits>(x.v);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits narrow = (x.v == x.v) ? rounded : ((bits >> 16) | 0x40);
  Halves halves = __builtin_convertvector(narrow, Halves);
  std::memcpy(p, &halves, sizeof(halves));
}
INLINE void store(Vec<float> x, f16* p) {
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, __m512(x.v), _MM_FROUND_TO_NEAREST_INT));
#elif FLASHSOFTMAX_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(__m256(x.v), _MM_FROUND_TO_NEAREST_INT));
#else
  unroll<Vec<float>::lanes>([&](auto i) { p[i] = from_float<f16>(x.v[i()]); });
#endif
}

// [a0 b0 a1 b1 ...] of the low or of the high halves.
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

// rows[i] lane j <-> rows[j] lane i: log2(lanes) perfect shuffles.
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

// Lane i of the result is x[i] + x[i ^ w], or the same of y where w is a bit of i.
template <int w, class A, int... i> INLINE Vec<A> add_across(Vec<A> x, Vec<A> y, std::integer_sequence<int, i...>) {
  using I = typename Vec<A>::Integers;
  constexpr int n = Vec<A>::lanes;
  return Vec<A>(__builtin_shuffle(x.v, y.v, I{(i & w ? n + i : i)...})) +
         Vec<A>(__builtin_shuffle(x.v, y.v, I{(i & w ? n + (i ^ w) : i ^ w)...}));
}
// Lane i of the result is the sum over the lanes of rows[i], in an order that does not depend on i.
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
