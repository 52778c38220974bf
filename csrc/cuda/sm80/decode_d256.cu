#include "decode.cuh"

namespace flashsoftmax::cuda::sm80 {
template void decode<256>(const AttentionParams&, void*, cudaStream_t);
}
