// Merges states for disjoint keys, given as (out, lse) or left by the splits of decode, and computes the gradient of
// the merge.
//
// A block is lanes x rows x teams. The lanes of a row, at most a warp, each own some of its elements, which they access
// 16 bytes at a time where every tensor allows it. Each team merges its share of the states, then the teams are merged.
#include "elements.cuh"
#include "launch.h"
#include "overflow.cuh"
#include "splits.h"

namespace flashsoftmax::cuda {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kFew = 16;   // states that a kernel takes in its parameters; more are passed in memory
constexpr int64_t kAhead = 4;  // states that a thread loads together

struct StateList {
  MergeState few[kFew];
  MergeState* many;  // null if there are few

  __device__ const MergeState& operator[](int64_t n) const { return many ? many[n] : few[n]; }
};

// A thread's row, and the elements of it that the thread owns: width elements from `first` on, from first + step on,
// ...
template <class T> struct Row {
  static constexpr int width = 16 / sizeof(T);
  int64_t b, h, i, dim, first, step;
  bool aligned, exists;

  __device__ Row(const MergeParams& args, bool aligned) : dim(args.dim), aligned(aligned) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    i = row % args.rows;
    h = row / args.rows % args.heads;
    b = row / args.rows / args.heads;
    exists = b < args.batch;
    first = threadIdx.x * width;
    step = blockDim.x * width;
  }

  __device__ bool leads() const { return first == 0; }  // its thread reads and writes what the row has once
  __device__ float& lse(const MergeState& state) const {
    return static_cast<float*>(state.lse.data)[state.lse.offset(b, h, i)];
  }
  __device__ void load(const MergeState& state, int64_t d, float (&to)[width]) const {
    cuda::load(at(state.out), state.out.dim, d, dim, aligned, to);
  }
  __device__ void store(const MergeState& state, int64_t d, const float (&from)[width]) const {
    cuda::store(at(state.out), state.out.dim, d, dim, aligned, from);
  }
  __device__ T& element(const MergeState& state, int64_t d) const { return at(state.out)[d * state.out.dim]; }

 private:
  __device__ T* at(const Tensor4& x) const { return static_cast<T*>(x.data) + x.offset(b, h, i); }
};

// The sum over the lanes of a row, on each of them.
__device__ float sum_over_row(float x) {
  const unsigned lanes = blockDim.x;
  const unsigned row = ~0u >> (kWarp - lanes) << threadIdx.y * lanes % kWarp;
  for (unsigned step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(row, x, step);
  return x;
}

// States given as (out, lse).
template <class T> struct GivenStates {
  static constexpr int width = Row<T>::width, teams = 1, kBlocksPerSM = kIsFloat<T> ? 4 : 2;
  MergeParams args;
  StateList list;
  bool aligned;

  __device__ Row<T> row() const { return Row<T>(args, aligned); }
  __device__ int64_t count() const { return args.states; }
  __device__ int64_t dim() const { return args.dim; }
  __device__ State<float> state(const Row<T>& row, int64_t n) const { return from_lse(row.lse(list[n])); }
  __device__ void load(const Row<T>& row, int64_t n, int64_t d, float (&to)[width]) const { row.load(list[n], d, to); }
  __device__ void store(const Row<T>& row, int64_t d, const float (&from)[width]) const {
    row.store(args.output, d, from);
  }
  __device__ void store_lse(const Row<T>& row, const State<float>& total) const { row.lse(args.output) = lse(total); }
  // Replaces elements of a row, from d on, that are infinite or NaN by sums whose weights have the sum 1.
  __device__ void recompute(const Row<T>& row, int64_t d, const State<float>& total) const {
    const int64_t end = kMayOverflow<T> ? min(d + width, args.dim) : d;
#pragma unroll 1
    for (; d < end; d++) {
      T& element = row.element(args.output, d);
      if (is_finite(static_cast<float>(element))) continue;
      float sum = 0;
#pragma unroll 1
      for (int64_t n = 0; n < args.states; n++) {
        const State<float> one = state(row, n);
        if (one.l == 0) continue;
        const float share = weight(one.m, total.m) * inverse_sum(total);
        sum += share * static_cast<float>(row.element(list[n], d));
      }
      element = T(sum);
    }
  }
  __device__ void recompute_rows(bool) const {}
};

// States that the splits of decode left, for an output of type T. The number of teams is fixed, so empty splits change
// no bit, however many follow.
template <class T> struct SplitStates {
  static constexpr int width = 4, teams = 8, kBlocksPerSM = 4;
  AttentionParams args;
  Splits splits;
  bool aligned;  // the output

  struct OutputRow {
    int64_t index, b, h, i;
    bool exists;
  };
  // Row n of the block.
  __device__ OutputRow row(unsigned n = threadIdx.y) const {
    const int64_t index = int64_t(blockIdx.x) * blockDim.y + n;
    if (index >= splits.rows) return {};
    const int64_t i = index % args.seqlen_q, h = index / args.seqlen_q % args.heads_q;
    const int64_t b = index / args.seqlen_q / args.heads_q;
    const Sequence seq = sequence(args, b);
    // Decode itself has written the rows of sequences that are not valid.
    return {index, seq.q_batch, h, seq.q_row + i, seq.valid && i < seq.q_len};
  }
  __device__ int64_t count() const { return splits.count; }
  __device__ int64_t dim() const { return args.head_dim_v; }
  __device__ State<float> state(const OutputRow& row, int64_t n) const {
    const float2 state = splits.states[n * splits.rows + row.index];
    return {state.x, state.y};
  }
  __device__ void load(const OutputRow& row, int64_t n, int64_t d, float (&to)[width]) const {
    const float* acc = splits.acc + (n * splits.rows + row.index) * splits.width;
    cuda::load(acc, 1, d, splits.width, true, to);
  }
  __device__ void store(const OutputRow& row, int64_t d, const float (&from)[width]) const {
    T* out = static_cast<T*>(args.out.data) + args.out.offset(row.b, row.h, row.i);
    cuda::store(out, args.out.dim, d, args.head_dim_v, aligned, from);
  }
  __device__ void store_lse(const OutputRow& row, const State<float>& total) const {
    write_lse(args, row.b, row.h, row.i, total);
  }
  __device__ void recompute(const OutputRow&, int64_t, const State<float>&) const {}
  // Computes the rows of the block again from their keys, a warp per row, if a sum of this thread has overflowed.
  __device__ void recompute_rows(bool overflowed) const {
    if constexpr (kMayOverflow<T>) {
      if (!__syncthreads_or(overflowed)) return;
      const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      for (unsigned n = thread / kWarp; n < blockDim.y; n += kThreads / kWarp) {
        const int64_t index = row(n).index;
        if (row(n).exists)
          recompute_row<T>(args, index / args.seqlen_q / args.heads_q, row(n).h, index % args.seqlen_q, thread % kWarp);
      }
    }
  }
};

// Grid: one block per kThreads / lanes / teams rows. Block: lanes x rows x teams.
template <class States>
__global__ void __launch_bounds__(kThreads, States::kBlocksPerSM) merge_kernel(const __grid_constant__ States states) {
  constexpr int width = States::width, teams = States::teams;
  const auto row = states.row();
  const int64_t count = row.exists ? states.count() : 0, dim = states.dim();
  const unsigned team = threadIdx.z;

  bool overflowed = false;
  for (int64_t d0 = 0; d0 == 0 || d0 < dim; d0 += blockDim.x * width) {
    const int64_t d = d0 + threadIdx.x * width;
    State<float> total;
    float out[width] = {};
    const auto take = [&](const State<float>& state, const float (&x)[width]) {
      const Factors<float> factors = merge(total, state);
      for (int e = 0; e < width; e++) out[e] = out[e] * factors.into + x[e] * factors.from;
    };

    // The states of this team, kAhead at a time so that their loads overlap.
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

    // The states of the other teams, in order.
    if constexpr (teams > 1) {
      __shared__ float team_smem[width + 2][kThreads];  // accumulators, m and l of every thread
      const unsigned team_threads = kThreads / teams, thread = threadIdx.y * blockDim.x + threadIdx.x;
      __syncthreads();
      team_smem[width][team * team_threads + thread] = total.m;
      team_smem[width + 1][team * team_threads + thread] = total.l;
      for (int e = 0; e < width; e++) team_smem[e][team * team_threads + thread] = out[e];
      __syncthreads();
      for (unsigned other = thread + team_threads; team == 0 && other < kThreads; other += team_threads) {
        float x[width];
        for (int e = 0; e < width; e++) x[e] = team_smem[e][other];
        take({team_smem[width][other], team_smem[width + 1][other]}, x);
      }
    }

    if (!row.exists || team != 0) continue;
    const float inverse = inverse_sum(total);
    bool finite = true;
    for (float& element : out) {
      finite = finite && is_finite(element);
      element *= inverse;
    }
    overflowed = overflowed || !finite;
    if (d < dim) states.store(row, d, out);
    if (!finite) states.recompute(row, d, total);
    if (d == 0) states.store_lse(row, total);
  }
  states.recompute_rows(overflowed);
}

// With w_n = e^(lse_n - m) / l, where (m, l) is the total of all states, and g_n = grad_out . out_n:
//     grad_out_n = w_n grad_out,    grad_lse_n = w_n (g_n - sum_m w_m g_m + grad_lse).
// Grid and block are those of merge_kernel with one team.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_backward_kernel(const __grid_constant__ MergeBackwardParams args, const __grid_constant__ StateList states,
                          const __grid_constant__ StateList grads, bool aligned) {
  constexpr int width = Row<T>::width;
  const MergeState& grad_output = args.grad_output;
  const Row<T> row(args.forward, aligned);
  if (!row.exists) return;

  State<float> total;  // as the forward has it: one lse would lose l if it is large
  for (int64_t n = 0; n < args.forward.states; n++) merge(total, from_lse(row.lse(states[n])));
  const float inverse = inverse_sum(total);
  const auto weight_of = [&](int64_t n) {
    const State<float> state = from_lse(row.lse(states[n]));
    return state.l == 0 ? 0 : weight(state.m, total.m) * inverse;
  };

  // grad_out_n; grad_lse_n holds g_n until the sum over all states is known.
  float mean = 0;  // sum_n w_n g_n
  for (int64_t n = 0; n < args.forward.states; n++) {
    const float w = weight_of(n);
    float g = 0;
    for (int64_t d = row.first; d < args.forward.dim; d += row.step) {
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
  for (int64_t n = 0; n < args.forward.states; n++) {
    const float w = weight_of(n);
    row.lse(grads[n]) = w == 0 ? 0 : w * (row.lse(grads[n]) - mean + grad_lse);
  }
}

// Copies kFew states, or fewer, from a kernel's parameters to memory. Grid: one block. Block: one thread per state.
__global__ void write_states(const __grid_constant__ StateList part, MergeState* to) {
  to[threadIdx.x] = part.few[threadIdx.x];
}

// Scratch memory that a list needs.
int64_t list_bytes(const MergeParams& args) {
  return args.states > kFew ? args.states * int64_t(sizeof(MergeState)) : 0;
}

// Makes the list of args.states states for a kernel. `memory` has list_bytes(args) bytes on the device.
StateList list_of(const MergeParams& args, const MergeState* states, void* memory, cudaStream_t stream) {
  StateList list{};
  MergeState* many = args.states > kFew ? static_cast<MergeState*>(memory) : nullptr;
  for (int64_t begin = 0; begin < args.states; begin += kFew) {
    const int64_t count = min(args.states - begin, kFew);
    for (int64_t n = 0; n < count; n++) list.few[n] = states[begin + n];
    if (!many) continue;
    write_states<<<1, count, 0, stream>>>(list, many + begin);
    check("merge, list of states", cudaGetLastError());
  }
  list.many = many;
  return list;
}

// Whether every tensor of the merge, or of its backward, can be accessed in chunks of 16 bytes.
bool all_aligned(const MergeParams& args, const MergeState* states, const MergeState& one) {
  const auto aligned = [&](const Tensor4& x) {
    return !x.data || rows_aligned(x, args.batch, args.heads, args.rows, args.dim, chunk_elements(args.dtype));
  };
  for (int64_t n = 0; n < args.states; n++)
    if (!aligned(states[n].out)) return false;
  return aligned(one.out);
}

// Calls launch(grid, block) for rows of dim elements, of which a thread owns width at a time.
template <class Launch> void for_rows(int64_t rows, int64_t dim, int64_t width, int64_t teams, Launch&& launch) {
  const int64_t needed = (dim + width - 1) / width;
  int64_t lanes = 1;
  while (lanes < needed && lanes < kWarp) lanes *= 2;
  const int64_t rows_per_block = kThreads / lanes / teams;
  const int64_t blocks = checked_product("out", "tiles of rows", {(rows + rows_per_block - 1) / rows_per_block});
  if (blocks == 0) return;
  launch(dim3(blocks), dim3(lanes, rows_per_block, teams));
  check("merge", cudaGetLastError());
}

}  // namespace

int64_t merge_scratch(const MergeParams& args) { return list_bytes(args); }

void merge(const MergeParams& args, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const StateList states = list_of(args, args.inputs, scratch, s);
  const bool aligned = all_aligned(args, args.inputs, args.output);
  for_dtype("outs[0]", args.dtype, [&](auto element) {
    using States = GivenStates<decltype(element)>;
    for_rows(args.batch * args.heads * args.rows, args.dim, States::width, States::teams,
             [&](dim3 grid, dim3 block) { merge_kernel<<<grid, block, 0, s>>>(States{args, states, aligned}); });
  });
}

void merge_splits(const AttentionParams& args, const Splits& splits, cudaStream_t stream) {
  for_dtype("query", args.dtype, [&](auto element) {
    using States = SplitStates<decltype(element)>;
    const bool aligned =
        rows_aligned(args.out, args.batch(), args.heads_q, args.rows_q, args.head_dim_v, States::width);
    for_rows(splits.rows, args.head_dim_v, States::width, States::teams,
             [&](dim3 grid, dim3 block) { merge_kernel<<<grid, block, 0, stream>>>(States{args, splits, aligned}); });
  });
}

int64_t merge_backward_scratch(const MergeBackwardParams& args) { return 2 * list_bytes(args.forward); }

void merge_backward(const MergeBackwardParams& args, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const MergeParams& forward = args.forward;
  const StateList states = list_of(forward, forward.inputs, scratch, s);
  const StateList grads = list_of(forward, args.grad_inputs, static_cast<char*>(scratch) + list_bytes(forward), s);
  const bool aligned = all_aligned(forward, forward.inputs, args.grad_output) &&
                       all_aligned(forward, args.grad_inputs, args.grad_output);
  for_dtype("outs[0]", forward.dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(forward.batch * forward.heads * forward.rows, forward.dim, Row<T>::width, 1, [&](dim3 grid, dim3 block) {
      merge_backward_kernel<T><<<grid, block, 0, s>>>(args, states, grads, aligned);
    });
  });
}

}  // namespace flashsoftmax::cuda
