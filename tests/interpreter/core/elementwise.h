// Instructions in which each lane computes by itself.
#pragma once

#include <immintrin.h>

#include <array>
#include <utility>

#include "machine.h"
#include "text.h"
#include "translator.h"

namespace interpreter {

// Sets the rounding mode and the flushing of subnormal numbers in its scope. csr 0: the default.
class MathMode {
 public:
  explicit MathMode(uint32_t csr) : csr_(csr) {
    if (csr_) set(csr_);
  }
  ~MathMode() {
    if (csr_) set(kUsual);
  }
  static constexpr uint32_t kUsual = 0x1f80;

 private:
  static void set(uint32_t csr) {
    asm volatile("" ::: "memory");
    _mm_setcsr(csr);
    asm volatile("" ::: "memory");
  }
  uint32_t csr_;
};

// .rn .rz .rm .rp .ftz .sat. Also .approx and .full, which change nothing: approximations are computed exactly.
void take_float_modifiers(Decoding& d);

template <class C> void blend(C* to, const C* from, Mask lanes) {
  if (lanes == kAllLanes) {
    std::memcpy(to, from, kLanes * sizeof(C));
  } else {
    for (int l = 0; l < kLanes; l++) to[l] = lanes >> l & 1 ? from[l] : to[l];
  }
}

template <class C> void store_lanes(Warp& w, const Instruction& i, const C* from, Mask lanes) {
  blend(w.cells<C>(i.dst[0]), from, lanes);
  w.define(i.dst[0], lanes, w.known(i));
}

// dst = F(sources), of types R and A...
template <class R, class F, class... A> Flow run_elementwise(Warp& w, const Instruction& i, Mask lanes) {
  Cell<R> out[kLanes];
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    const std::tuple<const Cell<A>*...> from{w.cells<A>(i.src[kIndex])...};
    const MathMode mode(i.csr);
    for (int l = 0; l < kLanes; l++) out[l] = to_cell<R>(R(F()(from_cell<A>(std::get<kIndex>(from)[l])...)));
  }(std::index_sequence_for<A...>());
  if constexpr (std::is_same_v<R, float>)
    if (i.option == 1)  // .sat
      for (int l = 0; l < kLanes; l++) {
        const float x = from_cell<float>(out[l]);
        out[l] = to_cell<float>(x > 0 ? (x < 1 ? x : 1) : 0);
      }
  store_lanes<Cell<R>>(w, i, out, lanes);
  return Flow::next;
}

template <class R, class F, class... A> void elementwise(Decoding& d) {
  d.write(0, Decoding::type_of<R>());
  size_t operand = 1;
  (d.read(operand++, Decoding::type_of<A>()), ...);
  d.out.execute = run_elementwise<R, F, A...>;
}

// An instruction (T, ..., T) -> T for each of these types.
template <int kArity, class... T, class F> Decoder same(Types<T...> types, F) {
  return [=](Decoding& d) {
    take_float_modifiers(d);
    d.by_type(types, d.take_type(), [&]<class U>(U) {
      if (d.out.option && !std::is_same_v<U, float>) d.fail("sat");
      if constexpr (kArity == 1) elementwise<U, F, U>(d);
      if constexpr (kArity == 2) elementwise<U, F, U, U>(d);
      if constexpr (kArity == 3) elementwise<U, F, U, U, U>(d);
    });
  };
}

// The same for all integers and floats.
template <int kArity, class F> Decoder numbers(F f) {
  return [=](Decoding& d) {
    same<kArity>(
        Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double, f16, bf16, f16x2, bf16x2>(),
        f)(d);
  };
}

// The lanes in which `a and b`, or `a or b`, is initialised: a false a makes `a and b` false whatever b is.
inline Mask known_of_two(bool is_or, Mask a, Mask b, Mask known_a, Mask known_b) {
  return is_or ? (known_a & known_b) | (known_a & a) | (known_b & b)
               : (known_a & known_b) | (known_a & ~a) | (known_b & ~b);
}

}  // namespace interpreter
