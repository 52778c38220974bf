#include "forward.cuh"

namespace flashsoftmax::cuda::sm80 {
template void forward<64>(const AttentionParams&, void*, cudaStream_t);
}
