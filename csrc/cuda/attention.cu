// The choice of the kernel for attention.
#include "sm80/launch.h"

namespace flashsoftmax::cuda {

int64_t attention_scratch(const AttentionParams& p) {
  return p.seqlen_q <= kDecodeQueries ? sm80::decode_scratch(p) : 0;
}

void attention(const AttentionParams& p, void* scratch, void* stream) {
  if (p.block_table && p.seqlen_k > UINT32_MAX)
    throw std::invalid_argument("block_table: more than 2^32 keys, wanted fewer on CUDA");
  const auto launch = p.seqlen_q <= kDecodeQueries
                          ? sm80::pick(sm80::decode<64>, sm80::decode<128>, sm80::decode<256>, p)
                          : sm80::pick(sm80::forward<64>, sm80::forward<128>, sm80::forward<256>, p);
  launch(p, scratch, static_cast<cudaStream_t>(stream));
}

}  // namespace flashsoftmax::cuda
