// Chooses the kernel for attention: decode for few queries, the tiled forward for others.
#include "map.h"
#include "sm80/launch.h"

namespace flashsoftmax::cuda {

int64_t attention_scratch(const AttentionParams& args) {
  return map_bytes(args) + (args.seqlen_q <= kDecodeQueries ? sm80::decode_scratch(args) : 0);
}

void attention(const AttentionParams& args, void* scratch, void* stream) {
  if (args.block_table && args.seqlen_k > UINT32_MAX)
    throw std::invalid_argument("block_table: more than 2^32 keys, wanted fewer on CUDA");
  const auto launch = args.seqlen_q <= kDecodeQueries
                          ? sm80::pick(sm80::decode<64>, sm80::decode<128>, sm80::decode<256>, args)
                          : sm80::pick(sm80::forward<64>, sm80::forward<128>, sm80::forward<256>, args);
  const auto s = static_cast<cudaStream_t>(stream);
  launch(with_map(args, scratch, s), static_cast<char*>(scratch) + map_bytes(args), s);
}

}  // namespace flashsoftmax::cuda
