// Storage types and their conversions: float16, bfloat16 and pairs of bfloat16, one by one and as vectors.
// Sums, scores and statistics are kept in Accumulate<T>: float, or double for double.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

template <class T> struct AccumulateOf {
  using type = float;
};
template <> struct AccumulateOf<double> {
  using type = double;
};
template <class T> using Accumulate = typename AccumulateOf<T>::type;

// Two bfloat16 that follow each other along the sum of a product, as vdpbf16ps multiplies them.
struct bf16x2 {
  bf16 low, high;
};

// Packed<T>: what T is packed into before it is multiplied. It holds kDepth elements along the sum of the product.
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

using Halves = Native<uint16_t, kVectorBytes / 2>::type;  // as many 16-bit elements as a vector has floats
using Shorts = Native<uint16_t, kVectorBytes>::type;      // twice as many

// --- single elements ---

INLINE float to_float(float x) { return x; }
INLINE double to_float(double x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
INLINE float to_float(f16 x) {
  // A multiplication corrects the exponent and normalises subnormals.
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
  if (magnitude < 0x38800000) {                                   // subnormal: an addition does the rounding
    float y;
    std::memcpy(&y, &magnitude, 4);
    y += 0.5f;
    std::memcpy(&magnitude, &y, 4);
    return {uint16_t(sign | (magnitude - 0x3f000000))};
  }
  magnitude += 0xfff + ((magnitude >> 13) & 1) - 0x38000000;
  return {uint16_t(sign | (magnitude >> 13))};
}

// --- vectors ---

INLINE Bits widen_halves(Halves x) {
#if FLASHSOFTMAX_VECTOR_BYTES == 64  // GCC 12 makes five instructions of the other
  return Bits(_mm512_maskz_cvtepu16_epi32(0xffff, __m256i(x)));
#else
  return __builtin_convertvector(x, Bits);
#endif
}

// load(p): a vector of T, converted to Accumulate<T>.
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
// The first count elements; the other lanes are 0.
template <class T> INLINE Vec<Accumulate<T>> load(const T* p, int64_t count) {
  T padded[Vec<Accumulate<T>>::lanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

// store(x, p): a vector of Accumulate<T>, rounded to T.
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

#ifdef FLASHSOFTMAX_BF16_PAIRS
template <int... i> INLINE Shorts interleave_halves(Shorts x, std::integer_sequence<int, i...>) {
  return __builtin_shuffle(x, Shorts{(i / 2 + i % 2 * 16)...});
}
// Stores (low[0], high[0]), (low[1], high[1]), ..., rounded to bfloat16.
INLINE void store_pairs(Vec<float> low, Vec<float> high, bf16x2* to) {
  Shorts halves = (Shorts)_mm512_cvtne2ps_pbh(__m512(high.v), __m512(low.v));  // all of low, then all of high
  halves = interleave_halves(halves, std::make_integer_sequence<int, 32>{});
  std::memcpy(to, &halves, sizeof(halves));
}
#endif

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
