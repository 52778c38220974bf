// Tiles: rows of a tensor copied into aligned, zero-padded memory in the type of the sums, and the one micro-kernel
// that multiplies them. Only this file knows strides, pages and storage types.
#pragma once

#include "../params.h"
#include "vec.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// A block of sums that the micro-kernel keeps in registers: rows x cols vectors.
template <int rows_, int cols_> struct Block {
  static constexpr int rows = rows_, cols = cols_;
};
// With queries in the lanes.
template <class E> struct QueryBlock : Block<FLASHSOFTMAX_TILE_ROWS, FLASHSOFTMAX_TILE_COLS> {};
template <> struct QueryBlock<bf16x2> : Block<8, 3> {};
// With head_dim in the lanes.
template <class E> struct DimBlock : Block<FLASHSOFTMAX_TILE_ROWS, FLASHSOFTMAX_TILE_COLS> {};
template <> struct DimBlock<bf16x2> : Block<4, 4> {};
constexpr int kRows = 8;  // rows of every tile are padded to a multiple of this, so of the rows of every block

constexpr INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

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
template <class T> INLINE Rows<T> key_rows(const AttentionParams& p, const Tensor4& x, const Sequence& s, int64_t b,
                                           int64_t h) {
  if (p.block_table)
    return {at<T>(x, 0, h, 0), x.row, x.dim, p.block_table.advanced(b * p.block_table_row), p.page_size, x.batch};
  return {at<T>(x, s.k_batch, h, s.k_row), x.row, x.dim};
}

// A row of T for a product along the row, 0 in [count, padded).
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
INLINE void widen(const bf16* from, int64_t stride, int64_t count, int64_t padded, bf16x2* to) {
  bf16* elements = &to->low;
  if (stride == 1)
    std::memcpy(elements, from, count * sizeof(bf16));
  else
    for (int64_t d = 0; d < count; d++) elements[d] = from[d * stride];
  std::memset(elements + count, 0, (2 * padded - count) * sizeof(bf16));
}

// Rows [begin, begin + count) to tile[padded_rows][width], 0 where there is none. A product runs along the rows.
template <class T, class E>
void pack(const Rows<T>& rows, int64_t begin, int64_t count, int64_t padded_rows, int64_t dims, int64_t width,
          E* tile) {
  for (int64_t j = 0; j < count; j++) widen(rows[begin + j], rows.dim, dims, width, tile + j * width);
  std::memset(static_cast<void*>(tile + count * width), 0, (padded_rows - count) * width * sizeof(E));
}

// The same, but rows that already lie like this are used where they are.
template <class T, class E>
const E* packed(const Rows<T>& rows, int64_t begin, int64_t count, int64_t padded_rows, int64_t dims, int64_t width,
                E* tile) {
  constexpr bool same = sizeof(E) == kDepth<E> * sizeof(T);
  if (same && !rows.pages && count == padded_rows && rows.dim == 1 && rows.row == dims && dims == width * kDepth<E>)
    return reinterpret_cast<const E*>(rows[begin]);
  pack(rows, begin, count, padded_rows, dims, width, tile);
  return tile;
}

// Rows [begin, begin + count) to tile[ceil(count / kDepth)][width]. A product runs across the rows.
template <class T, class A>
void pack_across(const Rows<T>& rows, int64_t begin, int64_t count, int64_t dims, int64_t width, A* tile) {
  pack(rows, begin, count, count, dims, width, tile);
}
template <class T>
void pack_across(const Rows<T>& rows, int64_t begin, int64_t count, int64_t dims, int64_t width, bf16x2* tile) {
  for (int64_t j = 0; j < count; j += 2) {
    bf16x2* to = tile + j / 2 * width;
    const T* low = rows[begin + j];
    const T* high = j + 1 < count ? rows[begin + j + 1] : nullptr;
    if (rows.dim == 1 && high)  // GCC makes vectors of this
      for (int64_t d = 0; d < dims; d++) to[d] = {low[d], high[d]};
    else
      for (int64_t d = 0; d < dims; d++) to[d] = {low[d * rows.dim], high ? high[d * rows.dim] : bf16{0}};
    std::memset(static_cast<void*>(to + dims), 0, (width - dims) * sizeof(bf16x2));
  }
}
template <class T, class E>
const E* packed_across(const Rows<T>& rows, int64_t begin, int64_t count, int64_t dims, int64_t width, E* tile) {
  if constexpr (kDepth<E> == 1) return packed(rows, begin, count, count, dims, width, tile);
  pack_across(rows, begin, count, dims, width, tile);
  return tile;
}

// from[rows][from_width] -> to[cols][to_width], rows and cols multiples of the lanes.
template <class E>
void transpose(const E* from, int64_t from_width, int64_t rows, int64_t cols, E* to, int64_t to_width) {
  using V = Vec<std::conditional_t<sizeof(E) == 8, double, float>>;  // of E's size: only moved
  for (int64_t i = 0; i < rows; i += V::lanes)
    for (int64_t j = 0; j < cols; j += V::lanes) {
      V block[V::lanes];
      for (int r = 0; r < V::lanes; r++) std::memcpy(&block[r], from + (i + r) * from_width + j, sizeof(V));
      transpose(block);
      for (int r = 0; r < V::lanes; r++)
        std::memcpy(static_cast<void*>(to + (j + r) * to_width + i), &block[r], sizeof(V));
    }
}

// One row of sums to T.
template <class T> INLINE void narrow(const Accumulate<T>* from, Accumulate<T> factor, int64_t count, T* to,
                                      int64_t stride) {
  using V = Vec<Accumulate<T>>;
  int64_t d = 0;
  if (stride == 1)
    for (; d + V::lanes <= count; d += V::lanes) store(V::load(from + d) * V(factor), to + d);
  for (; d < count; d++) to[d * stride] = from_float<T>(from[d] * factor);
}

// NaN and infinity become 0. Where such a key or query counts, its score is not finite and neither is the gradient of
// the score; where it is hidden, the gradient of the score is 0 and must not meet it.
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

// a[m][k] lies at a[m * row + k * step].
template <class E> struct Operand {
  const E* data;
  int64_t row, step;
};

// What becomes of an element at of a matrix, and the sum that a product has for it, in vector c of a block.
struct Set {
  template <class V> INLINE V operator()(V, int, V sum) const { return sum; }
};
struct Add {
  template <class V> INLINE V operator()(V at, int, V sum) const { return at + sum; }
};

// Set, and the largest sums of each column.
template <class V, int cols> struct SetAndMax {
  V largest[cols];
  SetAndMax() {
    unroll<cols>([&](auto c) { largest[c] = V(kHidden); });
  }
  INLINE V operator()(V, int c, V sum) {
    largest[c] = max(largest[c], sum);
    return sum;
  }
};

// to [rows][to_width] becomes into(to, a b) for a [rows][depth] and b [depth][cols], a Block at a time; depth counts
// elements of E. rows and cols are rounded up to those of the block, and a and b must be readable there; no more than
// rows are written. Returns into as it then is.
template <class Block, class E, class Into>
HOT Into multiply_chain(Operand<E> a, const E* b, int64_t b_width, int64_t rows, int64_t cols, int64_t depth,
                        Accumulate<E>* to, int64_t to_width, Into into) {
  using V = Vec<Accumulate<E>>;
  using F = Factor<E>;
  constexpr int block_rows = Block::rows, block_cols = Block::cols;
  for (int64_t col = 0; col < cols; col += block_cols * V::lanes)
    for (int64_t row = 0; row < rows; row += block_rows) {
      V sums[block_rows * block_cols];
      unroll<block_rows * block_cols>([&](auto i) { sums[i] = V(0); });
      const E* a_k = a.data + row * a.row;
      const E* b_k = b + col;
      for (int64_t k = 0; k < depth; k++, a_k += a.step, b_k += b_width) {
        typename F::Vector b_reg[block_cols];
        unroll<block_cols>([&](auto c) { b_reg[c] = F::load(b_k + c * V::lanes); });
        unroll<block_rows>([&](auto r) {
          auto a_reg = F::splat(a_k[r * a.row]);
          unroll<block_cols>(
              [&](auto c) { sums[r * block_cols + c] = F::multiply_add(sums[r * block_cols + c], a_reg, b_reg[c]); });
        });
      }
      unroll<block_rows>([&](auto r) {
        if (row + r < rows)
          unroll<block_cols>([&](auto c) {
            Accumulate<E>* at = to + (row + r) * to_width + col + c * V::lanes;
            into(V::load(at), c, sums[r * block_cols + c]).store(at);
          });
      });
    }
  return into;
}

// Sums longer than this are made of partial sums: what is rounded off grows with the longest chain of additions.
constexpr int64_t kChain = 128;

// The same, in chains of bounded length.
template <class Block, class E, class Into>
void multiply(Operand<E> a, const E* b, int64_t b_width, int64_t rows, int64_t cols, int64_t depth, Accumulate<E>* to,
              int64_t to_width, Into into) {
  multiply_chain<Block>(a, b, b_width, rows, cols, min(depth, kChain), to, to_width, into);
  for (int64_t k = kChain; k < depth; k += kChain) {
    Operand<E> a_rest{a.data + k * a.step, a.row, a.step};
    multiply_chain<Block>(a_rest, b + k * b_width, b_width, rows, cols, min(depth - k, kChain), to, to_width, Add());
  }
}

// What a loop over rows will read so many rows later is fetched into the cache: memory is read faster than when each
// line is waited for. An array of pointers to rows goes on for kRowsAhead with the last one.
constexpr int64_t kFetch = 32, kRowsAhead = 64;

template <class T> INLINE void repeat_last(const T** pointers, int64_t n) {
  std::fill_n(pointers + n, kRowsAhead, pointers[n - 1]);
}
// The cache line of row[d], with a loop that takes count elements at a time. Short vectors have too many of these.
template <int count, class T> INLINE void fetch(const T* row, int64_t d) {
  constexpr int bytes = count * sizeof(T), line = 64;
  if (bytes >= line || (bytes >= line / 2 && d * sizeof(T) % line == 0)) __builtin_prefetch(row + d, 0, 2);
}

// s[r][j] = q[r] . k_rows[j] for rows of q [rows][q_width] and a vector of keys. head_dim lies in the lanes. The sums of
// rows x keys are in registers, a lane for each; in which order they are added depends on neither.
template <int rows, class T, class E>
HOT void dots(const T* const* k_rows, const E* q, int64_t q_width, int64_t dims, Accumulate<T>* s, int64_t s_width) {
  using V = Vec<Accumulate<T>>;
  using F = Factor<E>;
  constexpr int keys = V::lanes / rows;
  constexpr int lanes = V::lanes * kDepth<E>;  // elements of T
  for (int j = 0; j < V::lanes; j += keys) {
    const T *k[keys], *later[keys];
    unroll<keys>([&](auto i) { k[i] = k_rows[j + i], later[i] = k_rows[j + i + kFetch]; });
    V sums[V::lanes];
    unroll<V::lanes>([&](auto i) { sums[i] = V(0); });
    auto step = [&](int64_t d, auto... count) {  // of elements; none: all
      typename F::Vector k_reg[keys];
      unroll<keys>([&](auto i) { k_reg[i] = F::load(k[i] + d, count...), fetch<lanes>(later[i], d); });
      unroll<rows>([&](auto row) {
        auto q_reg = F::load(q + row * q_width + d / kDepth<E>);
        unroll<keys>([&](auto i) {
          constexpr int at = row() * keys + i();
          sums[at] = F::multiply_add(sums[at], q_reg, k_reg[i]);
        });
      });
    };
    int64_t d = 0;
    for (; d + lanes <= dims; d += lanes) step(d);
    if (d < dims) step(d, dims - d);
    V dot = sum_lanes(sums);
    unroll<rows>([&](auto row) { std::memcpy(s + row * s_width + j, &dot.v[row() * keys], keys * sizeof(dot.v[0])); });
  }
}

// Hands out aligned pieces of scratch memory.
class Arena {
 public:
  explicit Arena(void* begin) : next_(reinterpret_cast<uintptr_t>(begin)) {}
  template <class A> A* take(int64_t count) {
    A* piece = reinterpret_cast<A*>(next_);
    next_ += round_up(count * sizeof(A), 64);
    return piece;
  }

  // What take(arena) takes.
  template <class Take> static int64_t bytes_of(Take&& take) {
    Arena arena(nullptr);
    take(arena);
    return arena.next_;
  }

 private:
  uintptr_t next_;
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
