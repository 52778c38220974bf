// Which keys a query sees (Visibility, of Band and MaskMap), and their scores (Score). Kernels read the bias of a float
// mask and the sinks themselves; every other feature is in these, and kernels do not know its name.
#pragma once

#include <cstdint>

#include "softmax.h"

namespace flashsoftmax {

// No bound: far beyond any length, and small enough that the sum of a few of them does not overflow.
constexpr int64_t kUnbounded = int64_t(1) << 60;

FLASHSOFTMAX_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

struct Window {
  int64_t left = kUnbounded, right = kUnbounded;
};

enum class Verdict { skip, partial, full };

// Key j is visible to query i when i + q_offset - left <= j <= i + q_offset + right and 0 <= j < kv_len.
//
// All kernels rely on two promises, which any other rule put here has to keep:
//   - the keys that a query sees are one interval, [first(i), end(i)) (empty if end <= first);
//   - neither end of it falls as i grows.
// So the queries that see a key are an interval too, and a tile is judged by its first and last query alone. Holes in
// the interval (a dilated window, a block mask, a document mask within one sequence) are out of reach of Band: a bool
// mask expresses them (MaskMap), and packed documents are sequences of their own (cu_seqlens).
struct Band {
  int64_t q_offset;
  Window window;
  int64_t kv_len;

  FLASHSOFTMAX_INLINE int64_t first(int64_t i) const { return max<int64_t>(0, i + q_offset - window.left); }
  FLASHSOFTMAX_INLINE int64_t end(int64_t i) const {
    int64_t end = i + q_offset + window.right + 1;
    return end < kv_len ? end : kv_len;
  }
  // The queries that see any of the keys [j0, j1): first_query(j0) <= i < end_query(j1), within the sequence.
  FLASHSOFTMAX_INLINE int64_t first_query(int64_t j0) const { return max<int64_t>(0, j0 - q_offset - window.right); }
  FLASHSOFTMAX_INLINE int64_t end_query(int64_t j1) const { return j1 - q_offset + window.left; }
  // Queries [i0, i1) against keys [j0, j1): nothing visible, or everything, or look at each element.
  FLASHSOFTMAX_INLINE Verdict verdict(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    if (j1 <= first(i0) || j0 >= end(i1 - 1)) return Verdict::skip;
    return j0 >= first(i1 - 1) && j1 <= end(i0) ? Verdict::full : Verdict::partial;
  }
};

// A map of a mask, for one query head of one sequence or for several heads together. It is made before the kernels run,
// so that tiles that the mask hides cost nothing. A cell is kCellQueries x kCellKeys positions, the first at (0, 0).
constexpr int64_t kCellQueries = 16, kCellKeys = 32;
constexpr int64_t kWordsBehind = 32;  // may be read behind the last word of the bits
struct MaskMap {
  const uint8_t* cells = nullptr;  // [heads][cells of queries][cells of keys], Verdicts. Null: nothing is hidden
  // [cells of queries][keys]: bit n of a word says whether query n of the cell sees the key. Null: no mask, or one of
  // floats, which hides by a bias of -inf.
  const uint16_t* bits = nullptr;
  int64_t heads = 1;
  int64_t cell_head = 0, cell_row = 0, cell_key = 0, bits_row = 0, bits_key = 0;  // strides; broadcast axes have 0

  FLASHSOFTMAX_INLINE explicit operator bool() const { return cells != nullptr; }
  // The verdict of all cells that hold any of the queries [i0, i1) and of the keys [j0, j1), which exist.
  FLASHSOFTMAX_INLINE Verdict verdict(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    bool some = false, all = true;
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = i0 / kCellQueries; i * kCellQueries < i1; i++)
        for (int64_t j = j0 / kCellKeys; j * kCellKeys < j1; j++) {
          const Verdict cell = static_cast<Verdict>(cells[h * cell_head + i * cell_row + j * cell_key]);
          some = some || cell != Verdict::skip;
          all = all && cell == Verdict::full;
          if (some && !all) return Verdict::partial;
        }
    return all ? Verdict::full : Verdict::skip;
  }
  // The word of the cell of query i for key j.
  FLASHSOFTMAX_INLINE const uint16_t* word(int64_t i, int64_t j) const {
    return bits + i / kCellQueries * bits_row + j * bits_key;
  }
};

// The verdict of a tile from that of its band and that of the map.
FLASHSOFTMAX_INLINE Verdict joined(Verdict in_band, Verdict in_map) {
  return in_band == Verdict::skip || in_map == Verdict::full ? in_band : in_map;
}

// The keys that queries see: those of the band that the mask does not hide. Queries and keys below exist.
struct Visibility {
  Band band;
  MaskMap map;
  int64_t first_key = 0;  // key 0 is this key of the map

  FLASHSOFTMAX_INLINE Verdict verdict(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    const Verdict in_band = band.verdict(i0, i1, j0, j1);
    if (in_band == Verdict::skip || !map) return in_band;
    return joined(in_band, map.verdict(i0, i1, first_key + j0, first_key + j1));
  }
  // Whether the mask hides the cell of key j from all of the queries [i0, i1). That cell is [cell_begin(j), cell_end(j)).
  FLASHSOFTMAX_INLINE bool hides(int64_t i0, int64_t i1, int64_t j) const {
    return map && map.verdict(i0, i1, first_key + j, first_key + j + 1) == Verdict::skip;
  }
  FLASHSOFTMAX_INLINE int64_t cell_begin(int64_t j) const {
    return (first_key + j) / kCellKeys * kCellKeys - first_key;
  }
  FLASHSOFTMAX_INLINE int64_t cell_end(int64_t j) const { return cell_begin(j) + kCellKeys; }
  // The word of the cell of query i for key j. Those of the next keys follow it at a stride of map.bits_key.
  FLASHSOFTMAX_INLINE const uint16_t* word(int64_t i, int64_t j) const { return map.word(i, first_key + j); }
};

// An element of a float64 mask as a bias in float32. A finite value stays finite, so that only -inf hides a key.
FLASHSOFTMAX_INLINE float bias_of(double x) {
  constexpr double largest = 3.4028234663852886e38;  // of float32
  return static_cast<float>(x > largest && x - x == 0 ? largest : x < -largest && x - x == 0 ? -largest : x);
}

// From q.k to the score, for one query head: the content (scale, softcap), to which ALiBi and the bias of the mask are
// added. The band hides keys after that, by selection.
template <class A> struct Score {
  A scale;
  A softcap;  // 0: off
  A slope;    // of ALiBi; 0: off

  // The score before ALiBi and the mask: dot = q.k, scaled, then soft-capped.
  template <class N> FLASHSOFTMAX_INLINE N content(N dot) const {
    N s = dot * N(scale);
    return softcap == A(0) ? s : N(softcap) * tanh(s / N(softcap));
  }
  // The derivative of content by scale * dot.
  template <class N> FLASHSOFTMAX_INLINE N content_slope(N content) const {
    N t = softcap == A(0) ? N(0) : content / N(softcap);
    return N(1) - t * t;
  }
  // The score, where distance = i + q_offset - j. A bias of -inf hides the key, whatever its content is.
  template <class N> FLASHSOFTMAX_INLINE N operator()(N content, N distance, N bias) const {
    return select(bias == N(kHidden), bias, content - N(slope) * abs(distance) + bias);
  }
};

}  // namespace flashsoftmax
