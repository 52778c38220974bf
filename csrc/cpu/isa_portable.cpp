// The kernels for the compiler's default target, in vectors of 16 bytes.
#include "standard.h"

#define FLASHSOFTMAX_ISA portable
#define FLASHSOFTMAX_ISA_NAME "portable"
#define FLASHSOFTMAX_VECTOR_BYTES 16
#define FLASHSOFTMAX_BLOCK_ROWS 4
#define FLASHSOFTMAX_BLOCK_COLS 2

namespace flashsoftmax::portable {
static bool supported() { return true; }
}  // namespace flashsoftmax::portable

#include "kernels.inc"
