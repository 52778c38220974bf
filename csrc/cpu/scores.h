// From q.k to the score, in the layout S^T [key][query]: queries lie in the vector lanes. A panel is the queries that
// one pass of the micro-kernel takes side by side, a few vectors of them.
#pragma once

#include "pack.h"
#include "product.h"
#include "vec_math.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

constexpr int64_t kMaxTileKeys = 256;

static_assert(kRows <= kCellKeys);  // so that stretches of keys, rounded to kRows, do not meet

// Keys [begin, end) of a tile whose first key is j0.
struct KeyRange {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
  // From the first to the last that any of the queries [i0, i1) sees; begin is rounded down to a multiple of kRows.
  KeyRange seen(const Visibility& visible, int64_t i0, int64_t i1, int64_t j0) const {
    const KeyRange keys = exactly_seen(visible, i0, i1, j0);
    return keys.count() > 0 ? keys.rounded() : keys;
  }
  // f(keys) for each stretch of keys without a cell that is hidden from all of the queries, rounded likewise.
  template <class F>
  void for_each_stretch(const Visibility& visible, int64_t i0, int64_t i1, int64_t j0, F&& f) const {
    for (KeyRange rest = exactly_seen(visible, i0, i1, j0); rest.count() > 0;) {
      int64_t stop = rest.begin;
      while (stop < rest.end && !visible.hides(i0, i1, j0 + stop))
        stop = min(visible.cell_end(j0 + stop) - j0, rest.end);
      f(KeyRange{rest.begin, stop}.rounded());
      for (rest.begin = stop; rest.count() > 0 && visible.hides(i0, i1, j0 + rest.begin);)
        rest.begin = visible.cell_end(j0 + rest.begin) - j0;
    }
  }

 private:
  KeyRange rounded() const { return {begin / kRows * kRows, end}; }
  KeyRange exactly_seen(const Visibility& visible, int64_t i0, int64_t i1, int64_t j0) const {
    const Band& band = visible.band;
    KeyRange keys{max(begin, band.first(i0) - j0), min(end, band.end(i1 - 1) - j0)};
    while (keys.count() > 0 && visible.hides(i0, i1, j0 + keys.begin))
      keys.begin = visible.cell_end(j0 + keys.begin) - j0;
    while (keys.count() > 0 && visible.hides(i0, i1, j0 + keys.end - 1))
      keys.end = visible.cell_begin(j0 + keys.end - 1) - j0;
    return keys;
  }
};

// Packs rows [i, i + rows) and keys [j, j + keys) of the bias into tile [rows][stride].
template <class A>
void pack_bias(const AttentionParams& p, const Visibility& visible, int64_t b, int64_t h, int64_t i, int64_t rows,
               int64_t j, int64_t keys, int64_t stride, A* tile) {
  auto pack_as = [&](auto element) {
    using U = decltype(element);
    pack(Rows<U>{at<U>(p.bias, b, h, i) + (visible.first_key + j) * p.bias.dim, p.bias.row, p.bias.dim}, 0, rows, rows,
         keys, stride, tile);
  };
  switch (p.bias_dtype) {
    case DType::f16: return pack_as(f16());
    case DType::bf16: return pack_as(bf16());
    case DType::f32: return pack_as(float());
    default: return pack_as(double());
  }
}

// The scores of a panel of `cols` vectors: queries [i0, i0 + queries) of one head against keys [j0, j0 + keys).
template <class A, int cols> class PanelScores {
  using V = Vec<A>;
  static constexpr int64_t panel = cols * V::lanes;

 public:
  // Elements of bias_scratch, which is only used where there is a bias.
  static int64_t bias_elements(const AttentionParams& p) { return p.has_bias() ? 2 * panel * kMaxTileKeys : 0; }

  PanelScores(Score<A> score, const AttentionParams& p, const Visibility& visible, int64_t b, int64_t h, int64_t i0,
              int64_t queries, int64_t j0, int64_t keys, A* bias_scratch)
      : score_(score), words_key_(visible.map.bits_key) {
    const Band& band = visible.band;
    A first[panel], end[panel];
    for (int64_t q = 0; q < panel; q++) {
      first[q] = A(min(band.first(i0 + q) - j0, kMaxTileKeys));
      end[q] = q < queries ? A(max<int64_t>(min(band.end(i0 + q) - j0, keys), 0)) : A(0);
    }
    unroll<cols>([&](auto c) {
      first_[c] = V::load(first + c * V::lanes);
      end_[c] = V::load(end + c * V::lanes);
      distance_[c] = V::iota() + V(A(i0 + c * V::lanes + band.q_offset - j0));
      const int64_t i = min(i0 + c * V::lanes, i0 + queries - 1);
      if (visible.map.bits) words_[c] = visible.word(i, j0), first_bit_[c] = i % kCellQueries;
    });
    if (p.has_bias()) {
      A* rows = bias_scratch;                         // [panel][kMaxTileKeys]
      A* bias = bias_scratch + panel * kMaxTileKeys;  // [kMaxTileKeys][panel]
      std::memset(static_cast<void*>(rows), 0, panel * kMaxTileKeys * sizeof(A));
      pack_bias(p, visible, b, h, i0, queries, j0, keys, kMaxTileKeys, rows);
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
    return hide(j, c, score_(content, distance_[c] - key, bias));
  }
  // The same where scores are plain, or the score is known.
  template <class C> INLINE V hide(int64_t j, C c, V score) const {
    V key = V(A(j));
    score = select((first_[c] <= key) & (key < end_[c]), score, V(kHidden));
    return words_[c] ? select_bits(words_[c][j * words_key_] >> first_bit_[c], score, V(kHidden)) : score;
  }

 private:
  Score<A> score_;
  V first_[cols], end_[cols];         // visible keys, counted from j0
  V distance_[cols];                  // i + q_offset - j0
  const A* bias_ = nullptr;           // [keys][panel]
  const uint16_t* words_[cols] = {};  // in the map, of each vector's queries, from key j0 on; null: it hides no key
  int64_t words_key_;                 // their stride
  int first_bit_[cols] = {};          // in a word, of the vector's first lane
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
