// The gradients of attention: what the backward has to know of each row, the backward, and the gradient of the sinks.
#include "grad_rows.h"
#include "sm80/launch.h"
#include "tile.cuh"

namespace flashsoftmax::cuda {
namespace {

constexpr int kThreads = 256;

int64_t rows(const AttentionParams& p) { return p.batch() * p.heads_q * p.rows_q; }

// A row for each warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    find_rows(const __grid_constant__ AttentionGradParams grad, GradRow* to, int64_t rows) {
  const AttentionParams& p = grad.forward;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (row >= rows) return;
  const int64_t i = row % p.rows_q, h = row / p.rows_q % p.heads_q, b = row / p.rows_q / p.heads_q;

  float delta = 0;
  if (grad.grad_out.data) {
    const T* out = static_cast<const T*>(p.out.data) + p.out.offset(b, h, i);
    const T* grad_out = static_cast<const T*>(grad.grad_out.data) + grad.grad_out.offset(b, h, i);
    for (int64_t d = lane_id(); d < p.head_dim_v; d += kWarp)
      delta += static_cast<float>(out[d * p.out.dim]) * static_cast<float>(grad_out[d * grad.grad_out.dim]);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
  }
  if (lane_id() != 0) return;
  if (grad.grad_lse.data) delta -= static_cast<const float*>(grad.grad_lse.data)[grad.grad_lse.offset(b, h, i)];
  const State<float> state = from_lse(static_cast<const float*>(p.lse.data)[p.lse.offset(b, h, i)]);
  to[row] = {state.m, state.l == 0 ? 0 : delta};
}

// The sink is a key of value 0: its dS, summed over all rows of its head by a block.
__global__ void __launch_bounds__(kThreads)
    sum_sink_gradients(const __grid_constant__ AttentionGradParams grad, const GradRow* rows, int64_t batch) {
  __shared__ double sums[kThreads];
  const AttentionParams& p = grad.forward;
  const int64_t h = blockIdx.x;
  const float sink = p.sinks.at<float>(h);
  double sum = 0;
  for (int64_t n = threadIdx.x; n < batch * p.rows_q; n += kThreads) {
    const GradRow row = rows[(n / p.rows_q * p.heads_q + h) * p.rows_q + n % p.rows_q];
    if (row.lse != kHidden) sum -= weight(sink, row.lse) * row.delta;
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<float*>(grad.grad_sinks)[h] = static_cast<float>(sums[0]);
}

}  // namespace

int64_t attention_grad_scratch(const AttentionGradParams& grad) { return rows(grad.forward) * sizeof(GradRow); }

void attention_grad(const AttentionGradParams& grad, void* scratch, void* stream) {
  const AttentionParams& p = grad.forward;
  const auto s = static_cast<cudaStream_t>(stream);
  GradRow* to = static_cast<GradRow*>(scratch);
  constexpr int64_t kBlockRows = kThreads / kWarp;
  const int64_t blocks = (rows(p) + kBlockRows - 1) / kBlockRows;
  if (blocks == 0) return;
  for_dtype("query", p.dtype, [&](auto element) {
    find_rows<decltype(element)><<<blocks, kThreads, 0, s>>>(grad, to, rows(p));
    check("backward, rows", cudaGetLastError());
  });
  sm80::pick(sm80::backward<64>, sm80::backward<128>, sm80::backward<256>, p)(grad, scratch, s);
  if (grad.grad_sinks) {
    sum_sink_gradients<<<p.heads_q, kThreads, 0, s>>>(grad, to, p.batch());
    check("backward, sinks", cudaGetLastError());
  }
}

}  // namespace flashsoftmax::cuda
