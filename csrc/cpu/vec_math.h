// exp, log and tanh of vectors. Those of float are polynomials over whole vectors; those of double, and every log, call
// the C library for each lane.
#pragma once

#include <cmath>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

using flashsoftmax::exp;
using flashsoftmax::log;
using flashsoftmax::tanh;

constexpr double kLog2e = 1.44269504088896341;

template <class A> INLINE Vec<A> log(Vec<A> x) {
  return Vec<A>::each(x, [](A e) { return std::log(e); });
}
INLINE Vec<double> exp2(Vec<double> x) {
  return Vec<double>::each(x, [](double e) { return std::exp2(e); });
}
INLINE Vec<double> exp(Vec<double> x) {
  return Vec<double>::each(x, [](double e) { return std::exp(e); });
}
INLINE Vec<double> tanh(Vec<double> x) {
  return Vec<double>::each(x, [](double e) { return std::tanh(e); });
}

// 1.5 * 2^23. Adding it to a float rounds the float to an integer, which is then found in the low bits.
constexpr float kRoundingShift = 12582912.0f;

// 2^x = 2^n 2^f with n = floor(x). The relative error is below 9.5e-8, and 2^0 is exactly 1. A NaN stays NaN; results
// below 2^-126 may become 0.
INLINE Vec<float> exp2(Vec<float> x) {
  using V = Vec<float>;
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  V f = V::Elements(_mm512_maskz_reduce_ps(0xffff, __m512(x.v), _MM_FROUND_TO_NEG_INF));  // 0 for an infinite x
#else
  x = min(V(128.0f), max(V(-160.0f), x));  // 2^128 is infinity
  V shifted = x - V(0.5f) + V(kRoundingShift);
  V n = shifted - V(kRoundingShift), f = x - n;
#endif
  V p(1.86713052e-3f);
  p = fma(p, f, V(9.01702978e-3f));
  p = fma(p, f, V(5.57999127e-2f));
  p = fma(p, f, V(2.40164444e-1f));
  p = fma(p, f, V(6.93151295e-1f));
  p = fma(p, f, V(1.0f));
#if FLASHSOFTMAX_VECTOR_BYTES == 64
  return V::Elements(_mm512_maskz_scalef_ps(0xffff, __m512(p.v), __m512(x.v)));  // p 2^floor(x)
#else
  V power = reinterpret_cast<V::Elements>((reinterpret_cast<Bits>(shifted.v) << 23) + (127u << 23));
  return select(n < V(-126.0f), V(0.0f), p * power);
#endif
}
// Rounding the product adds |x| 2^-24 to the relative error.
INLINE Vec<float> exp(Vec<float> x) { return exp2(x * Vec<float>(kLog2e)); }

// e^(scale x): the exponential for differences of scores that have not been multiplied by scale yet.
template <class A> struct ScaledExp {
  Vec<A> factor;
  INLINE explicit ScaledExp(double scale) : factor(scale * kLog2e) {}
  INLINE Vec<A> operator()(Vec<A> x) const { return exp2(x * factor); }
};

// For small |x| an odd polynomial, else 1 - 2 / (e^2|x| + 1).
INLINE Vec<float> tanh(Vec<float> x) {
  using V = Vec<float>;
  V square = x * x;
  V p(-5.70498872745e-3f);
  p = fma(p, square, V(2.06390887954e-2f));
  p = fma(p, square, V(-5.37397155531e-2f));
  p = fma(p, square, V(1.33314422036e-1f));
  p = fma(p, square, V(-3.33332819422e-1f));
  V small = fma(p * square, x, x);
  V magnitude = abs(x);
  V large = V(1.0f) - V(2.0f) / (exp(magnitude + magnitude) + V(1.0f));
  large = select(x < V(0.0f), V(0.0f) - large, large);
  return select(V(0.625f) <= magnitude, large, small);
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
