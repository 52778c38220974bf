// The building blocks of the kernels: tiles of rows in shared memory, fragments of matrices in the registers of a warp,
// copies from global memory to tiles and from fragments back, and matrix products of tiles and fragments. 16-bit types
// multiply on tensor cores, float32 by FMA.
#pragma once

#include <type_traits>

#include "../params.h"
#include "ptx/sm80.cuh"

namespace flashsoftmax::cuda {

constexpr int kWarp = 32;

template <class T> constexpr bool kIsFloat = std::is_same_v<T, float>;
template <class T> constexpr int kChunk = 16 / sizeof(T);  // elements in a chunk of 16 bytes

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
// The shuffle tells the compiler that all lanes have the same value.
__device__ __forceinline__ int warp_id() { return __shfl_sync(~0u, threadIdx.x / kWarp, 0); }

// Two floats rounded to T in one register, x in the lower half.
template <class T> __device__ __forceinline__ uint32_t round_pair(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// --- fragments ---

// A float matrix of 16 * kStrips rows and 8 * kColumns columns in the registers of a warp, as m16n8 products lay it
// out: x[r][c][2 * h + e] of a lane is the element at row 16 * r + 8 * h + lane / 4 and column 8 * c + 2 * (lane % 4) +
// e. x[r] is a strip of 16 rows; the four lanes that hold a row are a quad.
template <int kStrips, int kColumns> struct Fragment {
  float x[kStrips][kColumns][4];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int r = 0; r < kStrips; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int n = 0; n < 4; n++) x[r][c][n] = value;
  }
};

__device__ __forceinline__ int fragment_row(int r, int h) { return 16 * r + 8 * h + lane_id() / 4; }
__device__ __forceinline__ int fragment_column(int c, int e) { return 8 * c + 2 * (lane_id() % 4) + e; }

// Calls f(element, r, c, h, e) for each element of a fragment.
template <int kStrips, int kColumns, class F>
__device__ __forceinline__ void for_each(Fragment<kStrips, kColumns>& s, F&& f) {
#pragma unroll
  for (int r = 0; r < kStrips; r++)
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int n = 0; n < 4; n++) f(s.x[r][c][n], r, c, n / 2, n % 2);
}
// Calls f(element of s, element of t, c, h, e) for each pair of elements of two strips.
template <int kColumns, class F>
__device__ __forceinline__ void for_each(float (&s)[kColumns][4], float (&t)[kColumns][4], F&& f) {
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int n = 0; n < 4; n++) f(s[c][n], t[c][n], c, n / 2, n % 2);
}

// Moves each column tile of a strip to the place of the one before it, the first to that of the last.
template <int kColumns> __device__ __forceinline__ void rotate(float (&s)[kColumns][4]) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float first = s[0][n];
#pragma unroll
    for (int c = 1; c < kColumns; c++) s[c - 1][n] = s[c][n];
    s[kColumns - 1][n] = first;
  }
}

// Like for_each, for an f of many instructions. A loop rotates the column tiles through the first place, so the code of
// f exists once per element of a column tile.
template <int kStrips, int kColumns, class F>
__device__ __forceinline__ void for_each_rotating(Fragment<kStrips, kColumns>& s, F&& f) {
#pragma unroll 1
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int r = 0; r < kStrips; r++) {
#pragma unroll
      for (int n = 0; n < 4; n++) f(s.x[r][0][n], r, c, n / 2, n % 2);
      rotate(s.x[r]);
    }
}
template <int kColumns, class F>
__device__ __forceinline__ void for_each_rotating(float (&s)[kColumns][4], float (&t)[kColumns][4], F&& f) {
#pragma unroll 1
  for (int c = 0; c < kColumns; c++) {
#pragma unroll
    for (int n = 0; n < 4; n++) f(s[0][n], t[0][n], c, n / 2, n % 2);
    rotate(s);
    rotate(t);
  }
}

// A fragment as the left operand of a product: rounded to T, two columns per register.
template <class T, int kStrips, int kColumns> struct Operand {
  uint32_t x[kStrips][kColumns][2];

  Operand() = default;
  __device__ __forceinline__ explicit Operand(const Fragment<kStrips, kColumns>& s) {
#pragma unroll
    for (int r = 0; r < kStrips; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) x[r][c][h] = round_pair<T>(s.x[r][c][2 * h], s.x[r][c][2 * h + 1]);
  }
};
template <int kStrips, int kColumns> struct Operand<float, kStrips, kColumns> : Fragment<kStrips, kColumns> {
  Operand() = default;
  __device__ __forceinline__ explicit Operand(const Fragment<kStrips, kColumns>& s) : Fragment<kStrips, kColumns>(s) {}
};

// --- tiles ---

// A matrix [rows][kDim] in shared memory. Row r has its 16-byte chunk c in place c ^ (r % 8), so that the same chunk of
// 8 successive rows lies in different banks. base is a multiple of a row's bytes.
template <class T, int kDim> struct Tile {
  static constexpr int kRowBytes = kDim * sizeof(T), kChunks = kRowBytes / 16;
  uint32_t base;

  __device__ __forceinline__ uint32_t address(int row, int chunk) const {
    return base + row * kRowBytes + (chunk ^ (row & 7)) * 16;
  }
  __device__ __forceinline__ uint32_t element(int row, int column) const {
    return address(row, column / kChunk<T>) + column % kChunk<T> * sizeof(T);
  }
  // The address that this lane passes to load_matrices for 16 rows and 2 chunks from (row, chunk 0) on. The second of
  // the four matrices lies below the first (down) or to its right (across). For chunk n instead of 0, n even, it is
  // this address ^ n * 16; for 8 * m rows further down, this address + 8 * m * kRowBytes.
  __device__ __forceinline__ uint32_t down(int row) const { return address(row + lane_id() % 16, lane_id() / 16); }
  __device__ __forceinline__ uint32_t across(int row) const {
    return address(row + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
  }
};

// x as an int, clamped to +-2^30: distances within a block's work are far smaller.
__device__ __forceinline__ int clamp_to_int(int64_t x) {
  constexpr int64_t kFar = 1 << 30;
  return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
}

// The rows of one head of a tensor, from which tiles are copied. Rows outside [begin, end) and elements beyond dims
// are not read; in a tile they are 0. begin is 0 unless paged.
template <class T> struct Source {
  const T* data;     // row 0; paged: row 0 of page 0
  int64_t row, dim;  // strides
  int64_t begin, end;
  int dims;
  bool aligned;     // whether rows can be read in 16-byte chunks
  IntVector pages;  // of the sequence, if paged
  int64_t page;     // stride
  uint32_t page_size;
  uint32_t first_key;  // where row 0 lies in the pages

  __device__ __forceinline__ const T* at(int64_t i) const {
    if (!pages) return data + i * row;
    const uint32_t key = first_key + static_cast<uint32_t>(i);
    return data + pages[key / page_size] * page + key % page_size * row;
  }
};

// Rows [row, row + rows) of a head.
template <class T>
__device__ __forceinline__ Source<T> source(const Tensor4& x, int64_t batch, int64_t head, int64_t row, int64_t rows,
                                            int64_t dims, bool aligned) {
  const T* data = static_cast<const T*>(x.data) + x.offset(batch, head, row);
  return {data, x.row, x.dim, 0, rows, static_cast<int>(dims), aligned, {}, 0, 0, 0};
}
// The keys or values of sequence b for one key head. Keys outside [begin, end) are hidden: their pages may not exist.
template <class T>
__device__ __forceinline__ Source<T> source(const AttentionParams& args, const Tensor4& x, const Sequence& seq,
                                            int64_t b, int64_t kv_head, int64_t begin, int64_t end, int64_t dims,
                                            bool aligned) {
  if (!args.block_table) return source<T>(x, seq.k_batch, kv_head, seq.k_row, seq.band.kv_len, dims, aligned);
  Source<T> paged = source<T>(x, 0, kv_head, 0, end, dims, aligned);
  paged.begin = begin;
  paged.pages = args.block_table.advanced(b * args.block_table_row);
  paged.page = x.batch;
  paged.page_size = static_cast<uint32_t>(args.page_size);
  paged.first_key = static_cast<uint32_t>(seq.first_key);
  return paged;
}

// Whether the pages that hold keys [begin, end) of sequence b exist. To be called by all threads of a block.
__device__ __forceinline__ bool pages_exist(const AttentionParams& args, const Sequence& seq, int64_t b, int64_t begin,
                                            int64_t end) {
  if (!args.block_table || begin >= end) return true;
  const IntVector pages = args.block_table.advanced(b * args.block_table_row);
  begin += seq.first_key;
  end += seq.first_key;
  bool missing = false;
  for (int64_t n = begin / args.page_size + threadIdx.x; n * args.page_size < end; n += blockDim.x)
    missing = missing || pages[n] < 0 || pages[n] >= args.pages;
  return !__syncthreads_or(missing);
}

// Copies rows [first, first + kRows) to a tile, by kThreads threads; some of them exist. Rows in aligned chunks are
// copied asynchronously and not yet committed, others at once. Either way they can be read after a commit,
// wait_for_copies and a barrier.
template <int kRows, int kThreads, class T, int kDim>
__device__ __forceinline__ void copy(Tile<T, kDim> to, const Source<T>& from, int64_t first) {
  constexpr int kChunks = Tile<T, kDim>::kChunks, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const uint32_t thread = hide_from_optimizer(threadIdx.x);
  const int chunk = thread % kChunks, row = thread / kChunks, column = chunk * kChunk<T>;
  const int64_t stride = from.row;
  const int rows = column < from.dims ? clamp_to_int(from.end - first) - row : 0;  // that exist, from `row` on
  if (from.aligned && !from.pages) {
    const T* at = from.data + (first + row) * stride + column;
#pragma unroll
    for (int n = 0; n < kRows; n += kStep, at += kStep * stride)
      copy_async_if(n < rows, to.address(row + n, chunk), at);
    return;
  }
  const int hidden = clamp_to_int(from.begin - first) - row;  // rows from `row` on that do not exist
  if (from.aligned) {
#pragma unroll 4
    for (int n = 0; n < kRows; n += kStep) {
      const bool exists = hidden <= n && n < rows;
      copy_async_if(exists, to.address(row + n, chunk), from.at(exists ? first + row + n : from.begin) + column);
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < kRows; n += kStep) {
      alignas(16) T elements[kChunk<T>];
      const T* at = hidden <= n && n < rows ? from.at(first + row + n) + column * from.dim : nullptr;
#pragma unroll
      for (int e = 0; e < kChunk<T>; e++) elements[e] = at && column + e < from.dims ? at[e * from.dim] : T(0.0f);
      shared<uint4>(to.address(row + n, chunk)) = reinterpret_cast<const uint4&>(elements);
    }
  }
}

// Rows of one head of a tensor that a kernel writes.
template <class T> struct Target {
  T* data;           // the first row
  int64_t row, dim;  // strides
  int dims;          // elements of a row
  bool aligned;      // whether rows can be written in 16-byte chunks
};

template <class T>
__device__ __forceinline__ Target<T> target(const Tensor4& x, int64_t batch, int64_t head, int64_t row, int64_t dims,
                                            bool aligned) {
  return {static_cast<T*>(x.data) + x.offset(batch, head, row), x.row, x.dim, static_cast<int>(dims), aligned};
}

// Stores a warp's fragment, rounded to T, in the rows of a tile from `row` on.
template <class T, int kDim, int kStrips>
__device__ __forceinline__ void store_fragment(Tile<T, kDim> to, int row, const Fragment<kStrips, kDim / 8>& s) {
#pragma unroll
  for (int r = 0; r < kStrips; r++)
#pragma unroll
    for (int c = 0; c < kDim / 8; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t at = to.element(row + fragment_row(r, h), fragment_column(c, 0));
        const float x = s.x[r][c][2 * h], y = s.x[r][c][2 * h + 1];
        if constexpr (kIsFloat<T>)
          shared<float2>(at) = {x, y};
        else
          shared<uint32_t>(at) = round_pair<T>(x, y);
      }
}

// Writes rows [row, row + count) of a tile to a tensor, by the warp that has stored them there. Begins with what makes
// them visible to all its lanes.
template <class T, int kDim>
__device__ __forceinline__ void write_rows(Target<T> to, Tile<T, kDim> from, int row, int count) {
  __syncwarp();
  if (to.aligned) {
    const int chunks = to.dims / kChunk<T>;
    for (int n = lane_id(); n < count * Tile<T, kDim>::kChunks; n += kWarp) {
      const int i = n / Tile<T, kDim>::kChunks, chunk = n % Tile<T, kDim>::kChunks;
      if (chunk < chunks)
        *reinterpret_cast<uint4*>(to.data + i * to.row + chunk * kChunk<T>) =
            shared<uint4>(from.address(row + i, chunk));
    }
  } else {
    for (int i = 0; i < count; i++)
      for (int d = lane_id(); d < to.dims; d += kWarp)
        to.data[i * to.row + d * to.dim] = shared<T>(from.element(row + i, d));
  }
}

// --- products ---

// sum [16 * kStrips][8 * kColumns] += a b^T, for the rows of a from a_row on and those of b from b_row on. Columns from
// `dims` on hold zeros and may be skipped.
template <class T, int kDim, int kStrips, int kColumns>
__device__ __forceinline__ void multiply_transposed(Fragment<kStrips, kColumns>& sum, Tile<T, kDim> a, int a_row,
                                                    Tile<T, kDim> b, int b_row, int dims = kDim) {
  constexpr int kRowBytes = Tile<T, kDim>::kRowBytes;
  if constexpr (!kIsFloat<T>) {
    const uint32_t a_lane = a.down(a_row), b_lane = b.across(b_row);
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      if (kDim == 256 && d == 192 && dims <= d) break;
      uint32_t x[kStrips][4], y[4];
#pragma unroll
      for (int r = 0; r < kStrips; r++) load_matrices(x[r], (a_lane ^ d * 2) + r * 16 * kRowBytes);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        load_matrices(y, (b_lane ^ d * 2) + c * 8 * kRowBytes);
#pragma unroll
        for (int r = 0; r < kStrips; r++) {
          mma<T>(sum.x[r][c], x[r], y[0], y[1]);
          mma<T>(sum.x[r][c + 1], x[r], y[2], y[3]);
        }
      }
    }
  } else {
    // By FMA: tensor cores would round float32 to 11 bits of 24. kPart products at a time are summed apart, for
    // accuracy.
    constexpr int kPart = 64;
    const uint32_t a_lane = a.address(a_row + fragment_row(0, 0), 0);
    const uint32_t b_lanes[] = {b.address(b_row + fragment_column(0, 0), 0),
                                b.address(b_row + fragment_column(0, 1), 0)};
    const auto add_dims = [&](Fragment<kStrips, kColumns>& to, int begin, int end) {
#pragma unroll 2
      for (int d = begin; d < end; d += 4) {
        float4 x[kStrips][2];
#pragma unroll
        for (int r = 0; r < kStrips; r++)
#pragma unroll
          for (int h = 0; h < 2; h++) x[r][h] = shared<float4>((a_lane ^ d * 4) + (16 * r + 8 * h) * kRowBytes);
#pragma unroll
        for (int c = 0; c < kColumns; c++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float4 y = shared<float4>((b_lanes[e] ^ d * 4) + 8 * c * kRowBytes);
#pragma unroll
            for (int r = 0; r < kStrips; r++)
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
        Fragment<kStrips, kColumns> part;
        part.fill(0);
        add_dims(part, begin, dims - begin < kPart ? dims : begin + kPart);
        for_each(sum, [&](float& x, int r, int c, int h, int e) { x += part.x[r][c][2 * h + e]; });
      }
    }
  }
}

// sum [16 * kStrips][8 * kColumns] += a b, for the 8 * kDepth rows of b from b_row on. Columns of b from `dims` on hold
// zeros and may be skipped.
template <class T, int kDim, int kStrips, int kDepth, int kColumns>
__device__ __forceinline__ void multiply(Fragment<kStrips, kColumns>& sum, const Operand<T, kStrips, kDepth>& a,
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
        uint32_t x[kStrips][4], y[4];
#pragma unroll
        for (int r = 0; r < kStrips; r++)
#pragma unroll
          for (int n = 0; n < 4; n++) x[r][n] = a.x[r][k + n / 2][n % 2];
#pragma unroll
        for (int c = begin; c < begin + kPart; c += 2) {
          load_matrices_transposed(y, (b_lane ^ c * 16) + k * 8 * kRowBytes);
#pragma unroll
          for (int r = 0; r < kStrips; r++) {
            mma<T>(sum.x[r][c], x[r], y[0], y[1]);
            mma<T>(sum.x[r][c + 1], x[r], y[2], y[3]);
          }
        }
      }
    }
  } else {
    // Columns 8 * c to 8 * c + 7 of a fragment are chunks 2 * c and 2 * c + 1 of b, which change places in odd rows of
    // b. b_row is a multiple of 8.
    const int lane = lane_id() % 4;
    const uint32_t b_lanes[] = {b.element(b_row, 2 * lane), b.element(b_row, 2 * lane ^ 4)};
    // The products of this tile are summed apart, 32 sums per lane at a time, for accuracy over many tiles.
    constexpr int kPart = 8 / kStrips < kColumns ? 8 / kStrips : kColumns;
    static_assert(kColumns % kPart == 0);
    Operand<float, kStrips, kDepth> left = a;
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kPart) {
      if (dims <= 8 * begin) break;
      Fragment<kStrips, kPart> part;
      part.fill(0);
#pragma unroll 1
      for (int k = 0; k < kDepth; k++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
          float x[kStrips][2];
#pragma unroll
          for (int r = 0; r < kStrips; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) x[r][h] = __shfl_sync(~0u, left.x[r][0][2 * h + n % 2], n / 2, 4);
#pragma unroll
          for (int c = 0; c < kPart; c++) {
            const float2 y =
                shared<float2>(b_lanes[n % 2] + (8 * k + n) * kRowBytes + (2 * (begin + c) ^ n / 2 * 2) * 16);
#pragma unroll
            for (int r = 0; r < kStrips; r++)
#pragma unroll
              for (int h = 0; h < 2; h++) {
                part.x[r][c][2 * h] = fmaf(x[r][h], y.x, part.x[r][c][2 * h]);
                part.x[r][c][2 * h + 1] = fmaf(x[r][h], y.y, part.x[r][c][2 * h + 1]);
              }
          }
        }
#pragma unroll
        for (int r = 0; r < kStrips; r++) rotate(left.x[r]);
      }
      for_each(part, [&](float& x, int r, int c, int h, int e) { sum.x[r][begin + c][2 * h + e] += x; });
    }
  }
}

}  // namespace flashsoftmax::cuda
