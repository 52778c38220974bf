// Copies rows into a cache or a new tensor, and rotates them on the way.
#pragma once

#include "pack.h"
#include "tasks.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// C: the element type of the tables of cosines and sines
template <class T, class C> class CopyRows {
  using A = Accumulate<T>;
  const CopyRowsParams& p;

 public:
  explicit CopyRows(const CopyRowsParams& params) : p(params) {}

  void run(const Runner& runner) const {
    for_each_row(runner, p.batch * p.heads * p.rows,
                 [&](int64_t r) { copy_row(r / p.rows / p.heads, r / p.rows % p.heads, r % p.rows); });
  }

 private:
  void copy_row(int64_t b, int64_t h, int64_t i) const {
    const RowPlace place = row_place(p, b, i);
    if (!place.valid) return;
    const T* from = at<T>(p.from, b, h, i);
    T* to = at<T>(p.to, place.slot, h, place.row);
    if (p.rotary.pairs > 0) rotate(from, to, rotary_position(p.rotary, b, i));
    int64_t d = 2 * p.rotary.pairs;
    if (p.from.dim == 1 && p.to.dim == 1) {
      std::copy(from + d, from + p.dim, to + d);
    } else {
      for (; d < p.dim; d++) to[d * p.to.dim] = from[d * p.from.dim];
    }
  }

  void rotate(const T* from, T* to, int64_t position) const {
    const Rotary& rotary = p.rotary;
    const C *cos = at<C>(rotary.cos, 0, 0, position), *sin = at<C>(rotary.sin, 0, 0, position);
    const int64_t first = rotary.interleaved ? 2 : 1, apart = rotary.interleaved ? 1 : rotary.pairs;
    for (int64_t n = 0; n < rotary.pairs; n++) {
      const int64_t d = n * first, e = d + apart;
      const A x = to_float(from[d * p.from.dim]), y = to_float(from[e * p.from.dim]);
      const A c = to_float(cos[n * rotary.cos.dim]), s = to_float(sin[n * rotary.sin.dim]);
      to[d * p.to.dim] = from_float<T>(x * c - y * s);
      to[e * p.to.dim] = from_float<T>(x * s + y * c);
    }
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
