// Matrix products on packed tiles: `multiply`, the micro-kernel of the forward and the backward, and `dots`, the scores
// of a few queries straight from the keys in memory, for decode.
#pragma once

#include <algorithm>
#include <cstring>

#include "../mask.h"
#include "convert.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// Fma<E>: the multiply-add of packed elements E, sum + a * b. Operands are loaded from packed memory or from T.
template <class E> struct Fma {
  using Operand = Vec<E>;
  static INLINE Operand splat(E x) { return Operand(x); }
  template <class T> static INLINE Operand load(const T* p) { return ::flashsoftmax::FLASHSOFTMAX_ISA::load(p); }
  template <class T> static INLINE Operand load(const T* p, int64_t count) {
    return ::flashsoftmax::FLASHSOFTMAX_ISA::load(p, count);
  }
  // Elements from d on of kDepth rows, packed across them: a whole vector, or count elements.
  template <class T> static INLINE Operand load_across(const T* const* rows, int64_t d) { return load(rows[0] + d); }
  template <class T> static INLINE Operand load_across(const T* const* rows, int64_t d, int64_t count) {
    return load(rows[0] + d, count);
  }
  static INLINE void store_across(const Vec<E> (&rows)[1], E* p) { rows[0].store(p); }
  static INLINE void store(Vec<E> x, E* p) { x.store(p); }
  static INLINE Vec<E> multiply_add(Vec<E> sum, Operand a, Operand b) { return fma(a, b, sum); }
};
#ifdef FLASHSOFTMAX_BF16_PAIRS
template <> struct Fma<bf16x2> {
  using Operand = __m512i;
  static INLINE Operand splat(bf16x2 x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return _mm512_set1_epi32(bits);
  }
  static INLINE Operand load(const void* p) { return _mm512_loadu_si512(p); }
  static INLINE Operand load(const bf16* p, int64_t count) { return _mm512_maskz_loadu_epi16((1u << count) - 1, p); }
  static INLINE Operand load_across(const bf16* const* rows, int64_t d, int64_t count = 16) {
    const __mmask16 mask = (1u << count) - 1;
    Bits low = widen_halves(Halves(_mm256_maskz_loadu_epi16(mask, rows[0] + d)));
    Bits high = widen_halves(Halves(_mm256_maskz_loadu_epi16(mask, rows[1] + d)));
    return Operand(low | (high << 16));
  }
  static INLINE void store_across(const Vec<float> (&rows)[2], bf16x2* p) { store_pairs(rows[0], rows[1], p); }
  static INLINE void store(Vec<float> x, bf16x2* p) {
    const auto halves = _mm512_cvtneps_pbh(__m512(x.v));
    std::memcpy(p, &halves, sizeof(halves));
  }
  static INLINE Vec<float> multiply_add(Vec<float> sum, Operand a, Operand b) {
    return Vec<float>::Elements(_mm512_dpbf16_ps(__m512(sum.v), __m512bh(a), __m512bh(b)));
  }
};
#endif

// --- multiply ---

// The block of sums that multiply keeps in registers: rows x cols vectors.
template <int rows_, int cols_> struct Block {
  static constexpr int rows = rows_, cols = cols_;
};
// Where queries lie in the lanes.
template <class E> struct QueryBlock : Block<FLASHSOFTMAX_BLOCK_ROWS, FLASHSOFTMAX_BLOCK_COLS> {};
template <> struct QueryBlock<bf16x2> : Block<8, 3> {};
// Where head_dim lies in the lanes.
template <class E> struct DimBlock : Block<FLASHSOFTMAX_BLOCK_ROWS, FLASHSOFTMAX_BLOCK_COLS> {};
template <> struct DimBlock<bf16x2> : Block<4, 4> {};
constexpr int kRows = 8;  // the rows of a tile are padded to a multiple of this, and so of any block's rows

// The left operand: element (row, k) lies at data[row * row_stride + k * k_stride].
template <class E> struct Left {
  const E* data;
  int64_t row_stride, k_stride;
};

// Epilogues of multiply: the new value of an element from its old value, its vector's index in the block, and the
// product's sum.
struct Set {
  template <class V> INLINE V operator()(V, int, V sum) const { return sum; }
};
struct Add {
  template <class V> INLINE V operator()(V old, int, V sum) const { return old + sum; }
};
// Set, which also keeps the largest sum of each column. scaled: sums are multiplied by scale first.
template <class V, int cols, bool scaled> struct SetAndMax {
  V largest[cols];
  V scale;
  explicit SetAndMax(V scale = V(1)) : scale(scale) {
    unroll<cols>([&](auto c) { largest[c] = V(kHidden); });
  }
  INLINE V operator()(V, int c, V sum) {
    if constexpr (scaled) sum = sum * scale;
    largest[c] = max(largest[c], sum);
    return sum;
  }
};

// out [rows][out_stride] = epilogue(out, a b) for a [rows][depth] and b [depth][cols], one block at a time; each sum is
// one chain of additions. depth counts elements of E. rows and cols are rounded up to whole blocks, so a, b and the
// columns of out must reach that far; rows of out beyond `rows` are not written. Returns the epilogue, which may have
// gathered something.
template <class Block, class E, class Epilogue>
HOT Epilogue multiply_chain(Left<E> a, const E* b, int64_t b_stride, int64_t rows, int64_t cols, int64_t depth,
                            Accumulate<E>* out, int64_t out_stride, Epilogue epilogue) {
  using V = Vec<Accumulate<E>>;
  using F = Fma<E>;
  constexpr int block_rows = Block::rows, block_cols = Block::cols;
  for (int64_t col = 0; col < cols; col += block_cols * V::lanes)
    for (int64_t row = 0; row < rows; row += block_rows) {
      V sums[block_rows * block_cols];
      unroll<block_rows * block_cols>([&](auto i) { sums[i] = V(0); });
      const E* a_k = a.data + row * a.row_stride;
      const E* b_k = b + col;
      for (int64_t k = 0; k < depth; k++, a_k += a.k_stride, b_k += b_stride) {
        typename F::Operand b_reg[block_cols];
        unroll<block_cols>([&](auto c) { b_reg[c] = F::load(b_k + c * V::lanes); });
        unroll<block_rows>([&](auto r) {
          auto a_reg = F::splat(a_k[r * a.row_stride]);
          unroll<block_cols>(
              [&](auto c) { sums[r * block_cols + c] = F::multiply_add(sums[r * block_cols + c], a_reg, b_reg[c]); });
        });
      }
      unroll<block_rows>([&](auto r) {
        if (row + r < rows)
          unroll<block_cols>([&](auto c) {
            Accumulate<E>* at = out + (row + r) * out_stride + col + c * V::lanes;
            epilogue(V::load(at), c, sums[r * block_cols + c]).store(at);
          });
      });
    }
  return epilogue;
}

// Longer sums are made of partial sums, because the rounding error grows with the length of a chain of additions.
constexpr int64_t kChain = 128;

// multiply_chain for any depth.
template <class Block, class E, class Epilogue>
void multiply(Left<E> a, const E* b, int64_t b_stride, int64_t rows, int64_t cols, int64_t depth, Accumulate<E>* out,
              int64_t out_stride, Epilogue epilogue) {
  multiply_chain<Block>(a, b, b_stride, rows, cols, min(depth, kChain), out, out_stride, epilogue);
  for (int64_t k = kChain; k < depth; k += kChain) {
    Left<E> a_rest{a.data + k * a.k_stride, a.row_stride, a.k_stride};
    multiply_chain<Block>(a_rest, b + k * b_stride, b_stride, rows, cols, min(depth - k, kChain), out, out_stride,
                          Add());
  }
}

// --- dots ---

// Loops over rows in memory prefetch the row kFetch further on, because waiting for each line is slow. So an array of
// row pointers is extended by kRowsAhead copies of its last pointer.
constexpr int64_t kFetch = 32, kRowsAhead = 64;

template <class T> INLINE void repeat_last(const T** pointers, int64_t n) {
  std::fill_n(pointers + n, kRowsAhead, pointers[n - 1]);
}
// Fetches the cache line of row[d] in a loop that reads count elements at a time. Vectors of less than half a line
// would fetch each line too often, so they do not fetch.
template <int count, class T> INLINE void fetch(const T* row, int64_t d) {
  constexpr int bytes = count * sizeof(T), line = 64;
  if (bytes >= line || (bytes >= line / 2 && d * sizeof(T) % line == 0)) __builtin_prefetch(row + d, 0, 2);
}

// s[r][j] = q[r] . k_rows[j], for r < rows and a vector of keys: j < V::lanes. head_dim lies in the lanes. Each of the
// rows x keys sums has a register, and the order of its additions depends on neither rows nor keys.
template <int rows, class T, class E>
HOT void dots(const T* const* k_rows, const E* q, int64_t q_stride, int64_t dims, Accumulate<T>* s, int64_t s_stride) {
  using V = Vec<Accumulate<T>>;
  using F = Fma<E>;
  constexpr int keys = V::lanes / rows;
  constexpr int lanes = V::lanes * kDepth<E>;  // elements of T per vector
  for (int j = 0; j < V::lanes; j += keys) {
    const T *k[keys], *later[keys];
    unroll<keys>([&](auto i) { k[i] = k_rows[j + i], later[i] = k_rows[j + i + kFetch]; });
    V sums[V::lanes];
    unroll<V::lanes>([&](auto i) { sums[i] = V(0); });
    auto step = [&](int64_t d, auto... count) {  // count: valid elements of T; a whole vector if omitted
      typename F::Operand k_reg[keys];
      unroll<keys>([&](auto i) { k_reg[i] = F::load(k[i] + d, count...), fetch<lanes>(later[i], d); });
      unroll<rows>([&](auto row) {
        auto q_reg = F::load(q + row * q_stride + d / kDepth<E>);
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
    unroll<rows>([&](auto row) { std::memcpy(s + row * s_stride + j, &dot.v[row() * keys], keys * sizeof(dot.v[0])); });
  }
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
