// Split-KV decode computes attention over each split of the keys on its own. Here is how the splits are cut, the states
// that they leave in scratch memory, and the kernel that merges those.
#pragma once

#include "launch.h"

namespace flashsoftmax::cuda {

// The keys of a split are a multiple of this, and this is a multiple of the keys of any tile of decode.
constexpr int64_t kSplitStep = 128;
constexpr int64_t kMaxSplit = 1 << 29;  // the kernel counts the keys of a split in 32 bits

// The scratch memory is
//     acc    [count][rows][width]  float, the weighted sums of values
//     states [count][rows]         float2, the m and l of a State
// where row = (sequence * heads_q + head) * seqlen_q + query. Each split writes the state of every row, and acc where l
// is not 0. A single split writes the result instead.
struct Splits {
  int64_t size;   // keys per split
  int64_t count;  // of splits
  int64_t rows, width;
  int64_t bytes;  // of scratch memory
  float* acc;
  float2* states;

  Splits(const AttentionParams& args, void* scratch)
      : size((min(args.split_size, kMaxSplit) + kSplitStep - 1) / kSplitStep * kSplitStep),
        count(max<int64_t>(1, (args.seqlen_k + size - 1) / size)),
        rows(checked_product("query", "rows", {args.sequences, args.heads_q, args.seqlen_q}, INT64_MAX)),
        width((args.head_dim_v + 3) / 4 * 4),
        bytes(count == 1 ? 0
                         : checked_product("key", "bytes of scratch memory for splits",
                                           {count, rows, width * int64_t(sizeof(float)) + int64_t(sizeof(float2))},
                                           INT64_MAX)),
        acc(static_cast<float*>(scratch)),
        states(reinterpret_cast<float2*>(acc + count * rows * width)) {}

  // The index of a state.
  FLASHSOFTMAX_INLINE int64_t at(const AttentionParams& args, int64_t split, int64_t b, int64_t h, int64_t i) const {
    return split * rows + (b * args.heads_q + h) * args.seqlen_q + i;
  }
};

// Writes out and lse from the states of the splits.
void merge_splits(const AttentionParams& args, const Splits& splits, cudaStream_t stream);

}  // namespace flashsoftmax::cuda
