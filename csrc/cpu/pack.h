// Packing: rows of a tensor are copied into tiles, which are aligned, zero-padded and of the type that products
// multiply; sums are copied back. The kernels see strides, pages and storage types through this file only.
#pragma once

#include <algorithm>
#include <cstring>

#include "../params.h"
#include "convert.h"
#include "scratch.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// The rows of one head of one sequence: contiguous, strided or paged.
template <class T> struct Rows {
  const T* data;
  int64_t row_stride, dim_stride;
  IntVector pages{};
  int64_t page_size = 0, page_stride = 0;
  int64_t first_seen = 0;  // no query sees an earlier row; its page may be gone, so this row is read in its place
  int64_t first_row = 0;   // where row 0 lies in the pages

  INLINE const T* operator[](int64_t j) const {
    if (!pages) return data + j * row_stride;
    j = max(j, first_seen) + first_row;
    return data + pages[j / page_size] * page_stride + j % page_size * row_stride;
  }
};

template <class T> INLINE T* at(const Tensor4& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<T*>(x.data) + x.offset(b, h, i);
}
template <class T> INLINE Rows<T> query_rows(const Tensor4& x, const Sequence& s, int64_t h) {
  return {at<T>(x, s.q_batch, h, s.q_row), x.row, x.dim};
}
template <class T> INLINE Rows<T> key_rows(const AttentionParams& p, const Tensor4& x, const Sequence& s, int64_t b,
                                           int64_t h) {
  if (p.block_table)
    return {at<T>(x, 0, h, 0), x.row,   x.dim,           p.block_table.advanced(b * p.block_table_row),
            p.page_size,       x.batch, s.band.first(0), s.first_key};
  return {at<T>(x, s.k_batch, h, s.k_row), x.row, x.dim};
}

// Copies dims elements of one row to `to`, and zeros up to padded.
template <class T, class A> INLINE void widen(const T* from, int64_t dim_stride, int64_t dims, int64_t padded, A* to) {
  constexpr int lanes = Vec<A>::lanes;
  int64_t d = 0;
  if constexpr (std::is_same_v<A, Accumulate<T>>) {
    if (dim_stride == 1)
      for (; d + lanes <= dims; d += lanes) store(load(from + d), to + d);
  }
  for (; d < dims; d++) {
    if constexpr (std::is_same_v<T, double> && std::is_same_v<A, float>)
      to[d] = bias_of(from[d * dim_stride]);  // only masks have another type than the rows of query and key
    else
      to[d] = A(to_float(from[d * dim_stride]));
  }
  for (; d < padded; d++) to[d] = A(0);
}
INLINE void widen(const bf16* from, int64_t dim_stride, int64_t dims, int64_t padded, bf16x2* to) {
  bf16* elements = &to->low;
  if (dim_stride == 1)
    std::memcpy(elements, from, dims * sizeof(bf16));
  else
    for (int64_t d = 0; d < dims; d++) elements[d] = from[d * dim_stride];
  std::memset(elements + dims, 0, (2 * padded - dims) * sizeof(bf16));
}

// The inverse: writes one row of sums, each times factor, as T.
template <class T> INLINE void narrow(const Accumulate<T>* from, Accumulate<T> factor, int64_t dims, T* to,
                                      int64_t dim_stride) {
  using V = Vec<Accumulate<T>>;
  int64_t d = 0;
  if (dim_stride == 1)
    for (; d + V::lanes <= dims; d += V::lanes) store(V::load(from + d) * V(factor), to + d);
  for (; d < dims; d++) to[d * dim_stride] = from_float<T>(from[d] * factor);
}

// Packs rows [begin, begin + count) into tile [padded_rows][stride], for products that sum along the rows. Rows from
// count on are 0.
template <class T, class E>
void pack(const Rows<T>& rows, int64_t begin, int64_t count, int64_t padded_rows, int64_t dims, int64_t stride,
          E* tile) {
  for (int64_t j = 0; j < count; j++) widen(rows[begin + j], rows.dim_stride, dims, stride, tile + j * stride);
  std::memset(static_cast<void*>(tile + count * stride), 0, (padded_rows - count) * stride * sizeof(E));
}

// The same, but returns the rows themselves where they already lie as they would in the tile.
template <class T, class E>
const E* pack_or_view(const Rows<T>& rows, int64_t begin, int64_t count, int64_t padded_rows, int64_t dims,
                      int64_t stride, E* tile) {
  constexpr bool same = sizeof(E) == kDepth<E> * sizeof(T);
  if (same && !rows.pages && count == padded_rows && rows.dim_stride == 1 && rows.row_stride == dims &&
      dims == stride * kDepth<E>)
    return reinterpret_cast<const E*>(rows[begin]);
  pack(rows, begin, count, padded_rows, dims, stride, tile);
  return tile;
}

// Packs rows [begin, begin + count) into tile [ceil(count / kDepth)][stride], for products that sum across the rows: a
// pair holds an element of one row and the element below it.
template <class T, class A>
void pack_across(const Rows<T>& rows, int64_t begin, int64_t count, int64_t dims, int64_t stride, A* tile) {
  pack(rows, begin, count, count, dims, stride, tile);
}
template <class T>
void pack_across(const Rows<T>& rows, int64_t begin, int64_t count, int64_t dims, int64_t stride, bf16x2* tile) {
  for (int64_t j = 0; j < count; j += 2) {
    bf16x2* to = tile + j / 2 * stride;
    const T* low = rows[begin + j];
    const T* high = j + 1 < count ? rows[begin + j + 1] : nullptr;
    if (rows.dim_stride == 1 && high)  // a loop that GCC vectorizes
      for (int64_t d = 0; d < dims; d++) to[d] = {low[d], high[d]};
    else
      for (int64_t d = 0; d < dims; d++) to[d] = {low[d * rows.dim_stride], high ? high[d * rows.dim_stride] : bf16{0}};
    std::memset(static_cast<void*>(to + dims), 0, (stride - dims) * sizeof(bf16x2));
  }
}
template <class T, class E>
const E* pack_across_or_view(const Rows<T>& rows, int64_t begin, int64_t count, int64_t dims, int64_t stride, E* tile) {
  if constexpr (kDepth<E> == 1) return pack_or_view(rows, begin, count, count, dims, stride, tile);
  pack_across(rows, begin, count, dims, stride, tile);
  return tile;
}

// from [rows][from_stride] to to [cols][to_stride]. rows and cols are multiples of the vector's lanes.
template <class E>
void transpose(const E* from, int64_t from_stride, int64_t rows, int64_t cols, E* to, int64_t to_stride) {
  using V = Vec<std::conditional_t<sizeof(E) == 8, double, float>>;  // any type of E's size: values are only moved
  for (int64_t i = 0; i < rows; i += V::lanes)
    for (int64_t j = 0; j < cols; j += V::lanes) {
      V block[V::lanes];
      for (int r = 0; r < V::lanes; r++) std::memcpy(&block[r], from + (i + r) * from_stride + j, sizeof(V));
      transpose(block);
      for (int r = 0; r < V::lanes; r++)
        std::memcpy(static_cast<void*>(to + (j + r) * to_stride + i), &block[r], sizeof(V));
    }
}

// Replaces NaN and infinity in a tile of keys or queries by 0, for products with dS. A visible one makes dS itself
// non-finite; for a hidden one dS is 0, and 0 * NaN must not reach the sum.
template <class A> void make_finite(A* tile, int64_t count) {
  for (int64_t d = 0; d < count; d += Vec<A>::lanes) {
    Vec<A> x = Vec<A>::load(tile + d);
    select(x - x == Vec<A>(0), x, Vec<A>(0)).store(tile + d);
  }
}
INLINE void make_finite(bf16x2* tile, int64_t count) {
  for (bf16* x = &tile->low; x != &tile[count].low; x++)
    if ((x->bits & 0x7f80) == 0x7f80) x->bits = 0;
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
