// The backward of attention in three steps: a BackwardRow for each row of queries, the gradients of query, key and
// value (and bias), and the gradient of the sinks.
#include "backward_rows.h"
#include "bias_sum.h"
#include "map.h"
#include "rows.cuh"
#include "sm80/launch.h"

namespace flashsoftmax::cuda {
namespace {

constexpr int kThreads = 256;

int64_t all_rows(const AttentionParams& args) { return args.batch() * args.heads_q * args.rows_q; }

// Writes to[n] for each row n < rows. Grid: one block per kThreads / kWarp rows. Block: one warp per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_rows_kernel(const __grid_constant__ AttentionBackwardParams args, BackwardRow* to, int64_t rows) {
  const AttentionParams& forward = args.forward;
  const int64_t n = int64_t(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (n >= rows) return;
  const int64_t i = n % forward.rows_q, h = n / forward.rows_q % forward.heads_q;
  const int64_t b = n / forward.rows_q / forward.heads_q;

  float delta = 0;
  if (args.grad_out.data) {
    const T* out = static_cast<const T*>(forward.out.data) + forward.out.offset(b, h, i);
    const T* grad_out = static_cast<const T*>(args.grad_out.data) + args.grad_out.offset(b, h, i);
    for (int64_t d = lane_id(); d < forward.head_dim_v; d += kWarp)
      delta += static_cast<float>(out[d * forward.out.dim]) * static_cast<float>(grad_out[d * args.grad_out.dim]);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
  }
  if (lane_id() != 0) return;
  if (args.grad_lse.data) delta -= static_cast<const float*>(args.grad_lse.data)[args.grad_lse.offset(b, h, i)];
  const State<float> state = from_lse(static_cast<const float*>(forward.lse.data)[forward.lse.offset(b, h, i)]);
  const Tensor4& lse_error = forward.lse_error;
  const float error = lse_error.data ? static_cast<const float*>(lse_error.data)[lse_error.offset(b, h, i)] : 0;
  to[n] = {state.m, error * ExpFor<T>().unit, state.l == 0 ? 0 : delta};
}

// A sink is a key of value 0, so its dS is -P delta, summed over all rows of the head. Grid: one block per query head.
template <class T>
__global__ void __launch_bounds__(kThreads) sink_gradients_kernel(const __grid_constant__ AttentionBackwardParams args,
                                                                  const BackwardRow* rows, int64_t batch) {
  __shared__ double sums[kThreads];
  const AttentionParams& forward = args.forward;
  const int64_t h = blockIdx.x;
  const float sink = forward.sinks.at<float>(h);
  double sum = 0;
  for (int64_t n = threadIdx.x; n < batch * forward.rows_q; n += kThreads) {
    const BackwardRow row = rows[(n / forward.rows_q * forward.heads_q + h) * forward.rows_q + n % forward.rows_q];
    if (row.lse != kHidden) sum -= weight_in_row<T>(sink, row.lse, row.lse_error) * row.delta;
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<float*>(args.grad_sinks)[h] = static_cast<float>(sums[0]);
}

// Adds the parts of the gradient of a bias, in order. Grid: one block per kThreads elements.
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const float* parts, const __grid_constant__ BiasSum sum, float* to) {
  const int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x, elements = sum.elements();
  if (n >= elements) return;
  double x = 0;
  for (int64_t part = 0; part < sum.parts; part++) x += parts[part * elements + n];
  to[n] = static_cast<float>(x);
}

}  // namespace

int64_t attention_backward_scratch(const AttentionBackwardParams& args) {
  return map_bytes(args.forward) + all_rows(args.forward) * sizeof(BackwardRow) + BiasSum(args).bytes();
}

void attention_backward(const AttentionBackwardParams& unmapped, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  AttentionBackwardParams args = unmapped;
  const AttentionParams& forward = args.forward;
  BackwardRow* rows = reinterpret_cast<BackwardRow*>(static_cast<char*>(scratch) + map_bytes(forward));
  constexpr int64_t kBlockRows = kThreads / kWarp;
  const int64_t blocks = checked_product("query", "tiles of rows", {(all_rows(forward) + kBlockRows - 1) / kBlockRows});
  if (blocks == 0) return;
  args.forward = with_map(forward, scratch, s);
  const BiasSum bias(args);
  if (bias.parts > 1) args.grad_bias.data = rows + all_rows(forward);
  for_dtype("query", forward.dtype, [&](auto element) {
    using T = decltype(element);
    backward_rows_kernel<T><<<blocks, kThreads, 0, s>>>(args, rows, all_rows(forward));
    check("backward, rows", cudaGetLastError());
    sm80::pick(sm80::backward<64>, sm80::backward<128>, sm80::backward<256>, forward)(args, rows, s);
    if (bias.parts > 1) {
      const int64_t parts_blocks =
          checked_product("attn_bias", "elements", {(bias.elements() + kThreads - 1) / kThreads});
      add_parts_kernel<<<parts_blocks, kThreads, 0, s>>>(static_cast<const float*>(args.grad_bias.data), bias,
                                                         static_cast<float*>(unmapped.grad_bias.data));
      check("backward, parts of the gradient of the bias", cudaGetLastError());
    }
    if (!args.grad_sinks) return;
    sink_gradients_kernel<T><<<forward.heads_q, kThreads, 0, s>>>(args, rows, forward.batch());
    check("backward, sinks", cudaGetLastError());
  });
}

}  // namespace flashsoftmax::cuda
