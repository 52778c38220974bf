#include "backward.cuh"

namespace flashsoftmax::cuda::sm80 {
template void backward<256>(const AttentionBackwardParams&, void*, cudaStream_t);
}
