#include "forward.cuh"

namespace flashsoftmax::cuda::sm80 {
template void forward<256>(const AttentionParams&, void*, cudaStream_t);
}
