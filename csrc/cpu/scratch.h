// Scratch memory: an Arena hands out a kernel's buffers one after the other from a single allocation.
#pragma once

#include <cstdint>

#include "../mask.h"
#include "vec.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

constexpr INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

class Arena {
 public:
  explicit Arena(void* begin) : begin_(reinterpret_cast<uintptr_t>(begin)), next_(begin_) {}
  // Memory for count elements, aligned to a cache line.
  template <class A> A* take(int64_t count) {
    A* memory = reinterpret_cast<A*>(next_);
    next_ += round_up(count * sizeof(A), 64);
    return memory;
  }
  int64_t bytes() const { return next_ - begin_; }  // taken so far

 private:
  uintptr_t begin_, next_;
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
