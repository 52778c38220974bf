// Rows whose sum of weighted values overflowed. Their output is a mean of the values, so it may still be finite.
#pragma once

#include "scores.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// Whether any sum of a row is infinite or NaN. acc is padded with zeros to whole vectors. In float16 no sum overflows.
template <class T> INLINE bool overflowed(const Accumulate<T>* acc, int64_t dims) {
  using V = Vec<Accumulate<T>>;
  if constexpr (std::is_same_v<T, f16>) return false;
  V zeros(0);
  for (int64_t d = 0; d < dims; d += V::lanes) zeros = zeros + (V::load(acc + d) - V::load(acc + d));
  return zeros.fold([](auto a, auto b) { return a + b; }) != 0;  // inf - inf is NaN
}

// Computes the output of query i of head h again, in double and with weights that leave headroom, and replaces its
// elements that are infinite or NaN. This is slow, one key at a time, but rare.
template <class T> void recompute_row(const AttentionParams& p, const Sequence& s, int64_t h, int64_t i) {
  using A = Accumulate<T>;
  using V = Vec<A>;
  const int64_t b = s.index, dim_padded = round_up(p.head_dim, V::lanes);
  const Rows<T> keys = key_rows<T>(p, p.key, s, b, h / p.group());
  const Rows<T> values = key_rows<T>(p, p.value, s, b, h / p.group());
  const Visibility visible = visibility(p, s, b, h);
  const Score<A> score_of_key = score_of<A>(p, b, h);
  const KeptWeights kept = p.drops_weights() ? kept_weights(p, b, h) : KeptWeights{};
  A q[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim];
  double acc[kMaxHeadDim] = {};
  widen(query_rows<T>(p.query, s, h)[i], p.query.dim, p.head_dim, dim_padded, q);

  State<double> state;
  if (p.sinks.data) state = {p.sinks.at<A>(h), 1};
  bool all_nan = false;  // a NaN stays, so the rest of the keys would change nothing
  for (int64_t j = s.band.first(i); j < s.band.end(i) && !all_nan; j++) {
    // The score
    widen(keys[j], p.key.dim, p.head_dim, dim_padded, k);
    V dots(0);
    for (int64_t d = 0; d < p.head_dim; d += V::lanes) dots = fma(V::load(q + d), V::load(k + d), dots);
    const A dot = dots.fold([](A x, A y) { return x + y; });
    A bias(0);
    if (p.has_bias()) pack_bias(p, visible, b, h, i, 1, j, 1, 1, &bias);
    if (visible.map.bits && !(*visible.word(i, j) >> i % kCellQueries & 1)) bias = A(kHidden);
    const double score = score_of_key(score_of_key.content(dot), A(i + s.band.q_offset - j), bias);
    // Its weight
    const double alpha = raise(state, score), w = weight(score, state.m);
    state.l += w;
    const bool dropped = p.drops_weights() && !(kept.bits(i, j / 4 * 4) >> j % 4 & 1);
    const double w_kept = dropped ? 0 : w * kHeadroom;
    // The sums
    widen(values[j], p.value.dim, p.head_dim_v, p.head_dim_v, v);
    all_nan = true;
    for (int64_t d = 0; d < p.head_dim_v; d++) {
      acc[d] = acc[d] * alpha + w_kept * v[d];
      all_nan &= acc[d] != acc[d];
    }
  }
  T* out = at<T>(p.out, s.q_batch, h, s.q_row + i);
  const double factor = inverse_sum(state) * p.kept_scale<A>() / kHeadroom;
  for (int64_t d = 0; d < p.head_dim_v; d++) {
    T& element = out[d * p.out.dim];
    const A x = to_float(element);
    if (x - x != A(0)) element = from_float<T>(A(acc[d] * factor));
  }
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
