// From the products q.k of a fragment to scores, by the rules of mask.h: which tiles of keys a warp skips or sees
// whole, which elements of a tile are hidden, and what softcap, ALiBi and the mask make of the others.
#pragma once

#include "tile.cuh"

namespace flashsoftmax::cuda {

// Columns [first, end) of a fragment.
struct Range {
  int first, end;

  __device__ __forceinline__ bool holds(int column) const { return first <= column && column < end; }
};

// The tiles of keys that any of the queries [i0, i1) sees, [begin, end), and those that all of them see whole,
// [full_begin, full_end). Tile n has the kKeys keys from j0 + n * kKeys on.
struct TileRange {
  int begin, full_begin, full_end, end;

  template <int kKeys>
  __device__ __forceinline__ static TileRange of(const Band& band, int64_t i0, int64_t i1, int64_t j0) {
    if (i0 >= i1) return {0, 0, 0, 0};
    const auto floor = [](int64_t x) { return clamp_to_int((x < 0 ? x - kKeys + 1 : x) / kKeys); };
    const auto ceil = [&](int64_t x) { return floor(x + kKeys - 1); };
    return {floor(band.first(i0) - j0), ceil(band.first(i1 - 1) - j0), floor(band.end(i0) - j0),
            ceil(band.end(i1 - 1) - j0)};
  }
  __device__ __forceinline__ Verdict verdict(int tile) const {
    if (tile < begin || tile >= end) return Verdict::skip;
    return full_begin <= tile && tile < full_end ? Verdict::full : Verdict::partial;
  }
};

// The keys that query i sees, relative to j0; the queries that see key j, relative to i0.
__device__ __forceinline__ Range keys_of(const Band& band, int64_t i, int64_t j0) {
  return {clamp_to_int(band.first(i) - j0), clamp_to_int(band.end(i) - j0)};
}
__device__ __forceinline__ Range queries_of(const Band& band, int64_t j, int64_t i0) {
  return {clamp_to_int(band.first_query(j) - i0), j < band.kv_len ? clamp_to_int(band.end_query(j + 1) - i0) : 0};
}

// The map's verdict, by all lanes of a warp together.
__device__ __forceinline__ Verdict warp_verdict(const Visibility& visible, int64_t i0, int64_t i1, int64_t j0,
                                                int64_t j1) {
  const MaskMap& map = visible.map;
  const int64_t row = i0 / kCellQueries, key = (visible.first_key + j0) / kCellKeys;
  const int keys = static_cast<int>((visible.first_key + j1 - 1) / kCellKeys - key + 1);
  const int per_head = static_cast<int>((i1 - 1) / kCellQueries - row + 1) * keys;
  const uint8_t* first = map.cells + row * map.cell_row + key * map.cell_key;
  bool some = false, all = true;
#pragma unroll 1
  for (int n = lane_id(); n < per_head * map.heads; n += kWarp) {
    const int64_t at = n / per_head * map.cell_head + n % per_head / keys * map.cell_row + n % keys * map.cell_key;
    const Verdict cell = static_cast<Verdict>(first[at]);
    some = some || cell != Verdict::skip;
    all = all && cell == Verdict::full;
  }
  if (!__any_sync(~0u, some)) return Verdict::skip;
  return __all_sync(~0u, all) ? Verdict::full : Verdict::partial;
}
// The first tile from `tile` on, before `tiles`, of which the mask shows something to the queries [i0, i1); else tiles.
// Tile n has the kKeys keys from j0 + n * kKeys on, as far as there are keys. By all lanes of a warp together.
template <int kKeys>
__device__ __forceinline__ int next_shown(const Visibility& visible, int64_t i0, int64_t i1, int64_t j0, int tile,
                                          int tiles) {
  if (!visible.map) return tile;
#pragma unroll 1
  for (; tile < tiles; tile++) {
    const int64_t j = j0 + int64_t(tile) * kKeys;
    if (warp_verdict(visible, i0, i1, j, min(j + kKeys, visible.band.kv_len)) != Verdict::skip) break;
  }
  return tile;
}

// Of an element of a bias.
__device__ __forceinline__ int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32: return 4;
    default: return 8;
  }
}

// The scores of one query head of one sequence.
struct HeadScores {
  Score<float> score;
  bool plain;  // q.k is the score, in multiples of unit; else scores are computed in full, and unit is 1
  float unit;
  int64_t q_offset;
  const uint16_t* mask;  // bits of the map of the mask, at query 0 and key 0; null if absent
  const char* bias;      // at query 0 and key 0; null if absent
  int64_t mask_row, mask_key, bias_row, bias_key;
  DType bias_dtype;

  // What is added to a score. It is kHidden where the mask hides the key.
  __device__ __forceinline__ float bias_at(int64_t i, int64_t j) const {
    if (mask && !(mask[uint64_t(i) / kCellQueries * mask_row + j * mask_key] >> uint32_t(i) % kCellQueries & 1))
      return kHidden;
    if (!bias) return 0;
    const char* at = bias + (i * bias_row + j * bias_key) * bytes_of(bias_dtype);
    switch (bias_dtype) {
      case DType::f16: return __half2float(*reinterpret_cast<const __half*>(at));
      case DType::bf16: return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
      case DType::f32: return *reinterpret_cast<const float*>(at);
      default: return bias_of(*reinterpret_cast<const double*>(at));
    }
  }

  // The score of a key within the band, from content = score.content(q.k). full: the mask need not be asked.
  __device__ __forceinline__ float at(float content, int64_t i, int64_t j, bool full = false) const {
    return score(content, static_cast<float>(i + q_offset - j), full ? 0 : bias_at(i, j));
  }
};

__device__ __forceinline__ HeadScores head_scores(const AttentionParams& args, const Sequence& seq, int64_t h) {
  const uint16_t* mask = static_cast<const uint16_t*>(args.mask.data);  // of the map: with_map
  if (mask) mask += args.mask.offset(seq.index, h, 0) + seq.first_key * args.mask.dim;
  const char* bias = static_cast<const char*>(args.bias.data);
  if (bias) bias += (args.bias.offset(seq.index, h, 0) + seq.first_key * args.bias.dim) * bytes_of(args.bias_dtype);
  const Score<float> score = score_of<float>(args, seq.index, h);
  const bool plain = args.scale_in_exp();
  return {score,         plain,         plain ? score.scale : 1, seq.band.q_offset, mask,           bias,
          args.mask.row, args.mask.dim, args.bias.row,           args.bias.dim,     args.bias_dtype};
}

// Plain scores: hides the columns outside `visible` of each row.
template <int kStrips, int kColumns>
__device__ __forceinline__ void hide(Fragment<kStrips, kColumns>& s, const Range (&visible)[kStrips][2]) {
  for_each(s, [&](float& x, int r, int c, int h, int e) {
    if (!visible[r][h].holds(fragment_column(c, e))) x = kHidden;
  });
}

// Other scores: replaces products x by score(x, r, h, column), and hides the columns outside `visible`.
template <int kStrips, int kColumns, class ScoreOf>
__device__ __forceinline__ void products_to_scores(Fragment<kStrips, kColumns>& s, const Range (&visible)[kStrips][2],
                                                   ScoreOf&& score) {
  for_each_rotating(s, [&](float& x, int r, int c, int h, int e) {
    const int column = fragment_column(c, e);
    x = visible[r][h].holds(column) ? score(x, r, h, column) : kHidden;
  });
}

}  // namespace flashsoftmax::cuda
