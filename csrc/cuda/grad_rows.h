// What the backward has to know of each row of queries.
#pragma once

#include "../params.h"

namespace flashsoftmax::cuda {

// In scratch memory [batch][heads_q][rows_q]. An empty row, which takes no part, has lse = -inf and delta = 0.
struct alignas(8) GradRow {
  float lse, delta;  // delta = rowsum(dO * O) - dlse
};

}  // namespace flashsoftmax::cuda
