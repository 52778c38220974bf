// The online softmax recurrence, for all kernels. flashsoftmax/state.py is the same on tensors.
//
// Softmax over a set of keys is a monoid. For scores s_i and values v_i the state is
//     m = max s_i,    l = sum e^(s_i - m),    a = sum e^(s_i - m) v_i,
// the states of two disjoint sets merge, and (-inf, 0, 0) is the identity. The output is a / l.
// A later merge needs the output and lse = m + ln l; the backward also needs lse_error, what lse lost to rounding.
//
// m and l live here. The accumulator a lives wherever a kernel keeps it (vector registers, an MMA fragment, a
// row of a split) and follows by the factor that each function returns. N is float, double, or a vector of them.
//
// a is a sum and may overflow where a / l, a mean, is finite. Such a row is computed again, with weights times kHeadroom.
//
// Scores are subtracted before they change their units (to base 2, or by a scale that is left to the exponential), so
// the largest weight of a row is exactly 1: a row of scores near 1e11 keeps its output and its gradient.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define FLASHSOFTMAX_INLINE __host__ __device__ __forceinline__
#else
#define FLASHSOFTMAX_INLINE inline __attribute__((always_inline))
#endif

namespace flashsoftmax {

// The score of a hidden key, and so m and lse of a row that has seen none.
constexpr float kHidden = -HUGE_VALF;

// Times this, weights are so small that no sum of finite values overflows. A power of two rounds nothing.
constexpr float kHeadroom = 0x1p-32f;

// What the recurrence and the scores ask of a scalar; cpu/vec.h has the same for vectors.
FLASHSOFTMAX_INLINE float exp(float x) { return ::expf(x); }
FLASHSOFTMAX_INLINE double exp(double x) { return ::exp(x); }
// e^x in float, for a state of doubles.
struct FloatExp {
  FLASHSOFTMAX_INLINE double operator()(double x) const { return exp(static_cast<float>(x)); }
};
FLASHSOFTMAX_INLINE float log(float x) { return ::logf(x); }
FLASHSOFTMAX_INLINE double log(double x) { return ::log(x); }
FLASHSOFTMAX_INLINE float tanh(float x) { return ::tanhf(x); }
FLASHSOFTMAX_INLINE double tanh(double x) { return ::tanh(x); }
FLASHSOFTMAX_INLINE float abs(float x) { return ::fabsf(x); }
FLASHSOFTMAX_INLINE double abs(double x) { return ::fabs(x); }
template <class A> FLASHSOFTMAX_INLINE constexpr A max(A a, A b) { return a > b ? a : b; }

template <class A> FLASHSOFTMAX_INLINE A select(bool condition, A a, A b) { return condition ? a : b; }

template <class N> struct State {
  N m = N(kHidden);
  N l = N(0);
};

// What is subtracted from the scores of a row before the exponential: m, but 0 for a row that has seen no key. Its m is
// -inf, and -inf - -inf would be NaN.
template <class N> FLASHSOFTMAX_INLINE N shift(N m) { return select(m == N(kHidden), N(0), m); }

// The exponential of the recurrence. A kernel may bring another: in other units, or less exact for narrow weights.
struct Exp {
  template <class N> FLASHSOFTMAX_INLINE N operator()(N x) const { return exp(x); }
};

// e^(score - m) of a key.
template <class N, class E = Exp> FLASHSOFTMAX_INLINE N weight(N score, N m, E exponential = {}) {
  return exponential(score - shift(m));
}

// Makes room for scores up to tile_max. l is rescaled here; multiply a by the factor returned.
template <class N, class E = Exp> FLASHSOFTMAX_INLINE N raise(State<N>& state, N tile_max, E exponential = {}) {
  N m = max(state.m, tile_max);
  N alpha = weight(state.m, m, exponential);
  state = {m, state.l * alpha};
  return alpha;
}

template <class N> struct Factors {
  N into, from;
};

// into := into + from, for disjoint keys. Then a = a_into * factors.into + a_from * factors.from.
template <class N> FLASHSOFTMAX_INLINE Factors<N> merge(State<N>& into, const State<N>& from) {
  Factors<N> factors;
  factors.into = raise(into, from.m);
  factors.from = weight(from.m, into.m);
  into.l = into.l + from.l * factors.from;
  return factors;
}

// The factor from a to the output: 1 / l. It is 0 for an empty row; a NaN in l stays.
template <class N> FLASHSOFTMAX_INLINE N inverse_sum(const State<N>& state) {
  return select(state.l == N(0), N(0), N(1) / state.l);
}

template <class N> FLASHSOFTMAX_INLINE N lse(const State<N>& state) { return state.m + log(state.l); }

// What lse loses to rounding: m + ln l = lse + lse_error. Where |m| is large that is most of ln l. 0 for an empty row.
template <class N> FLASHSOFTMAX_INLINE N lse_error(const State<N>& state) {
  N error = (state.m - lse(state)) + log(state.l);
  return select(error - error == N(0), error, N(0));
}

// e^(score - (m + ln l)): the weight of a key in a finished row, as the backward needs it.
template <class N, class E = Exp>
FLASHSOFTMAX_INLINE N weight_from_lse(N score, N lse, N lse_error, E exponential = {}) {
  return exponential((score - shift(lse)) - lse_error);
}

// The state of a finished row, whose a is its output. An infinite lse, of either sign, is that of an empty row.
template <class N> FLASHSOFTMAX_INLINE State<N> from_lse(N lse) {
  State<N> state{lse, N(1)};
  return lse == N(kHidden) || lse == N(-kHidden) ? State<N>{} : state;
}

}  // namespace flashsoftmax
