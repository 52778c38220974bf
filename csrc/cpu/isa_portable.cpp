#include "standard.h"

#define FLASHSOFTMAX_ISA portable
#define FLASHSOFTMAX_ISA_NAME "portable"
#define FLASHSOFTMAX_VECTOR_BYTES 16
#define FLASHSOFTMAX_TILE_ROWS 4
#define FLASHSOFTMAX_TILE_COLS 2

namespace flashsoftmax::portable {
static bool supported() { return true; }
}  // namespace flashsoftmax::portable

#include "kernels.inc"
