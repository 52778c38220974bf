// Every launcher.
#pragma once

#include <functional>

#include "params.h"

namespace flashsoftmax {

// Queries up to this many take the decode kernel, whose keys are split over tasks.
constexpr int64_t kDecodeQueries = 16;
constexpr int64_t kMaxHeadDim = 256;

// Keys a split where the caller does not say: enough that a task is worth its merge. It depends on the number of
// queries alone, so that a row has the same bits whatever runs beside it.
FLASHSOFTMAX_INLINE int64_t default_split_size(int64_t seqlen_q) { return max<int64_t>(1024, 16 * seqlen_q); }

// Runs task(worker, index) for each index in [0, count), taken in order. Workers are numbered from 0 to workers - 1.
struct Runner {
  int64_t workers;
  std::function<void(int64_t count, const std::function<void(int64_t worker, int64_t index)>& task)> run;
};

// The CPU kernels for one instruction set. A kernel works in scratch memory, whose bytes it tells beforehand.
struct CpuKernels {
  const char* name;
  bool (*supported)();
  int64_t (*attention_scratch)(const AttentionParams&, int64_t workers);
  void (*attention)(const AttentionParams&, void* scratch, const Runner&);
  int64_t (*attention_grad_scratch)(const AttentionGradParams&, int64_t workers);
  void (*attention_grad)(const AttentionGradParams&, void* scratch, const Runner&);
  void (*merge)(const MergeParams&, const Runner&);
  void (*merge_grad)(const MergeGradParams&, const Runner&);
};

// The best that this processor has; FLASHSOFTMAX_CPU_ISA names a lower one.
const CpuKernels& cpu_kernels();

// The CUDA kernels. They run in the order of the stream, a cudaStream_t, on the current device; scratch is memory
// there.
namespace cuda {
int64_t attention_scratch(const AttentionParams&);
void attention(const AttentionParams&, void* scratch, void* stream);
int64_t attention_grad_scratch(const AttentionGradParams&);
void attention_grad(const AttentionGradParams&, void* scratch, void* stream);
int64_t merge_scratch(const MergeParams&);
void merge(const MergeParams&, void* scratch, void* stream);
int64_t merge_grad_scratch(const MergeGradParams&);
void merge_grad(const MergeGradParams&, void* scratch, void* stream);
bool is_capturing(void* stream);
}  // namespace cuda

}  // namespace flashsoftmax
