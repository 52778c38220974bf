// Rows whose sum of weighted values overflowed. Their output is a mean of the values, so it may still be finite.
#pragma once

#include "../kernels.h"
#include "scores.cuh"

namespace flashsoftmax::cuda {

// In float16 no sum overflows.
template <class T> constexpr bool kMayOverflow = !std::is_same_v<T, __half>;

__device__ __forceinline__ bool is_finite(float x) { return x - x == 0; }

// Whether all elements of a lane are finite.
template <int kStrips, int kColumns> __device__ __forceinline__ bool all_finite(Fragment<kStrips, kColumns>& a) {
  float zeros = 0;
  for_each(a, [&](float& x, int, int, int, int) { zeros = fmaf(x, 0, zeros); });  // inf * 0 is NaN
  return zeros == 0;
}

// The score of key j, by all lanes of a warp.
template <class T>
__device__ __forceinline__ float score_of_key(const AttentionParams& args, const Sequence& seq, int64_t h, int64_t i,
                                              int64_t j, int lane) {
  const T* q = static_cast<const T*>(args.query.data) + args.query.offset(seq.q_batch, h, seq.q_row + i);
  const T* k = source<T>(args, args.key, seq, seq.index, h / args.group(), 0, 0, 0, false).at(j);
  float dot = 0;
#pragma unroll 1
  for (int d = lane; d < args.head_dim; d += kWarp)
    dot += static_cast<float>(q[d * args.query.dim]) * static_cast<float>(k[d * args.key.dim]);
#pragma unroll 1
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(~0u, dot, lanes);
  const HeadScores head = head_scores(args, seq, h);
  return head.at(head.score.content(dot), i, j);
}

// Computes the output of query i of head h of sequence b again, in double, and replaces its elements that are infinite
// or NaN. By all lanes of a warp, once the row and its lse are written; a row whose lse is NaN stays as it is, since its
// pages may not exist. This is slow but rare. To take no registers from the kernels it is not inlined, and it looks up
// again what it needs for each key.
template <class T>
__device__ __noinline__ void recompute_row(const AttentionParams& args, int b, int h, int i, int lane) {
  const auto sequence_again = [&] { return sequence(args, hide_from_optimizer(b)); };
  const auto element = [&](const Sequence& seq, int d) -> T& {
    return static_cast<T*>(args.out.data)[args.out.offset(seq.q_batch, h, seq.q_row + i) + d * args.out.dim];
  };
  __syncwarp();
#pragma unroll 1
  for (int d = lane; d - lane < args.head_dim_v; d += kWarp) {
    Sequence seq = sequence_again();
    const float lse = static_cast<const float*>(args.lse.data)[args.lse.offset(seq.q_batch, h, seq.q_row + i)];
    const bool wanted = d < args.head_dim_v && !is_finite(static_cast<float>(element(seq, d))) && lse == lse;
    State<double> state;
    if (args.sinks.data) state = {args.sinks.at<float>(h), 1};
    double acc = 0;
#pragma unroll 1
    for (int64_t j = seq.band.first(i); __any_sync(~0u, wanted && acc == acc); j++) {  // a NaN stays
      seq = sequence_again();
      if (j >= seq.band.end(i)) break;
      const double score = score_of_key<T>(args, seq, h, i, j, lane);
      const double alpha = raise(state, score, FloatExp());
      double w = weight(score, state.m, FloatExp());
      state.l += w;
      if (args.drops_weights() && !(kept_weights(args, b, h).bits(i, j / 4 * 4) >> j % 4 & 1)) w = 0;
      const T* v = source<T>(args, args.value, seq, b, h / args.group(), 0, 0, 0, false).at(j);
      if (wanted) acc = acc * alpha + w * static_cast<float>(v[d * args.value.dim]);
    }
    acc *= inverse_sum(state) * args.kept_scale<float>();
    if (wanted) element(sequence_again(), d) = T(static_cast<float>(acc));
  }
}

}  // namespace flashsoftmax::cuda
