#include "decode.cuh"

namespace flashsoftmax::cuda::sm80 {

int64_t decode_scratch(const AttentionParams& p) { return Splits(p, nullptr).scratch_bytes(); }

template void decode<64>(const AttentionParams&, void* scratch, cudaStream_t);

}  // namespace flashsoftmax::cuda::sm80
