// Chooses the kernel for attention: decode for few queries, the tiled forward for others.
#include "map.h"
#include "sm80/launch.h"

namespace flashsoftmax::cuda {

int64_t attention_scratch(const AttentionParams& args) {
  const int64_t map = map_bytes(args);
  if (takes_both_kernels(args)) return map + sm80::decode_scratch(decode_part(args));
  return map + (takes_decode(args) ? sm80::decode_scratch(args) : 0);
}

void attention(const AttentionParams& args, void* scratch, void* stream) {
  if (args.block_table && args.seqlen_k > UINT32_MAX)
    throw std::invalid_argument("block_table: more than 2^32 keys, wanted fewer on CUDA");
  const auto s = static_cast<cudaStream_t>(stream);
  const AttentionParams mapped = with_map(args, scratch, s);
  void* rest = static_cast<char*>(scratch) + map_bytes(args);
  const auto decode = sm80::pick(sm80::decode<64>, sm80::decode<128>, sm80::decode<256>, args);
  const auto tiled = sm80::pick(sm80::forward<64>, sm80::forward<128>, sm80::forward<256>, args);
  if (takes_both_kernels(args)) {
    decode(decode_part(mapped), rest, s);
    tiled(tiled_part(mapped), rest, s);
  } else {
    (takes_decode(args) ? decode : tiled)(mapped, rest, s);
  }
}

}  // namespace flashsoftmax::cuda
