// From q.k to the score, in the layout S^T [key][query]: queries lie in the vector lanes. A panel is the queries that
// one pass of the micro-kernel takes side by side, a few vectors of them.
#pragma once

#include "pack.h"
#include "product.h"
#include "vec_math.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

constexpr int64_t kMaxTileKeys = 256;

// Keys [begin, end) of a tile whose first key is j0.
struct KeyRange {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
  // Those that any of the queries [i0, i1) sees; begin is rounded down to a multiple of kRows.
  KeyRange seen(const Band& band, int64_t i0, int64_t i1, int64_t j0) const {
    return {max(begin, band.first(i0) - j0) / kRows * kRows, min(end, band.end(i1 - 1) - j0)};
  }
  // Those that each of the queries sees, cut to whole multiples of kRows. If there are none, begin = end.
  KeyRange seen_by_all(const Band& band, int64_t i0, int64_t i1, int64_t j0) const {
    int64_t first = round_up(max(begin, band.first(i1 - 1) - j0), kRows);
    int64_t last = max<int64_t>(0, min(end, band.end(i0) - j0)) / kRows * kRows;
    return first < last ? KeyRange{first, last} : KeyRange{end, end};
  }
};

// Packs rows [i, i + rows) and keys [j, j + keys) of the bias into tile [rows][stride], as numbers to add to the
// scores. It is -inf where the mask hides the key, and 0 elsewhere if there is no bias.
template <class A>
void pack_bias(const AttentionParams& p, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t rows, int64_t j,
               int64_t keys, int64_t stride, A* tile) {
  auto pack_as = [&](auto element) {
    using U = decltype(element);
    pack(Rows<U>{at<U>(p.bias, b, h, i) + (s.first_key + j) * p.bias.dim, p.bias.row, p.bias.dim}, 0, rows, rows, keys,
         stride, tile);
  };
  if (!p.bias.data)
    std::memset(static_cast<void*>(tile), 0, rows * stride * sizeof(A));
  else if (p.bias_dtype == DType::f16)
    pack_as(f16());
  else if (p.bias_dtype == DType::bf16)
    pack_as(bf16());
  else if (p.bias_dtype == DType::f32)
    pack_as(float());
  else
    pack_as(double());
  if (!p.mask.data) return;
  for (int64_t r = 0; r < rows; r++) {
    const bool* shown = at<bool>(p.mask, b, h, i + r) + (s.first_key + j) * p.mask.dim;
    for (int64_t n = 0; n < keys; n++)
      if (!shown[n * p.mask.dim]) tile[r * stride + n] = A(kHidden);
  }
}

// The scores of a panel of `cols` vectors: queries [i0, i0 + queries) of one head against keys [j0, j0 + keys).
template <class A, int cols> class PanelScores {
  using V = Vec<A>;
  static constexpr int64_t panel = cols * V::lanes;

 public:
  // Elements of mask_scratch, which is only used where there is a mask.
  static int64_t mask_elements(const AttentionParams& p) { return p.has_mask() ? 2 * panel * kMaxTileKeys : 0; }

  PanelScores(Score<A> score, const AttentionParams& p, const Sequence& s, int64_t b, int64_t h, int64_t i0,
              int64_t queries, int64_t j0, int64_t keys, A* mask_scratch)
      : score_(score) {
    A first[panel], end[panel];
    for (int64_t q = 0; q < panel; q++) {
      first[q] = A(min(s.band.first(i0 + q) - j0, kMaxTileKeys));
      end[q] = q < queries ? A(max<int64_t>(min(s.band.end(i0 + q) - j0, keys), 0)) : A(0);
    }
    unroll<cols>([&](auto c) {
      first_[c] = V::load(first + c * V::lanes);
      end_[c] = V::load(end + c * V::lanes);
      distance_[c] = V::iota() + V(A(i0 + c * V::lanes + s.band.q_offset - j0));
    });
    if (p.has_mask()) {
      A* rows = mask_scratch;                         // [panel][kMaxTileKeys]
      A* bias = mask_scratch + panel * kMaxTileKeys;  // [kMaxTileKeys][panel]
      std::memset(static_cast<void*>(rows), 0, panel * kMaxTileKeys * sizeof(A));
      pack_bias(p, s, b, h, i0, queries, j0, keys, kMaxTileKeys, rows);
      transpose(rows, kMaxTileKeys, panel, kMaxTileKeys, bias, panel);
      bias_ = bias;
    }
  }

  INLINE V content(V dot) const { return score_.content(dot); }
  INLINE V content_slope(V content) const { return score_.content_slope(content); }

  // The score of key j0 + j for the queries in vector c; -inf where the key is hidden.
  template <class C> INLINE V operator()(int64_t j, C c, V content) const {
    V key = V(A(j));
    V bias = bias_ ? V::load(bias_ + j * panel + c * V::lanes) : V(A(0));
    V score = score_(content, distance_[c] - key, bias);
    return select((first_[c] <= key) & (key < end_[c]), score, V(kHidden));
  }

 private:
  Score<A> score_;
  V first_[cols], end_[cols];  // visible keys, counted from j0
  V distance_[cols];           // i + q_offset - j0
  const A* bias_ = nullptr;    // [keys][panel]
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
