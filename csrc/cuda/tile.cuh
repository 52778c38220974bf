// Tiles in shared memory, fragments in the registers of a warp, and the products of both.
#pragma once

#include <type_traits>

#include "../params.h"
#include "ptx/sm80.cuh"

namespace flashsoftmax::cuda {

constexpr int kWarp = 32;

template <class T> constexpr bool kIsFloat = std::is_same_v<T, float>;
template <class T> constexpr int kPack = 16 / sizeof(T);  // elements in 16 bytes

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
// The same on each lane, as the compiler sees too.
__device__ __forceinline__ int warp_id() { return __shfl_sync(~0u, threadIdx.x / kWarp, 0); }

// Two floats, rounded, the first in the lower half.
template <class T> __device__ __forceinline__ uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(both);
  }
}

// --- fragments ---

// 16 * kRows rows and 8 * kColumns columns of a warp, as m16n8 products have them: x[r][c][2 * h + e] of a lane is at
// row 16 * r + 8 * h + lane / 4 and column 8 * c + 2 * (lane % 4) + e. The four lanes of a row are a quad.
template <int kRows, int kColumns> struct Fragment {
  float x[kRows][kColumns][4];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int n = 0; n < 4; n++) x[r][c][n] = value;
  }
  // Each column tile takes the place of the one before it, the first that of the last.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float first = x[r][0][n];
#pragma unroll
        for (int c = 1; c < kColumns; c++) x[r][c - 1][n] = x[r][c][n];
        x[r][kColumns - 1][n] = first;
      }
  }
};

__device__ __forceinline__ int fragment_row(int r, int h) { return 16 * r + 8 * h + lane_id() / 4; }
__device__ __forceinline__ int fragment_column(int c, int e) { return 8 * c + 2 * (lane_id() % 4) + e; }

// Calls f(element, r, c, h, e) for each element.
template <int kRows, int kColumns, class F>
__device__ __forceinline__ void for_each(Fragment<kRows, kColumns>& s, F&& f) {
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int n = 0; n < 4; n++) f(s.x[r][c][n], r, c, n / 2, n % 2);
}

// Like for_each, for an f of many instructions: column tiles take turns in the first place, so that f is there only
// 4 * kRows times.
template <int kRows, int kColumns, class F>
__device__ __forceinline__ void for_each_in_turn(Fragment<kRows, kColumns>& s, F&& f) {
#pragma unroll 1
  for (int c = 0; c < kColumns; c++) {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int n = 0; n < 4; n++) f(s.x[r][0][n], r, c, n / 2, n % 2);
    s.turn();
  }
}

// A fragment as the left operand of a product: rounded to T, two columns in a register.
template <class T, int kRows, int kColumns> struct Operand {
  uint32_t x[kRows][kColumns][2];

  Operand() = default;
  __device__ __forceinline__ explicit Operand(const Fragment<kRows, kColumns>& s) {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) x[r][c][h] = pack<T>(s.x[r][c][2 * h], s.x[r][c][2 * h + 1]);
  }
};
template <int kRows, int kColumns> struct Operand<float, kRows, kColumns> : Fragment<kRows, kColumns> {
  Operand() = default;
  __device__ __forceinline__ explicit Operand(const Fragment<kRows, kColumns>& s) : Fragment<kRows, kColumns>(s) {}
};

// --- tiles ---

// [rows][kDim] in shared memory. The 16-byte chunks of a row are permuted by the row's number, so that 8 rows have
// their chunks of one column in different banks. base is a multiple of a row's bytes.
template <class T, int kDim> struct Tile {
  static constexpr int kRowBytes = kDim * sizeof(T), kChunks = kRowBytes / 16;
  uint32_t base;

  __device__ __forceinline__ uint32_t address(int row, int chunk) const {
    return base + row * kRowBytes + (chunk ^ (row & 7)) * 16;
  }
  __device__ __forceinline__ uint32_t element(int row, int column) const {
    return address(row, column / kPack<T>) + column % kPack<T> * sizeof(T);
  }
  // Where this lane's row of four matrices lies, 16 rows and 2 chunks in all, that begin at (row, chunk 0): matrices go
  // down first, or across first. The address of the same at chunk n, which is even, is this ^ n * 16; that of the same
  // m * 8 rows below is this + m * 8 * kRowBytes.
  __device__ __forceinline__ uint32_t down(int row) const { return address(row + lane_id() % 16, lane_id() / 16); }
  __device__ __forceinline__ uint32_t across(int row) const {
    return address(row + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
  }
};

// x, clamped to what a block goes far less than.
__device__ __forceinline__ int near(int64_t x) {
  constexpr int64_t kFar = 1 << 30;
  return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
}

// Rows of a tensor, of which tiles are made.
template <class T> struct Source {
  const T* data;     // row 0; paged: of page 0
  int64_t row, dim;  // strides
  int64_t end;       // the rows that there are; those behind are 0
  int dims;          // of a row; those behind are 0
  bool packs;        // whether rows can be read in 16 bytes
  IntVector pages;   // paged: of the sequence
  int64_t page;      // paged: stride
  uint32_t page_size;

  __device__ __forceinline__ const T* at(int64_t i) const {
    if (!pages) return data + i * row;
    const uint32_t key = static_cast<uint32_t>(i);
    return data + pages[key / page_size] * page + key % page_size * row;
  }
};

// Rows [row, row + rows) of a head.
template <class T>
__device__ __forceinline__ Source<T> source(const Tensor4& x, int64_t batch, int64_t head, int64_t row, int64_t rows,
                                            int64_t dims, bool packs) {
  const T* data = static_cast<const T*>(x.data) + x.offset(batch, head, row);
  return {data, x.row, x.dim, rows, static_cast<int>(dims), packs, {}, 0, 0};
}
// The keys or values of sequence b for a head of keys.
template <class T>
__device__ __forceinline__ Source<T> source(const AttentionParams& p, const Tensor4& x, const Sequence& s, int64_t b,
                                            int64_t head, int64_t dims, bool packs) {
  if (!p.block_table) return source<T>(x, s.k_batch, head, s.k_row, s.band.kv_len, dims, packs);
  Source<T> paged = source<T>(x, 0, head, 0, s.band.kv_len, dims, packs);
  paged.pages = p.block_table.advanced(b * p.block_table_row);
  paged.page = x.batch;
  paged.page_size = static_cast<uint32_t>(p.page_size);
  return paged;
}

// Whether the pages of keys [begin, end) of sequence b exist. All threads of the block ask, and get the same answer.
__device__ __forceinline__ bool pages_exist(const AttentionParams& p, int64_t b, int64_t begin, int64_t end) {
  if (!p.block_table || begin >= end) return true;
  const IntVector pages = p.block_table.advanced(b * p.block_table_row);
  bool missing = false;
  for (int64_t n = begin / p.page_size + threadIdx.x; n * p.page_size < end; n += blockDim.x)
    missing = missing || pages[n] < 0 || pages[n] >= p.pages;
  return !__syncthreads_or(missing);
}
__device__ __forceinline__ bool pages_exist(const AttentionParams& p, int64_t b, int64_t kv_len) {
  return pages_exist(p, b, 0, kv_len);
}

// Rows [first, first + kRows), of which there is one, to a tile, by kThreads threads of which this is one. Begins
// asynchronous copies, does not commit them, and where they are not possible copies at once: in either case visible
// after wait_for_copies and a barrier.
template <int kRows, int kThreads, class T, int kDim>
__device__ __forceinline__ void copy(Tile<T, kDim> to, const Source<T>& from, int64_t first, int thread = threadIdx.x) {
  constexpr int kChunks = Tile<T, kDim>::kChunks, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const uint32_t any_thread = opaque(thread);
  const int chunk = any_thread % kChunks, row = any_thread / kChunks, column = chunk * kPack<T>;
  const int64_t stride = from.row;
  const int rows = column < from.dims ? near(from.end - first) - row : 0;  // to be read, of those from `row` on
  const bool packs = from.packs && from.dims % kPack<T> == 0;
  if (packs && !from.pages) {
    const T* at = from.data + (first + row) * stride + column;
#pragma unroll
    for (int n = 0; n < kRows; n += kStep, at += kStep * stride) copy_async(to.address(row + n, chunk), at, n < rows);
  } else if (packs) {
#pragma unroll 4
    for (int n = 0; n < kRows; n += kStep)
      copy_async(to.address(row + n, chunk), from.at(n < rows ? first + row + n : 0) + column, n < rows);
  } else {
#pragma unroll 1
    for (int n = 0; n < kRows; n += kStep) {
      alignas(16) T elements[kPack<T>];
      const T* at = n < rows ? from.at(first + row + n) + column * from.dim : nullptr;
#pragma unroll
      for (int e = 0; e < kPack<T>; e++) elements[e] = at && column + e < from.dims ? at[e * from.dim] : T(0.0f);
      shared<uint4>(to.address(row + n, chunk)) = reinterpret_cast<const uint4&>(elements);
    }
  }
}

// Rows of a tensor that a kernel writes.
template <class T> struct Target {
  T* data;           // row 0
  int64_t row, dim;  // strides
  int dims;          // of a row
  bool packs;        // whether rows can be written in 16 bytes
};

// A warp's fragment, rounded, to the tile's rows from `row` on.
template <class T, int kDim, int kRows>
__device__ __forceinline__ void put(Tile<T, kDim> to, int row, const Fragment<kRows, kDim / 8>& s) {
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int c = 0; c < kDim / 8; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t at = to.element(row + fragment_row(r, h), fragment_column(c, 0));
        const float x = s.x[r][c][2 * h], y = s.x[r][c][2 * h + 1];
        if constexpr (kIsFloat<T>)
          shared<float2>(at) = {x, y};
        else
          shared<uint32_t>(at) = pack<T>(x, y);
      }
}

// The tile's rows [row, row + count), as they lie there after a __syncwarp, to rows of a tensor, by one warp.
template <class T, int kDim>
__device__ __forceinline__ void write(Target<T> to, Tile<T, kDim> from, int row, int count) {
  if (to.packs) {
    const int packs = to.dims / kPack<T>;
    for (int n = lane_id(); n < count * Tile<T, kDim>::kChunks; n += kWarp) {
      const int i = n / Tile<T, kDim>::kChunks, chunk = n % Tile<T, kDim>::kChunks;
      if (chunk < packs)
        *reinterpret_cast<uint4*>(to.data + i * to.row + chunk * kPack<T>) =
            shared<uint4>(from.address(row + i, chunk));
    }
  } else {
    for (int i = 0; i < count; i++)
      for (int d = lane_id(); d < to.dims; d += kWarp)
        to.data[i * to.row + d * to.dim] = shared<T>(from.element(row + i, d));
  }
}

// --- products ---

// sum += a b^T: rows of a from a_row on, against rows of b from b_row on. From `dims` on there are only zeros.
template <class T, int kDim, int kRows, int kColumns>
__device__ __forceinline__ void multiply_transposed(Fragment<kRows, kColumns>& sum, Tile<T, kDim> a, int a_row,
                                                    Tile<T, kDim> b, int b_row, int dims = kDim) {
  constexpr int kRowBytes = Tile<T, kDim>::kRowBytes;
  if constexpr (!kIsFloat<T>) {
    const uint32_t a_lane = a.down(a_row), b_lane = b.across(b_row);
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      if (kDim == 256 && d == 192 && dims <= d) break;
      uint32_t x[kRows][4], y[4];
#pragma unroll
      for (int r = 0; r < kRows; r++) load_matrices(x[r], (a_lane ^ d * 2) + r * 16 * kRowBytes);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        load_matrices(y, (b_lane ^ d * 2) + c * 8 * kRowBytes);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          mma<T>(sum.x[r][c], x[r], y[0], y[1]);
          mma<T>(sum.x[r][c + 1], x[r], y[2], y[3]);
        }
      }
    }
  } else {
    // By FMA: of float32 the tensor cores see 11 bits of 24. Sums of kPart products each are added.
    constexpr int kPart = 64;
    const uint32_t a_lane = a.address(a_row + fragment_row(0, 0), 0);
    const uint32_t b_lanes[] = {b.address(b_row + fragment_column(0, 0), 0),
                                b.address(b_row + fragment_column(0, 1), 0)};
    const auto add_dims = [&](Fragment<kRows, kColumns>& to, int begin, int end) {
#pragma unroll 2
      for (int d = begin; d < end; d += 4) {
        float4 x[kRows][2];
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
          for (int h = 0; h < 2; h++) x[r][h] = shared<float4>((a_lane ^ d * 4) + (16 * r + 8 * h) * kRowBytes);
#pragma unroll
        for (int c = 0; c < kColumns; c++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float4 y = shared<float4>((b_lanes[e] ^ d * 4) + 8 * c * kRowBytes);
#pragma unroll
            for (int r = 0; r < kRows; r++)
#pragma unroll
              for (int h = 0; h < 2; h++) {
                float& product = to.x[r][c][2 * h + e];
                product = fmaf(x[r][h].x, y.x, product);
                product = fmaf(x[r][h].y, y.y, product);
                product = fmaf(x[r][h].z, y.z, product);
                product = fmaf(x[r][h].w, y.w, product);
              }
          }
      }
    };
    if constexpr (kDim <= kPart) {
      add_dims(sum, 0, dims);
    } else {
#pragma unroll 1
      for (int begin = 0; begin < dims; begin += kPart) {
        Fragment<kRows, kColumns> part;
        part.fill(0);
        add_dims(part, begin, dims - begin < kPart ? dims : begin + kPart);
        for_each(sum, [&](float& x, int r, int c, int h, int e) { x += part.x[r][c][2 * h + e]; });
      }
    }
  }
}

// sum += a b: columns of a against rows of b from b_row on. From `dims` on b may have only zeros.
template <class T, int kDim, int kRows, int kDepth, int kColumns>
__device__ __forceinline__ void multiply(Fragment<kRows, kColumns>& sum, const Operand<T, kRows, kDepth>& a,
                                         Tile<T, kDim> b, int b_row, int dims = kDim) {
  constexpr int kRowBytes = Tile<T, kDim>::kRowBytes;
  if constexpr (!kIsFloat<T>) {
    constexpr int kPart = kColumns == 32 ? 16 : kColumns;
    const uint32_t b_lane = b.down(b_row);
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kPart) {
      if (begin > 0 && dims <= 8 * begin) break;
#pragma unroll
      for (int k = 0; k < kDepth; k += 2) {
        uint32_t x[kRows][4], y[4];
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
          for (int n = 0; n < 4; n++) x[r][n] = a.x[r][k + n / 2][n % 2];
#pragma unroll
        for (int c = begin; c < begin + kPart; c += 2) {
          load_matrices_transposed(y, (b_lane ^ c * 16) + k * 8 * kRowBytes);
#pragma unroll
          for (int r = 0; r < kRows; r++) {
            mma<T>(sum.x[r][c], x[r], y[0], y[1]);
            mma<T>(sum.x[r][c + 1], x[r], y[2], y[3]);
          }
        }
      }
    }
  } else {
    // b_row is a multiple of 8. In its odd rows the chunks 2 * c and 2 * c + 1 change places, which a fragment's
    // columns 8 * c to 8 * c + 7 lie in.
    const int lane = lane_id() % 4;
    const uint32_t b_lanes[] = {b.element(b_row, 2 * lane), b.element(b_row, 2 * lane ^ 4)};
    // Sums over this tile's rows, 32 a lane at a time, are added: float32 shows it where many tiles are summed.
    constexpr int kPart = 8 / kRows < kColumns ? 8 / kRows : kColumns;
    static_assert(kColumns % kPart == 0);
    Operand<float, kRows, kDepth> left = a;
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kPart) {
      if (dims <= 8 * begin) break;
      Fragment<kRows, kPart> part;
      part.fill(0);
#pragma unroll 1
      for (int k = 0; k < kDepth; k++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
          float x[kRows][2];
#pragma unroll
          for (int r = 0; r < kRows; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) x[r][h] = __shfl_sync(~0u, left.x[r][0][2 * h + n % 2], n / 2, 4);
#pragma unroll
          for (int c = 0; c < kPart; c++) {
            const float2 y =
                shared<float2>(b_lanes[n % 2] + (8 * k + n) * kRowBytes + (2 * (begin + c) ^ n / 2 * 2) * 16);
#pragma unroll
            for (int r = 0; r < kRows; r++)
#pragma unroll
              for (int h = 0; h < 2; h++) {
                part.x[r][c][2 * h] = fmaf(x[r][h], y.x, part.x[r][c][2 * h]);
                part.x[r][c][2 * h + 1] = fmaf(x[r][h], y.y, part.x[r][c][2 * h + 1]);
              }
          }
        }
        left.turn();
      }
      for_each(part, [&](float& x, int r, int c, int h, int e) { sum.x[r][begin + c][2 * h + e] += x; });
    }
  }
}

}  // namespace flashsoftmax::cuda
