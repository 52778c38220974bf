// The online softmax of softmax.h for the rows of a fragment: a tile of scores becomes a tile of weights, and the
// states (m, l) of its rows follow.
#pragma once

#include "tile.cuh"

namespace flashsoftmax::cuda {

// The maximum and the sum over the four lanes of a quad, on each of them.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// e^(unit * x), for weights that are then rounded to T. For 16-bit types the hardware's 2^x is accurate enough.
template <class T> struct ExpFor {
  float unit;  // 16-bit types: times log2 e

  __device__ __forceinline__ explicit ExpFor(float unit = 1) : unit(kIsFloat<T> ? unit : unit * 1.4426950408889634f) {}
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kIsFloat<T>) return Exp()(x * unit);
    return power_of_2(x * unit);
  }
};
// The weight e^(score - (lse + lse_error)) of a key in a finished row that is not empty. lse_error is in the units of
// ExpFor: so it is part of the FMA before the power of two, and costs nothing.
template <class T> __device__ __forceinline__ float weight_in_row(float score, float lse, float lse_error) {
  if constexpr (kIsFloat<T>) return Exp()((score - lse) - lse_error);
  return power_of_2(fmaf(score - lse, ExpFor<T>().unit, -lse_error));
}

// The states of a fragment's rows. Until finish, m is in the units of the scores, and l is the sum over the columns of
// the lane; m is always the same on the four lanes of a quad.
template <int kStrips> struct RowStates {
  State<float> state[kStrips][2];

  // Replaces a tile of scores, in multiples of unit, by their weights. The caller then multiplies the accumulators of
  // the rows by factors.
  template <class T, int kColumns>
  __device__ __forceinline__ void scores_to_weights(Fragment<kStrips, kColumns>& s, float (&factors)[kStrips][2],
                                                    float unit) {
    const ExpFor<T> exponential(unit);
#pragma unroll
    for (int r = 0; r < kStrips; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = state[r][h].m, sum = 0;  // fmaxf ignores a NaN score, but its weight will be NaN
#pragma unroll
        for (int c = 0; c < kColumns; c++)
#pragma unroll
          for (int e = 0; e < 2; e++) largest = fmaxf(largest, s.x[r][c][2 * h + e]);
        factors[r][h] = raise(state[r][h], quad_max(largest), exponential);
        const float m = state[r][h].m;
#pragma unroll
        for (int c = 0; c < kColumns; c++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = s.x[r][c][2 * h + e];
            x = weight(x, m, exponential);
            sum += x;
          }
        state[r][h].l += sum;
      }
  }

  // Completes l, and converts m from multiples of unit.
  __device__ __forceinline__ void finish(float unit) {
#pragma unroll
    for (int r = 0; r < kStrips; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) state[r][h] = {state[r][h].m * unit, quad_sum(state[r][h].l)};
  }
};

// Multiplies the rows of a by their factors. Mostly all factors of a warp are 1: no row has found a larger maximum.
template <int kStrips, int kColumns>
__device__ __forceinline__ void rescale(Fragment<kStrips, kColumns>& a, const float (&factors)[kStrips][2]) {
  bool raised = false;
#pragma unroll
  for (int r = 0; r < kStrips; r++) raised = raised || factors[r][0] != 1 || factors[r][1] != 1;
  if (!__any_sync(~0u, raised)) return;
  for_each(a, [&](float& x, int r, int, int h, int) { x *= factors[r][h]; });
}

}  // namespace flashsoftmax::cuda
