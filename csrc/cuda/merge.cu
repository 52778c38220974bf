// The merge of states (out, lse) for disjoint keys, and its gradient.
//
// A block is lanes x rows. The lanes of a row, at most a warp of them, agree on its weights; each has its own packs of
// elements, of 16 bytes where every tensor allows that.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "../kernels.h"

namespace flashsoftmax {
namespace {

constexpr int64_t kThreads = 256, kWarp = 32;
constexpr int64_t kListed = 16;  // states that travel as parameters of a kernel

struct List {
  MergeState states[kListed];
};

template <class T, int kWidth> struct alignas(sizeof(T) * kWidth) Pack {
  using Element = T;
  static constexpr int width = kWidth;
  T elements[kWidth];
};

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void narrow(float from, float& to) { to = from; }
__device__ void narrow(float from, __half& to) { to = __float2half_rn(from); }
__device__ void narrow(float from, __nv_bfloat16& to) { to = __float2bfloat16_rn(from); }

// A thread's row of every tensor, and its packs there: those at first, first + step, ...
template <class P> struct Row {
  int64_t b, h, i, first, step;
  bool exists;

  __device__ explicit Row(const MergeParams& p) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    i = row % p.rows;
    h = row / p.rows % p.heads;
    b = row / p.rows / p.heads;
    exists = b < p.batch;
    first = threadIdx.x * P::width;
    step = blockDim.x * P::width;
  }

  __device__ bool leads() const { return first == 0; }
  __device__ float& lse(const MergeState& state) const {
    return static_cast<float*>(state.lse.data)[state.lse.offset(b, h, i)];
  }
  __device__ void load(const MergeState& state, int64_t d, float (&to)[P::width]) const {
    const P pack = at(state.out, d);
    for (int e = 0; e < P::width; e++) to[e] = widen(pack.elements[e]);
  }
  __device__ void store(const MergeState& state, int64_t d, const float (&from)[P::width]) const {
    P pack;
    for (int e = 0; e < P::width; e++) narrow(from[e], pack.elements[e]);
    at(state.out, d) = pack;
  }

 private:
  __device__ P& at(const Tensor4& x, int64_t d) const {
    return *reinterpret_cast<P*>(static_cast<typename P::Element*>(x.data) + x.offset(b, h, i) + d * x.dim);
  }
};

// The sum over the lanes of a row, the same on each.
__device__ float sum_over_row(float x) {
  const unsigned lanes = blockDim.x;
  const unsigned row = ~0u >> (kWarp - lanes) << threadIdx.y * lanes % kWarp;
  for (unsigned step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(row, x, step);
  return x;
}

template <class P>
__global__ void __launch_bounds__(kThreads)
    merge_rows(const __grid_constant__ MergeParams p, const __grid_constant__ List list) {
  const Row<P> row(p);
  if (!row.exists) return;
  const MergeState* states = p.inputs ? p.inputs : list.states;

  State<float> total;
  for (int64_t n = 0; n < p.states; n++) merge(total, from_lse(row.lse(states[n])));
  if (row.leads()) row.lse(p.output) = lse(total);

  const float inverse = inverse_sum(total);
  for (int64_t d = row.first; d < p.dim; d += row.step) {
    float out[P::width] = {}, x[P::width];
    for (int64_t n = 0; n < p.states; n++) {
      const State<float> state = from_lse(row.lse(states[n]));
      if (state.l == 0) continue;
      const float w = weight(state.m, total.m);
      row.load(states[n], d, x);
      for (int e = 0; e < P::width; e++) out[e] += w * x[e];
    }
    for (float& element : out) element *= inverse;
    row.store(p.output, d, out);
  }
}

// With w_n = e^(lse_n - lse) and g_n = grad_out . out_n these are
//     grad_out_n = w_n grad_out,    grad_lse_n = w_n (g_n - sum_m w_m g_m + grad_lse).
template <class P>
__global__ void __launch_bounds__(kThreads)
    merge_grad_rows(const __grid_constant__ MergeGradParams p, const __grid_constant__ List list,
                    const __grid_constant__ List grad_list) {
  const MergeState& grad_output = p.grad_output;
  const Row<P> row(p.forward);
  if (!row.exists) return;
  const MergeState* states = p.forward.inputs ? p.forward.inputs : list.states;
  const MergeState* grads = p.grad_inputs ? p.grad_inputs : grad_list.states;

  const State<float> total = from_lse(row.lse(p.forward.output));
  const auto weight_of = [&](int64_t n) {
    const State<float> state = from_lse(row.lse(states[n]));
    return state.l == 0 || total.l == 0 ? 0 : weight(state.m, total.m);
  };

  float mean = 0;
  for (int64_t n = 0; n < p.forward.states; n++) {
    const float w = weight_of(n);
    float g = 0;
    for (int64_t d = row.first; d < p.forward.dim; d += row.step) {
      float grad[P::width] = {}, x[P::width];
      if (grad_output.out.data && w != 0) {
        row.load(grad_output, d, grad);
        row.load(states[n], d, x);
        for (int e = 0; e < P::width; e++) {
          g += grad[e] * x[e];
          grad[e] *= w;
        }
      }
      row.store(grads[n], d, grad);
    }
    g = sum_over_row(g);
    mean += w * g;
    if (row.leads()) row.lse(grads[n]) = g;
  }

  if (!row.leads()) return;
  const float grad_lse = grad_output.lse.data ? row.lse(grad_output) : 0;
  for (int64_t n = 0; n < p.forward.states; n++) {
    const float w = weight_of(n);
    row.lse(grads[n]) = w == 0 ? 0 : w * (row.lse(grads[n]) - mean + grad_lse);
  }
}

// Takes a list that is too long for parameters to memory, part by part in the order of the stream.
__global__ void write(const __grid_constant__ List part, MergeState* to) { to[threadIdx.x] = part.states[threadIdx.x]; }

// How a kernel gets a list of states: in its parameters, or where they are too many in memory.
struct Listed {
  List list;
  MergeState* memory;
};

int64_t list_bytes(const MergeParams& p) { return p.states > kListed ? p.states * int64_t(sizeof(MergeState)) : 0; }

Listed pass(const MergeParams& p, const MergeState* states, void* memory, cudaStream_t stream) {
  Listed listed{{}, p.states > kListed ? static_cast<MergeState*>(memory) : nullptr};
  for (int64_t begin = 0; begin < p.states; begin += kListed) {
    const int64_t count = p.states - begin < kListed ? p.states - begin : kListed;
    for (int64_t n = 0; n < count; n++) listed.list.states[n] = states[begin + n];
    if (listed.memory) write<<<1, count, 0, stream>>>(listed.list, listed.memory + begin);
  }
  return listed;
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("merge: ") + cudaGetErrorString(error));
}

// Whether a tensor can be read in packs of 16 bytes.
bool packs(const MergeParams& p, const Tensor4& x) {
  const int64_t width = p.dtype == DType::f32 ? 4 : 8;
  const auto apart = [&](int64_t size, int64_t stride) { return size == 1 || stride % width == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && p.dim % width == 0 && x.dim == 1 && apart(p.batch, x.batch) &&
         apart(p.heads, x.head) && apart(p.rows, x.row);
}

bool packs(const MergeParams& p) {
  for (int64_t n = 0; n < p.states; n++)
    if (!packs(p, p.inputs[n].out)) return false;
  return !p.output.out.data || packs(p, p.output.out);
}

bool packs(const MergeGradParams& p) {
  for (int64_t n = 0; n < p.forward.states; n++)
    if (!packs(p.forward, p.grad_inputs[n].out)) return false;
  return packs(p.forward) && (!p.grad_output.out.data || packs(p.forward, p.grad_output.out));
}

// Calls launch(pack, grid, block).
template <class Launch> void for_rows(const MergeParams& p, bool packs, Launch&& launch) {
  const auto with = [&](auto pack) {
    const int64_t needed = (p.dim + pack.width - 1) / pack.width;
    int64_t lanes = 1;
    while (lanes < needed && lanes < kWarp) lanes *= 2;
    const int64_t rows = kThreads / lanes;
    const int64_t blocks = (p.batch * p.heads * p.rows + rows - 1) / rows;
    if (blocks == 0) return;
    launch(pack, dim3(blocks), dim3(lanes, rows));
    check(cudaGetLastError());
  };
  switch (p.dtype) {
    case DType::f16: return packs ? with(Pack<__half, 8>()) : with(Pack<__half, 1>());
    case DType::bf16: return packs ? with(Pack<__nv_bfloat16, 8>()) : with(Pack<__nv_bfloat16, 1>());
    case DType::f32: return packs ? with(Pack<float, 4>()) : with(Pack<float, 1>());
    default: throw std::invalid_argument("outs[0]: float64, wanted float16, bfloat16 or float32 on CUDA");
  }
}

}  // namespace

namespace cuda {

int64_t merge_scratch(const MergeParams& p) { return list_bytes(p); }

void merge(const MergeParams& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const Listed states = pass(p, p.inputs, scratch, s);
  MergeParams on_device = p;
  on_device.inputs = states.memory;
  for_rows(p, packs(p), [&](auto pack, dim3 grid, dim3 block) {
    merge_rows<decltype(pack)><<<grid, block, 0, s>>>(on_device, states.list);
  });
}

int64_t merge_grad_scratch(const MergeGradParams& p) { return 2 * list_bytes(p.forward); }

void merge_grad(const MergeGradParams& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const Listed states = pass(p.forward, p.forward.inputs, scratch, s);
  const Listed grads = pass(p.forward, p.grad_inputs, static_cast<char*>(scratch) + list_bytes(p.forward), s);
  MergeGradParams on_device = p;
  on_device.forward.inputs = states.memory;
  on_device.grad_inputs = grads.memory;
  for_rows(p.forward, packs(p), [&](auto pack, dim3 grid, dim3 block) {
    merge_grad_rows<decltype(pack)><<<grid, block, 0, s>>>(on_device, states.list, grads.list);
  });
}

}  // namespace cuda
}  // namespace flashsoftmax
