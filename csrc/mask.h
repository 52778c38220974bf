// Which keys a query sees, and at what score.
#pragma once

#include <cstdint>

#include "softmax.h"

namespace flashsoftmax {

// Far beyond any length, and small enough that sums of a few of them do not overflow.
constexpr int64_t kUnbounded = int64_t(1) << 60;

FLASHSOFTMAX_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

struct Window {
  int64_t left = kUnbounded, right = kUnbounded;
};

enum class Verdict { skip, partial, full };

// Key j is visible to query i when i + q_offset - left <= j <= i + q_offset + right and 0 <= j < kv_len.
struct Band {
  int64_t q_offset;
  Window window;
  int64_t kv_len;

  FLASHSOFTMAX_INLINE int64_t first(int64_t i) const { return max<int64_t>(0, i + q_offset - window.left); }
  FLASHSOFTMAX_INLINE int64_t end(int64_t i) const {
    int64_t end = i + q_offset + window.right + 1;
    return end < kv_len ? end : kv_len;
  }
  // The queries that see any of the keys [j0, j1): first_query(j0) <= i < end_query(j1), within the sequence.
  FLASHSOFTMAX_INLINE int64_t first_query(int64_t j0) const { return max<int64_t>(0, j0 - q_offset - window.right); }
  FLASHSOFTMAX_INLINE int64_t end_query(int64_t j1) const { return j1 - q_offset + window.left; }
  // Queries [i0, i1) against keys [j0, j1): nothing visible, or everything, or look at each element.
  FLASHSOFTMAX_INLINE Verdict verdict(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    if (j1 <= first(i0) || j0 >= end(i1 - 1)) return Verdict::skip;
    return j0 >= first(i1 - 1) && j1 <= end(i0) ? Verdict::full : Verdict::partial;
  }
};

// From q.k to the score: scale, softcap, ALiBi, bias. Masking comes after, by selection.
template <class A> struct Score {
  A scale;
  A softcap;  // 0: off
  A slope;    // 0: off

  template <class N> FLASHSOFTMAX_INLINE N capped(N dot) const {
    N s = dot * N(scale);
    return softcap == A(0) ? s : N(softcap) * tanh(s / N(softcap));
  }
  // d capped / d (scale * dot)
  template <class N> FLASHSOFTMAX_INLINE N capped_slope(N capped) const {
    N t = softcap == A(0) ? N(0) : capped / N(softcap);
    return N(1) - t * t;
  }
  // distance = i + q_offset - j
  template <class N> FLASHSOFTMAX_INLINE N biased(N capped, N distance, N bias) const {
    return capped - N(slope) * abs(distance) + bias;
  }
};

}  // namespace flashsoftmax
