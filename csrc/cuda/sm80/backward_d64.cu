#include "backward.cuh"

namespace flashsoftmax::cuda::sm80 {
template void backward<64>(const AttentionBackwardParams&, void*, cudaStream_t);
}
