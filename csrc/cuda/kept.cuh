// Which weights of a fragment are kept. One call of the generator gives the words of four keys of a query, and the lanes
// that hold these four weights and their neighbours share their calls out.
#pragma once

#include "tile.cuh"

namespace flashsoftmax::cuda {

// Bit 4 * c + n of the result tells whether element x[c][n] of a strip is kept. Rows are queries from i0 on and columns
// are keys from j0 on or, if kRowsAreKeys, the other way round. j0 is a multiple of 8.
template <int kColumns, bool kRowsAreKeys>
__device__ __forceinline__ uint32_t kept_in_strip(const KeptWeights& kept, int64_t i0, int64_t j0) {
  static_assert(kColumns <= 8);
  const uint32_t row = lane_id() / 4, column = lane_id() % 4 * 2, i = uint32_t(i0), j = uint32_t(j0);
  uint32_t found = 0;
#pragma unroll 1
  for (int c = 0; c < kColumns; c++) {
    uint32_t elements = 0;
    if constexpr (kRowsAreKeys) {
      // Four lanes hold keys 4 * m to 4 * m + 3 of the same four places n = 2 * h + e. Lane n of them calls for place n.
      const uint32_t n = row % 4;
      const uint32_t bits = kept.bits(i + 8 * c + column + n % 2, j + n / 2 * 8 + row / 4 * 4);
#pragma unroll
      for (int place = 0; place < 4; place++)
        elements |= (__shfl_sync(~0u, bits, (lane_id() & ~12) | place << 2) >> n & 1) << place;
    } else {
      // Two lanes hold keys 4 * m to 4 * m + 3 of two rows. Lane h of them calls for row h.
      const uint32_t h = lane_id() % 2;
      const uint32_t bits = kept.bits(i + row + 8 * h, j + 8 * c + column / 4 * 4);
      const uint32_t others = __shfl_xor_sync(~0u, bits, 1);
      elements = ((h == 0 ? bits : others) >> 2 * h & 3) | ((h == 0 ? others : bits) >> 2 * h & 3) << 2;
    }
    found |= elements << 4 * c;
  }
  return found;
}

// Multiplies the elements of a strip by scale if they are kept, else replaces them by 0.
template <int kColumns>
__device__ __forceinline__ void keep(float (&x)[kColumns][4], uint32_t kept, float scale) {
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int n = 0; n < 4; n++) x[c][n] = kept >> (4 * c + n) & 1 ? x[c][n] * scale : 0;
}

// The same for an operand of 16-bit elements, where scale is 1.
template <int kColumns> __device__ __forceinline__ void keep(uint32_t (&x)[kColumns][2], uint32_t kept, float) {
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t pair = kept >> (4 * c + 2 * h);
      x[c][h] &= (pair & 1 ? 0xffff : 0) | (pair & 2 ? 0xffff0000 : 0);
    }
}

// Drops weights: rows are queries from i0 on, columns keys from j0 on.
template <class T, int kStrips, int kColumns>
__device__ __forceinline__ void drop(Operand<T, kStrips, kColumns>& p, const KeptWeights& kept, int64_t i0,
                                     int64_t j0) {
#pragma unroll
  for (int r = 0; r < kStrips; r++) keep(p.x[r], kept_in_strip<kColumns, false>(kept, i0 + 16 * r, j0), 1);
}

}  // namespace flashsoftmax::cuda
