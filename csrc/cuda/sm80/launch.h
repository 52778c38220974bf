// The launchers of the sm_80 kernels, for head dims up to 64, 128 and 256, and what those kernels have in common.
#pragma once

#include "../launch.h"
#include "../splits.h"

namespace flashsoftmax::cuda::sm80 {

// kHeadDim is at least head_dim and head_dim_v.
template <int kHeadDim> void forward(const AttentionParams&, void* scratch, cudaStream_t);
template <int kHeadDim> void decode(const AttentionParams&, void* scratch, cudaStream_t);
template <int kHeadDim> void backward(const AttentionBackwardParams&, void* scratch, cudaStream_t);

inline int64_t decode_scratch(const AttentionParams& args) { return Splits(args, nullptr).bytes; }

// Picks the launcher for these head dims: pick(forward<64>, forward<128>, forward<256>, args).
template <class Launcher>
Launcher pick(Launcher of_64, Launcher of_128, Launcher of_256, const AttentionParams& args) {
  const int64_t dim = max(args.head_dim, args.head_dim_v);
  return dim <= 64 ? of_64 : dim <= 128 ? of_128 : of_256;
}

// Which tensors have rows that can be accessed in 16-byte chunks.
struct Alignment {
  bool query, key, value, out;

  explicit Alignment(const AttentionParams& args)
      : query(q_rows(args, args.query, args.head_dim)),
        key(kv_rows(args, args.key, args.head_dim)),
        value(kv_rows(args, args.value, args.head_dim_v)),
        out(q_rows(args, args.out, args.head_dim_v)) {}

  // The same for another tensor that has the rows of query, or of key and value.
  static bool q_rows(const AttentionParams& args, const Tensor4& x, int64_t dim) {
    return rows_aligned(x, args.batch(), args.heads_q, args.rows_q, dim, chunk_elements(args.dtype));
  }
  static bool kv_rows(const AttentionParams& args, const Tensor4& x, int64_t dim) {
    const int64_t batch = args.block_table ? args.pages : args.batch();
    return rows_aligned(x, batch, args.heads_kv, args.rows_k, dim, chunk_elements(args.dtype));
  }
};

}  // namespace flashsoftmax::cuda::sm80
