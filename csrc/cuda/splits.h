// The states that the splits of decode leave in scratch memory, and their merge.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace flashsoftmax::cuda {

// Splits are a multiple of this many keys, which every tile of decode divides.
constexpr int64_t kSplitStep = 128;
constexpr int64_t kMostSplit = 1 << 29;  // a kernel counts the keys of a split in 32 bits

// The scratch memory is
//     acc    [count][rows][width]  float, the weighted sums of values
//     states [count][rows]         float2, the m and l of a State
// where row = (sequence * heads_q + head) * seqlen_q + query. Every split writes the state of every row, and acc where l
// is not 0. Where there is one split it writes the result instead.
struct Splits {
  int64_t size, count, rows, width;
  float* acc;
  float2* states;

  Splits(const AttentionParams& p, void* scratch)
      : size((min(p.split_size, kMostSplit) + kSplitStep - 1) / kSplitStep * kSplitStep),
        count(max<int64_t>(1, (p.seqlen_k + size - 1) / size)),
        rows(p.sequences * p.heads_q * p.seqlen_q),
        width((p.head_dim_v + 3) / 4 * 4),
        acc(static_cast<float*>(scratch)),
        states(reinterpret_cast<float2*>(acc + count * rows * width)) {}

  // Of a row's state.
  FLASHSOFTMAX_INLINE int64_t at(const AttentionParams& p, int64_t split, int64_t b, int64_t h, int64_t i) const {
    return split * rows + (b * p.heads_q + h) * p.seqlen_q + i;
  }
  int64_t scratch_bytes() const {
    return count == 1 ? 0 : count * rows * (width * int64_t(sizeof(float)) + int64_t(sizeof(float2)));
  }
};

// Writes out and lse of p, split after split.
void merge_splits(const AttentionParams& p, const Splits& splits, cudaStream_t stream);

}  // namespace flashsoftmax::cuda
