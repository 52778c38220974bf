#include "decode.cuh"

namespace flashsoftmax::cuda::sm80 {

template void decode<256>(const AttentionParams&, void* scratch, cudaStream_t);

}  // namespace flashsoftmax::cuda::sm80
