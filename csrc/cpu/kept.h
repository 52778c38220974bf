// Which weights are kept, in the layout [key][query] with queries in the vector lanes.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../params.h"
#include "convert.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

constexpr int kBitsLanes = kVectorBytes / sizeof(uint32_t);

// A vector of numbers of 64 bits, for philox.
struct Words {
  using Elements = Native<uint64_t, kVectorBytes>::type;
  Elements v;

  Words() = default;
  INLINE explicit Words(Elements elements) : v(elements) {}
  INLINE explicit Words(uint64_t x) : v(Elements{} + x) {}
  friend INLINE Words operator^(Words a, Words b) { return Words(a.v ^ b.v); }
  friend INLINE Words operator>>(Words a, int bits) { return Words(a.v >> bits); }
  friend INLINE Words multiply_low(Words a, uint32_t b) {
#if FLASHSOFTMAX_VECTOR_BYTES == 64
    return Words(Elements(_mm512_maskz_mul_epu32(0xff, __m512i(a.v), _mm512_set1_epi64(b))));
#elif FLASHSOFTMAX_VECTOR_BYTES == 32
    return Words(Elements(_mm256_mul_epu32(__m256i(a.v), _mm256_set1_epi64x(b))));
#else
    return Words((a.v & 0xffffffff) * b);
#endif
  }
};

// Calls f(row, keep) for keys j, j + 4, ... below j + keys, with j a multiple of 4 and row = 0, 4, ... The bits of lane
// n of keep[k] are all set if the weight of query i + n and key j + row + k is kept, and all 0 otherwise.
template <class F> INLINE void for_each_4_keys(const KeptWeights& kept, int64_t i, int64_t j, int64_t keys, F&& f) {
  Words even, odd;  // queries i, i + 2, ... and i + 1, i + 3, ...
  unroll<kBitsLanes / 2>([&](auto n) { even.v[n()] = uint32_t(i) + 2 * n(); });
  odd.v = even.v + 1;
  const Bits limit = Bits{} + kept.limit;
  for (int64_t row = 0; row < keys; row += 4) {
    Words x[4], y[4];
    kept.words(even, uint32_t(j + row), x);
    kept.words(odd, uint32_t(j + row), y);
    Bits keep[4];
    unroll<4>([&](auto k) { keep[k] = Bits(Bits((x[k].v & 0xffffffff) | (y[k].v << 32)) > limit); });
    f(row, keep);
  }
}

// Zeroes the weights of a row that are not kept, kBitsLanes queries of kDepth keys.
template <class E> INLINE void drop_row(const Bits* keep, E* weights) {
  uint32_t bits[kBitsLanes];
  std::memcpy(bits, keep, sizeof(bits));
  for (int lane = 0; lane < kBitsLanes; lane++) weights[lane] = bits[lane] ? weights[lane] : E(0);
}
INLINE void drop_row(const Bits* keep, bf16x2* weights) {
  Bits pairs;
  std::memcpy(&pairs, weights, sizeof(pairs));
  pairs &= (keep[0] & 0xffff) | (keep[1] & 0xffff0000);
  std::memcpy(static_cast<void*>(weights), &pairs, sizeof(pairs));
}

// Zeroes the weights [keys / kDepth][queries] of query head h of sequence b that are not kept: those of queries from i
// on and of keys from j on, a multiple of 4. queries is a multiple of kBitsLanes, and there is memory for keys up to a
// multiple of 4.
template <class E>
HOT void drop(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t queries, int64_t j, int64_t keys,
              E* weights) {
  const KeptWeights kept = kept_weights(p, b, h);
  for (int64_t column = 0; column < queries; column += kBitsLanes)
    for_each_4_keys(kept, i + column, j, keys, [&](int64_t row, const Bits(&keep)[4]) {
      unroll<4 / kDepth<E>>(
          [&](auto r) { drop_row(keep + r * kDepth<E>, weights + (row / kDepth<E> + r) * queries + column); });
    });
}

// The factors of the same weights, [keys][queries]: kept_scale where a weight is kept, else 0. j may be any key.
template <class A>
HOT void find_factors(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t queries, int64_t j,
                      int64_t keys, A* factors) {
  const KeptWeights kept = kept_weights(p, b, h);
  const int64_t before = j % 4;  // keys of the first four that lie before j
  for (int64_t column = 0; column < queries; column += kBitsLanes)
    for_each_4_keys(kept, i + column, j - before, before + keys, [&](int64_t row, const Bits(&keep)[4]) {
      unroll<4>([&](auto k) {
        const int64_t key = row + k - before;
        if (key < 0 || key >= keys) return;
        A* to = factors + key * queries + column;
        std::fill_n(to, kBitsLanes, p.kept_scale<A>());
        drop_row(keep + k, to);
      });
    });
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
