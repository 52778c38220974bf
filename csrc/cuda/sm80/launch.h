// The kernels' launchers for head dims up to 64, 128 and 256, and what they have in common.
#pragma once

#include "../launch.h"

namespace flashsoftmax::cuda::sm80 {

// Of head_dim and head_dim_v the larger decides.
template <int kHeadDim> void forward(const AttentionParams&, void* scratch, cudaStream_t);
template <int kHeadDim> void decode(const AttentionParams&, void* scratch, cudaStream_t);
template <int kHeadDim> void backward(const AttentionGradParams&, void* scratch, cudaStream_t);
int64_t decode_scratch(const AttentionParams&);

// The launcher of a family for these head dims: pick(forward<64>, forward<128>, forward<256>, p).
template <class Launcher>
Launcher pick(Launcher of_64, Launcher of_128, Launcher of_256, const AttentionParams& p) {
  const int64_t dim = max(p.head_dim, p.head_dim_v);
  return dim <= 64 ? of_64 : dim <= 128 ? of_128 : of_256;
}

// What kernels of attention take.
struct Attention {
  AttentionParams p;
  bool query_packs, key_packs, value_packs;
  bool out_packs;  // and its rows end with 16 bytes

  explicit Attention(const AttentionParams& params) : p(params) {
    const int64_t width = pack_width(p.dtype), key_batch = p.block_table ? p.pages : p.batch();
    query_packs = rows_pack(p.query, p.batch(), p.heads_q, p.rows_q, width);
    key_packs = rows_pack(p.key, key_batch, p.heads_kv, p.rows_k, width);
    value_packs = rows_pack(p.value, key_batch, p.heads_kv, p.rows_k, width);
    out_packs = rows_pack(p.out, p.batch(), p.heads_q, p.rows_q, width) && p.head_dim_v % width == 0;
  }
};

}  // namespace flashsoftmax::cuda::sm80
