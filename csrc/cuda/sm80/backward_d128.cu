#include "backward.cuh"

namespace flashsoftmax::cuda::sm80 {
template void backward<128>(const AttentionBackwardParams&, void*, cudaStream_t);
}
