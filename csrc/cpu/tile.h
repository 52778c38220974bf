// Tiles: rows of a tensor copied into aligned, zero-padded memory in the type of the sums, and the one micro-kernel
// that multiplies them. Only this file knows strides, pages and storage types.
#pragma once

#include "../params.h"
#include "vec.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// Registers of the micro-kernel: kRows x kCols vectors of sums.
constexpr int kRows = FLASHSOFTMAX_TILE_ROWS, kCols = FLASHSOFTMAX_TILE_COLS;
template <class A> constexpr int kGroup = kCols * Vec<A>::lanes;  // elements across the micro-kernel

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// The rows of one head of one sequence, contiguous in memory, strided or paged.
template <class T> struct Rows {
  const T* data;
  int64_t row, dim;
  IntVector pages{};
  int64_t page_size = 0, page = 0;

  INLINE const T* operator[](int64_t j) const {
    if (!pages) return data + j * row;
    return data + pages[j / page_size] * page + j % page_size * row;
  }
};

template <class T> INLINE T* at(const Tensor4& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<T*>(x.data) + x.offset(b, h, i);
}
template <class T> INLINE Rows<T> query_rows(const Tensor4& x, const Sequence& s, int64_t h) {
  return {at<T>(x, s.q_batch, h, s.q_row), x.row, x.dim};
}
template <class T> INLINE Rows<T> key_rows(const AttentionParams& p, const Tensor4& x, const Sequence& s, int64_t b, int64_t h) {
  if (p.block_table)
    return {at<T>(x, 0, h, 0), x.row, x.dim, p.block_table.advanced(b * p.block_table_row), p.page_size, x.batch};
  return {at<T>(x, s.k_batch, h, s.k_row), x.row, x.dim};
}

// A row of T as sums' type, 0 in [count, padded).
template <class T, class A> INLINE void widen(const T* from, int64_t stride, int64_t count, int64_t padded, A* to) {
  constexpr int lanes = Vec<A>::lanes;
  int64_t d = 0;
  if constexpr (std::is_same_v<A, Accumulate<T>> && !std::is_same_v<T, bool>) {
    if (stride == 1)
      for (; d + lanes <= count; d += lanes) store(load(from + d), to + d);
  }
  for (; d < count; d++) to[d] = A(to_float(from[d * stride]));
  for (; d < padded; d++) to[d] = A(0);
}

// Rows [begin, begin + count) to tile[padded_rows][width], 0 where there is none.
template <class T, class A>
void pack(const Rows<T>& rows, int64_t begin, int64_t count, int64_t padded_rows, int64_t dims, int64_t width, A* tile) {
  for (int64_t j = 0; j < count; j++) widen(rows[begin + j], rows.dim, dims, width, tile + j * width);
  std::memset(static_cast<void*>(tile + count * width), 0, (padded_rows - count) * width * sizeof(A));
}

// from[rows][from_width] -> to[cols][to_width], rows and cols multiples of the lanes.
template <class A>
void transpose(const A* from, int64_t from_width, int64_t rows, int64_t cols, A* to, int64_t to_width) {
  constexpr int lanes = Vec<A>::lanes;
  for (int64_t i = 0; i < rows; i += lanes)
    for (int64_t j = 0; j < cols; j += lanes) {
      Vec<A> block[lanes];
      for (int r = 0; r < lanes; r++) block[r] = Vec<A>::load(from + (i + r) * from_width + j);
      transpose(block);
      for (int r = 0; r < lanes; r++) block[r].store(to + (j + r) * to_width + i);
    }
}

// One row of sums to T.
template <class T> INLINE void narrow(const Accumulate<T>* from, Accumulate<T> factor, int64_t count, T* to, int64_t stride) {
  using V = Vec<Accumulate<T>>;
  int64_t d = 0;
  if (stride == 1)
    for (; d + V::lanes <= count; d += V::lanes) store(V::load(from + d) * V(factor), to + d);
  for (; d < count; d++) to[d * stride] = from_float<T>(from[d] * factor);
}

// NaN and infinity become 0. Where such a key or query counts, its score is not finite and neither is the gradient of the
// score; where it is hidden, the gradient of the score is 0 and must not meet it.
template <class A> void make_finite(const A* from, int64_t count, A* to) {
  for (int64_t d = 0; d < count; d += Vec<A>::lanes) {
    Vec<A> x = Vec<A>::load(from + d);
    select(x - x == Vec<A>(0), x, Vec<A>(0)).store(to + d);
  }
}

// a[m][k] lies at a[m * row + k * step].
template <class A> struct Operand {
  const A* data;
  int64_t row, step;
};

// The product of a [rows][depth] and b [depth][cols] in pieces of kRows x kCols vectors. finish(row, col, c, sums) takes the
// sums of columns col + c * lanes and on, c being a constant. rows is rounded up to kRows, cols to kGroup: a and b must be
// readable there.
template <class A, class Finish>
INLINE void multiply(Operand<A> a, const A* b, int64_t b_width, int64_t rows, int64_t cols, int64_t depth, Finish&& finish) {
  using V = Vec<A>;
  for (int64_t col = 0; col < cols; col += kGroup<A>)
    for (int64_t row = 0; row < rows; row += kRows) {
      V sums[kRows * kCols];
      unroll<kRows * kCols>([&](auto i) { sums[i] = V(A(0)); });
      const A* a_k = a.data + row * a.row;
      const A* b_k = b + col;
      for (int64_t k = 0; k < depth; k++, a_k += a.step, b_k += b_width) {
        V b_reg[kCols];
        unroll<kCols>([&](auto c) { b_reg[c] = V::load(b_k + c * V::lanes); });
        unroll<kRows>([&](auto r) {
          V a_reg(a_k[r * a.row]);
          unroll<kCols>([&](auto c) { sums[r * kCols + c] = sums[r * kCols + c] + a_reg * b_reg[c]; });
        });
      }
      unroll<kRows>([&](auto r) {
        unroll<kCols>([&](auto c) { finish(row + r, col, c, sums[r * kCols + c]); });
      });
    }
}

// Hands out aligned pieces of a worker's scratch memory; with no memory it only counts.
class Arena {
 public:
  explicit Arena(void* begin) : next_(static_cast<char*>(begin)) {}
  template <class A> A* take(int64_t count) {
    A* piece = reinterpret_cast<A*>(next_);
    next_ += round_up(count * sizeof(A), 64);
    return piece;
  }
  int64_t used(const void* begin) const { return next_ - static_cast<const char*>(begin); }

 private:
  char* next_;
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
