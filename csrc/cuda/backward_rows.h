// What the backward needs of each row of queries, computed once before the gradients.
#pragma once

#include "../params.h"

namespace flashsoftmax::cuda {

// In scratch memory, [batch][heads_q][rows_q]. A row that sees no key has lse = -inf and delta = 0, and takes no part.
struct alignas(16) BackwardRow {
  float lse, lse_error;  // lse_error is in the units of ExpFor: for 16-bit types it comes times log2 e
  float delta;           // rowsum(dO * O) - dlse
  float padding = 0;     // a row is copied in 16 bytes
};

}  // namespace flashsoftmax::cuda
