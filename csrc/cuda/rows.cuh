// The recurrence of softmax.h over the rows of a fragment.
#pragma once

#include "tile.cuh"

namespace flashsoftmax::cuda {

// Over the four lanes of a row, the same on each.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// e^(unit * x) for weights that will be rounded to T: for 16 bits the hardware's exponential is exact enough.
template <class T> struct ExpFor {
  float unit;  // 16 bits: times log2 e

  __device__ __forceinline__ explicit ExpFor(float unit = 1) : unit(kIsFloat<T> ? unit : unit * 1.4426950408889634f) {}
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kIsFloat<T>) return Exp()(x * unit);
    return power_of_2(x * unit);
  }
};
// e^(score - lse) of a row that is not empty.
template <class T> __device__ __forceinline__ float weight_for(float score, float lse) {
  return ExpFor<T>()(score - lse);
}

// The states of a fragment's rows, before finish with m in the units of the scores that are taken in. m is the same on
// each lane of a quad, but each has the l of its own columns until finish adds them up.
template <int kRows> struct RowStates {
  State<float> state[kRows][2];

  // Takes in a tile of scores, which become weights. The accumulators of the rows are to be multiplied by factors.
  template <class T, int kColumns>
  __device__ __forceinline__ void take(Fragment<kRows, kColumns>& s, float (&factors)[kRows][2], float unit = 1) {
    const ExpFor<T> exponential(unit);
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = state[r][h].m, sum = 0;  // fmaxf passes over a NaN: the weight of its key will be NaN
#pragma unroll
        for (int c = 0; c < kColumns; c++)
#pragma unroll
          for (int e = 0; e < 2; e++) most = fmaxf(most, s.x[r][c][2 * h + e]);
        factors[r][h] = raise(state[r][h], quad_max(most), exponential);
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

  __device__ __forceinline__ void finish(float unit = 1) {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) state[r][h] = {state[r][h].m * unit, quad_sum(state[r][h].l)};
  }
};

// Multiplies rows by their factors. Most tiles raise no row of a warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void rescale(Fragment<kRows, kColumns>& a, const float (&factors)[kRows][2]) {
  bool raised = false;
#pragma unroll
  for (int r = 0; r < kRows; r++) raised = raised || factors[r][0] != 1 || factors[r][1] != 1;
  if (!__any_sync(~0u, raised)) return;
  for_each(a, [&](float& x, int r, int, int h, int) { x *= factors[r][h]; });
}

}  // namespace flashsoftmax::cuda
