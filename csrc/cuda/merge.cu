// The merge of states for disjoint keys, given as (out, lse) or left by the splits of decode, and its gradient.
//
// A block is lanes x rows x teams. The lanes of a row, at most a warp of them, agree on its weights; each has its own
// packs of elements, accessed at once where every tensor allows that. Each team merges its share of the states, then
// the teams are merged.
#include "launch.h"
#include "splits.h"

namespace flashsoftmax {
namespace {

constexpr int64_t kThreads = 256, kWarp = 32;
constexpr int64_t kListed = 16;  // states that travel as parameters of a kernel
constexpr int64_t kAhead = 4;    // states that a thread loads together

struct List {
  MergeState states[kListed];
};

template <class T, int kWidth> struct alignas(sizeof(T) * kWidth) Pack {
  T elements[kWidth];
};

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void narrow(float from, float& to) { to = from; }
__device__ void narrow(float from, __half& to) { to = __float2half_rn(from); }
__device__ void narrow(float from, __nv_bfloat16& to) { to = __float2bfloat16_rn(from); }

// A pack of a row, of whose dim elements it begins with number d.
template <int kWidth, class T>
__device__ void load(const T* row, int64_t stride, int64_t d, int64_t dim, bool packs, float (&to)[kWidth]) {
  Pack<T, kWidth> pack;
  if (packs) pack = *reinterpret_cast<const Pack<T, kWidth>*>(row + d);
  for (int e = 0; e < kWidth; e++) {
    if (!packs) pack.elements[e] = d + e < dim ? row[(d + e) * stride] : T(0.0f);
    to[e] = widen(pack.elements[e]);
  }
}
template <int kWidth, class T>
__device__ void store(T* row, int64_t stride, int64_t d, int64_t dim, bool packs, const float (&from)[kWidth]) {
  Pack<T, kWidth> pack;
  for (int e = 0; e < kWidth; e++) {
    narrow(from[e], pack.elements[e]);
    if (!packs && d + e < dim) row[(d + e) * stride] = pack.elements[e];
  }
  if (packs) *reinterpret_cast<Pack<T, kWidth>*>(row + d) = pack;
}

// A thread's row of every tensor, and its packs there: those at first, first + step, ...
template <class T> struct Row {
  static constexpr int width = 16 / sizeof(T);
  int64_t b, h, i, dim, first, step;
  bool packs, exists;

  __device__ Row(const MergeParams& p, bool packs) : dim(p.dim), packs(packs) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    i = row % p.rows;
    h = row / p.rows % p.heads;
    b = row / p.rows / p.heads;
    exists = b < p.batch;
    first = threadIdx.x * width;
    step = blockDim.x * width;
  }

  __device__ bool leads() const { return first == 0; }
  __device__ float& lse(const MergeState& state) const {
    return static_cast<float*>(state.lse.data)[state.lse.offset(b, h, i)];
  }
  __device__ void load(const MergeState& state, int64_t d, float (&to)[width]) const {
    flashsoftmax::load(at(state.out), state.out.dim, d, dim, packs, to);
  }
  __device__ void store(const MergeState& state, int64_t d, const float (&from)[width]) const {
    flashsoftmax::store(at(state.out), state.out.dim, d, dim, packs, from);
  }

 private:
  __device__ T* at(const Tensor4& x) const { return static_cast<T*>(x.data) + x.offset(b, h, i); }
};

// The sum over the lanes of a row, the same on each.
__device__ float sum_over_row(float x) {
  const unsigned lanes = blockDim.x;
  const unsigned row = ~0u >> (kWarp - lanes) << threadIdx.y * lanes % kWarp;
  for (unsigned step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(row, x, step);
  return x;
}

// The states of the public merge.
template <class T> struct GivenStates {
  static constexpr int width = Row<T>::width, teams = 1;
  MergeParams p;
  List list;
  bool packs;

  __device__ Row<T> row() const { return Row<T>(p, packs); }
  __device__ int64_t count() const { return p.states; }
  __device__ int64_t dim() const { return p.dim; }
  __device__ const MergeState& at(int64_t n) const { return p.inputs ? p.inputs[n] : list.states[n]; }
  __device__ State<float> state(const Row<T>& row, int64_t n) const { return from_lse(row.lse(at(n))); }
  __device__ void load(const Row<T>& row, int64_t n, int64_t d, float (&to)[width]) const { row.load(at(n), d, to); }
  __device__ void store(const Row<T>& row, int64_t d, const float (&from)[width]) const {
    row.store(p.output, d, from);
  }
  __device__ float& lse(const Row<T>& row) const { return row.lse(p.output); }
};

// The states that the splits of decode left, for an output of type T. The number of teams is fixed: splits without keys
// change no bit, however many follow.
template <class T> struct SplitStates {
  static constexpr int width = 4, teams = 8;
  AttentionParams p;
  cuda::Splits splits;
  bool packs;  // the output

  struct OutputRow {
    int64_t index, b, h, i;
    bool exists;
  };
  __device__ OutputRow row() const {
    const int64_t index = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t i = index % p.seqlen_q, h = index / p.seqlen_q % p.heads_q, b = index / p.seqlen_q / p.heads_q;
    if (index >= splits.rows) return {};
    const Sequence s = sequence(p, b);
    return {index, s.q_batch, h, s.q_row + i, s.valid && i < s.q_len};  // else decode has written it
  }
  __device__ int64_t count() const { return splits.count; }
  __device__ int64_t dim() const { return p.head_dim_v; }
  __device__ State<float> state(const OutputRow& row, int64_t n) const {
    const float2 state = splits.states[n * splits.rows + row.index];
    return {state.x, state.y};
  }
  __device__ void load(const OutputRow& row, int64_t n, int64_t d, float (&to)[width]) const {
    const float* acc = splits.acc + (n * splits.rows + row.index) * splits.width;
    flashsoftmax::load(acc, 1, d, splits.width, true, to);
  }
  __device__ void store(const OutputRow& row, int64_t d, const float (&from)[width]) const {
    T* out = static_cast<T*>(p.out.data) + p.out.offset(row.b, row.h, row.i);
    flashsoftmax::store(out, p.out.dim, d, p.head_dim_v, packs, from);
  }
  __device__ float& lse(const OutputRow& row) const {
    return static_cast<float*>(p.lse.data)[p.lse.offset(row.b, row.h, row.i)];
  }
};

template <class States>
__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ States states) {
  constexpr int width = States::width, teams = States::teams;
  const auto row = states.row();
  const int64_t count = row.exists ? states.count() : 0, dim = states.dim();
  const unsigned team = threadIdx.z;

  for (int64_t d0 = 0; d0 == 0 || d0 < dim; d0 += blockDim.x * width) {
    const int64_t d = d0 + threadIdx.x * width;
    State<float> total;
    float out[width] = {};
    const auto take = [&](const State<float>& state, const float (&x)[width]) {
      const Factors<float> factors = merge(total, state);
      for (int e = 0; e < width; e++) out[e] = out[e] * factors.into + x[e] * factors.from;
    };

    // The states of this team
    for (int64_t first = team; first < count; first += kAhead * teams) {
      State<float> state[kAhead];
      float x[kAhead][width] = {};
#pragma unroll
      for (int64_t a = 0; a < kAhead; a++)
        if (first + a * teams < count) state[a] = states.state(row, first + a * teams);
#pragma unroll
      for (int64_t a = 0; a < kAhead; a++)
        if (state[a].l != 0 && d < dim) states.load(row, first + a * teams, d, x[a]);
#pragma unroll
      for (int64_t a = 0; a < kAhead; a++) take(state[a], x[a]);
    }

    // The other teams, in order
    if constexpr (teams > 1) {
      __shared__ float shared[width + 2][kThreads];
      const unsigned peers = kThreads / teams, peer = threadIdx.y * blockDim.x + threadIdx.x;
      __syncthreads();
      shared[width][team * peers + peer] = total.m;
      shared[width + 1][team * peers + peer] = total.l;
      for (int e = 0; e < width; e++) shared[e][team * peers + peer] = out[e];
      __syncthreads();
      for (unsigned other = peer + peers; team == 0 && other < kThreads; other += peers) {
        float x[width];
        for (int e = 0; e < width; e++) x[e] = shared[e][other];
        take({shared[width][other], shared[width + 1][other]}, x);
      }
    }

    if (!row.exists || team != 0) continue;
    const float inverse = inverse_sum(total);
    for (float& element : out) element *= inverse;
    if (d < dim) states.store(row, d, out);
    if (d == 0) states.lse(row) = lse(total);
  }
}

// With w_n = e^(lse_n - lse) and g_n = grad_out . out_n these are
//     grad_out_n = w_n grad_out,    grad_lse_n = w_n (g_n - sum_m w_m g_m + grad_lse).
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_grad_rows(const __grid_constant__ MergeGradParams p, const __grid_constant__ List list,
                    const __grid_constant__ List grad_list, bool packs) {
  constexpr int width = Row<T>::width;
  const MergeState& grad_output = p.grad_output;
  const Row<T> row(p.forward, packs);
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
      float grad[width] = {}, x[width];
      if (grad_output.out.data && w != 0) {
        row.load(grad_output, d, grad);
        row.load(states[n], d, x);
        for (int e = 0; e < width; e++) {
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

// Whether a tensor can be accessed in packs of 16 bytes.
bool packs(const MergeParams& p, const Tensor4& x) {
  const int64_t width = cuda::pack_width(p.dtype);
  return p.dim % width == 0 && cuda::rows_pack(x, p.batch, p.heads, p.rows, width);
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

// Calls launch(grid, block) for rows of dim elements, where a thread has width of them.
template <class Launch> void for_rows(int64_t rows, int64_t dim, int64_t width, int64_t teams, Launch&& launch) {
  const int64_t needed = (dim + width - 1) / width;
  int64_t lanes = 1;
  while (lanes < needed && lanes < kWarp) lanes *= 2;
  const int64_t rows_per_block = kThreads / lanes / teams;
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  if (blocks == 0) return;
  launch(dim3(blocks), dim3(lanes, rows_per_block, teams));
  cuda::check("merge", cudaGetLastError());
}

}  // namespace

namespace cuda {

int64_t merge_scratch(const MergeParams& p) { return list_bytes(p); }

void merge(const MergeParams& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const Listed states = pass(p, p.inputs, scratch, s);
  MergeParams on_device = p;
  on_device.inputs = states.memory;
  for_dtype("outs[0]", p.dtype, [&](auto element) {
    using States = GivenStates<decltype(element)>;
    for_rows(p.batch * p.heads * p.rows, p.dim, States::width, States::teams, [&](dim3 grid, dim3 block) {
      merge_rows<<<grid, block, 0, s>>>(States{on_device, states.list, packs(p)});
    });
  });
}

void merge_splits(const AttentionParams& p, const Splits& splits, cudaStream_t stream) {
  for_dtype("query", p.dtype, [&](auto element) {
    using States = SplitStates<decltype(element)>;
    const bool whole =
        p.head_dim_v % States::width == 0 && rows_pack(p.out, p.batch(), p.heads_q, p.rows_q, States::width);
    for_rows(splits.rows, p.head_dim_v, States::width, States::teams,
             [&](dim3 grid, dim3 block) { merge_rows<<<grid, block, 0, stream>>>(States{p, splits, whole}); });
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
  for_dtype("outs[0]", p.forward.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t rows = p.forward.batch * p.forward.heads * p.forward.rows;
    for_rows(rows, p.forward.dim, Row<T>::width, 1, [&](dim3 grid, dim3 block) {
      merge_grad_rows<T><<<grid, block, 0, s>>>(on_device, states.list, grads.list, packs(p));
    });
  });
}

}  // namespace cuda
}  // namespace flashsoftmax
