// Scores of a fragment: from q.k to what softmax takes, as mask.h says.
#pragma once

#include "tile.cuh"

namespace flashsoftmax::cuda {

// The columns [first, end) of a fragment's row.
struct Range {
  int first, end;

  __device__ __forceinline__ bool holds(int column) const { return first <= column && column < end; }
};

// Of the tiles that a block goes over those that some of a warp's queries [i0, i1) see, [begin, end), and of these
// those that they see whole, [full_begin, full_end): Band's verdict once and for all. Tile n is of kKeys keys from j0 +
// n * kKeys on.
struct TileRange {
  int begin, full_begin, full_end, end;

  template <int kKeys>
  __device__ __forceinline__ static TileRange of(const Band& band, int64_t i0, int64_t i1, int64_t j0) {
    if (i0 >= i1) return {0, 0, 0, 0};
    const auto floor = [](int64_t x) { return near((x < 0 ? x - kKeys + 1 : x) / kKeys); };
    const auto ceil = [&](int64_t x) { return floor(x + kKeys - 1); };
    return {floor(band.first(i0) - j0), ceil(band.first(i1 - 1) - j0), floor(band.end(i0) - j0),
            ceil(band.end(i1 - 1) - j0)};
  }
  __device__ __forceinline__ Verdict verdict(int tile) const {
    if (tile < begin || tile >= end) return Verdict::skip;
    return full_begin <= tile && tile < full_end ? Verdict::full : Verdict::partial;
  }
};

// Relative to j0 the keys that query i sees; relative to i0 the queries that see key j.
__device__ __forceinline__ Range keys_of(const Band& band, int64_t i, int64_t j0) {
  return {near(band.first(i) - j0), near(band.end(i) - j0)};
}
__device__ __forceinline__ Range queries_of(const Band& band, int64_t j, int64_t i0) {
  return {near(band.first_query(j) - i0), j < band.kv_len ? near(band.end_query(j + 1) - i0) : 0};
}

__device__ __forceinline__ int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::boolean: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32: return 4;
    default: return 8;
  }
}

// The score of one query head of a sequence, and its part of the mask.
struct HeadScores {
  Score<float> score;
  bool plain;  // q.k is the score, in units of scale
  float unit;  // of the scores that score() makes
  int64_t q_offset;
  const char* mask;  // of query 0 and key 0; null: absent
  int64_t mask_row, mask_key;
  DType mask_dtype;

  // What the mask adds to a score; kHidden hides.
  __device__ __forceinline__ float bias(int64_t i, int64_t j) const {
    if (!mask) return 0;
    const char* at = mask + (i * mask_row + j * mask_key) * bytes_of(mask_dtype);
    switch (mask_dtype) {
      case DType::boolean: return *at ? 0 : kHidden;
      case DType::f16: return __half2float(*reinterpret_cast<const __half*>(at));
      case DType::bf16: return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
      case DType::f32: return *reinterpret_cast<const float*>(at);
      default: return static_cast<float>(*reinterpret_cast<const double*>(at));
    }
  }

  // The score of a key that the band shows, from score.content(q.k).
  __device__ __forceinline__ float at(float content, int64_t i, int64_t j) const {
    return score(content, static_cast<float>(i + q_offset - j), bias(i, j));
  }
};

__device__ __forceinline__ HeadScores head_scores(const AttentionParams& p, const Band& band, int64_t b, int64_t h) {
  const char* mask = static_cast<const char*>(p.mask.data);
  if (mask) mask += p.mask.offset(b, h, 0) * bytes_of(p.mask_dtype);
  const Score<float> score = score_of<float>(p, h);
  const bool plain = p.scale_in_exp();
  return {score,
          plain,
          plain ? score.scale : 1,
          band.q_offset,
          mask,
          p.mask.row,
          p.mask.dim,
          p.mask_dtype};
}

// Products become scores, in units of head.unit: queries i0, i0 + 1, ... of the sequence, which has q_len, against keys
// j0, ...
template <int kRows, int kColumns>
__device__ __forceinline__ void score(Fragment<kRows, kColumns>& s, const HeadScores& head, const Band& band,
                                      int64_t q_len, int64_t i0, int64_t j0, Verdict verdict) {
  if (head.plain && verdict == Verdict::full) return;

  Range keys[kRows][2];
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int64_t i = i0 + fragment_row(r, h);
      keys[r][h] = i < q_len ? keys_of(band, i, j0) : Range{0, 0};
    }
  if (head.plain) {
    for_each(s, [&](float& x, int r, int c, int h, int e) {
      if (!keys[r][h].holds(fragment_column(c, e))) x = kHidden;
    });
  } else {
    for_each_in_turn(s, [&](float& x, int r, int c, int h, int e) {
      const int column = fragment_column(c, e);
      const bool visible = keys[r][h].holds(column);
      x = visible ? head.at(head.score.content(x), i0 + fragment_row(r, h), j0 + column) : kHidden;
    });
  }
}

}  // namespace flashsoftmax::cuda
