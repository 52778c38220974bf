// The entry points of all kernels, and what their callers need to know: limits, the default split size, threads.
#pragma once

#include <functional>

#include "params.h"

namespace flashsoftmax {

// Queries up to this many take the decode kernel, whose keys are split over tasks.
constexpr int64_t kDecodeQueries = 16;
constexpr int64_t kMaxHeadDim = 256;

// The keys per split if the caller gives none: enough that a split is worth its merge. It depends on seqlen_q alone, so
// the bits of a row do not depend on batch, heads or threads.
FLASHSOFTMAX_INLINE int64_t default_split_size(int64_t seqlen_q) { return max<int64_t>(1024, 16 * seqlen_q); }

// In varlen over pages each sequence takes the kernel that its own length asks for, so a step of a server, with some
// sequences in prefill and others in decode, is one call. Both kernels run, and each leaves out what the other takes.
FLASHSOFTMAX_INLINE bool takes_both_kernels(const AttentionParams& p) {
  return p.cu_seqlens_q && p.block_table && p.seqlen_q > kDecodeQueries;
}
FLASHSOFTMAX_INLINE AttentionParams decode_part(AttentionParams p) {
  p.seqlen_q = p.most_q_len = kDecodeQueries;
  p.split_size = p.decode_split_size;
  return p;
}
FLASHSOFTMAX_INLINE AttentionParams tiled_part(AttentionParams p) {
  p.least_q_len = kDecodeQueries + 1;
  return p;
}

// Runs task(worker, index) for each index in [0, count), taken in order. Workers are numbered from 0 to workers - 1.
struct Runner {
  int64_t workers;
  std::function<void(int64_t count, const std::function<void(int64_t worker, int64_t index)>& task)> run;
};

// The CPU kernels for one instruction set. *_scratch returns the bytes of scratch memory that a kernel needs.
struct CpuKernels {
  const char* name;
  bool (*supported)();
  int64_t (*attention_scratch)(const AttentionParams&, int64_t workers);
  void (*attention)(const AttentionParams&, void* scratch, const Runner&);
  int64_t (*attention_backward_scratch)(const AttentionBackwardParams&, int64_t workers);
  void (*attention_backward)(const AttentionBackwardParams&, void* scratch, const Runner&);
  void (*merge)(const MergeParams&, const Runner&);
  void (*merge_backward)(const MergeBackwardParams&, const Runner&);
  void (*copy_rows)(const CopyRowsParams&, const Runner&);
};

// The best instruction set of this processor, or the one that FLASHSOFTMAX_CPU_ISA names.
const CpuKernels& cpu_kernels();

// The CUDA kernels. They run in the order of the stream, a cudaStream_t, on the current device; scratch is memory
// there.
namespace cuda {
int64_t attention_scratch(const AttentionParams&);
void attention(const AttentionParams&, void* scratch, void* stream);
int64_t attention_backward_scratch(const AttentionBackwardParams&);
void attention_backward(const AttentionBackwardParams&, void* scratch, void* stream);
int64_t merge_scratch(const MergeParams&);
void merge(const MergeParams&, void* scratch, void* stream);
int64_t merge_backward_scratch(const MergeBackwardParams&);
void merge_backward(const MergeBackwardParams&, void* scratch, void* stream);
int64_t copy_rows_scratch(const CopyRowsParams&);
void copy_rows(const CopyRowsParams&, void* scratch, void* stream);
bool is_capturing(void* stream);
}  // namespace cuda

}  // namespace flashsoftmax
