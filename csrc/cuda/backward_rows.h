// What the backward needs of each row of queries, computed once before the gradients.
#pragma once

#include "../params.h"

namespace flashsoftmax::cuda {

// In scratch memory, [batch][heads_q][rows_q]. A row that sees no key has lse = -inf and delta = 0, and takes no part.
struct alignas(8) BackwardRow {
  float lse, delta;  // delta = rowsum(dO * O) - dlse
};

}  // namespace flashsoftmax::cuda
