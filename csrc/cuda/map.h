// The map of a mask, made before the kernels.
#pragma once

#include "launch.h"

namespace flashsoftmax::cuda {

// The parameters with the map of their mask, which is made in `memory`, map_bytes(args) bytes. The bits of the map take
// the place of a bool mask.
AttentionParams with_map(AttentionParams args, void* memory, cudaStream_t stream);

}  // namespace flashsoftmax::cuda
