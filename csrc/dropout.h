// Dropout: which weights are kept. That depends on the seed and on the place of a weight alone: it is never stored, and
// it is the same in the forward and in the backward, whatever the tiles, the threads and the device.
//
// Random words come from Philox-4x32-10 (Salmon et al., 2011), which turns a counter of four words and a key of two
// into four random words. It is called once per head and then for every four keys of a query:
//     h = philox(counter = (offset, batch, query head), key = seed)         seed and offset are two words each
//     x = philox(counter = (key / 4, query, h[2], h[3]), key = h[0], h[1])
// A weight is kept if x[key % 4] > limit.
#pragma once

#include <cstdint>

#include "softmax.h"

namespace flashsoftmax {

// The low half of a, times b.
FLASHSOFTMAX_INLINE uint64_t multiply_low(uint64_t a, uint32_t b) { return uint64_t(uint32_t(a)) * b; }

// Replaces the counter x by random words. W is uint64_t or a vector of such numbers. A word is the low half of a number,
// and the high half may hold anything.
template <class W> FLASHSOFTMAX_INLINE void philox(W (&x)[4], uint32_t key0, uint32_t key1) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; round++) {
    const W a = multiply_low(x[0], 0xD2511F53), b = multiply_low(x[2], 0xCD9E8D57);
    x[0] = (b >> 32) ^ x[1] ^ W(key0);
    x[1] = b;
    x[2] = (a >> 32) ^ x[3] ^ W(key1);
    x[3] = a;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

// The weights of one query head of one sequence that are kept.
struct KeptWeights {
  uint32_t key[2], counter[2];
  uint32_t limit;  // a weight is kept if its word is above this

  // The words of keys j to j + 3, where j is a multiple of 4.
  template <class W> FLASHSOFTMAX_INLINE void words(W query, uint32_t j, W (&x)[4]) const {
    x[0] = W(j / 4);
    x[1] = query;
    x[2] = W(counter[0]);
    x[3] = W(counter[1]);
    philox(x, key[0], key[1]);
  }
  // Bit n of the result tells whether the weight of key j + n is kept, where j is a multiple of 4.
  FLASHSOFTMAX_INLINE uint32_t bits(uint32_t query, uint32_t j) const {
    uint64_t x[4];
    words<uint64_t>(query, j, x);
    uint32_t bits = 0;
    for (int n = 0; n < 4; n++) bits |= uint32_t(uint32_t(x[n]) > limit) << n;
    return bits;
  }
};

FLASHSOFTMAX_INLINE KeptWeights kept_weights(int64_t seed, int64_t offset, int64_t batch, int64_t head,
                                             uint32_t limit) {
  uint64_t x[4] = {uint64_t(offset), uint64_t(offset) >> 32, uint64_t(batch), uint64_t(head)};
  philox(x, uint32_t(seed), uint32_t(uint64_t(seed) >> 32));
  return {{uint32_t(x[0]), uint32_t(x[1])}, {uint32_t(x[2]), uint32_t(x[3])}, limit};
}

// The limit that drops a weight with probability p, 0 < p <= 1.
inline uint32_t dropout_limit(double p) {
  const double words = p * 4294967296.0 + 0.5;  // so many words of 2^32 drop, but at least one
  return words >= 4294967296.0 ? UINT32_MAX : words < 1 ? 0 : uint32_t(words) - 1;
}

}  // namespace flashsoftmax
