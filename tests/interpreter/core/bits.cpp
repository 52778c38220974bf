// Logic, shifts, and fields of bits.
#include "elementwise.h"

namespace interpreter {
namespace {

struct And {
  template <class T> T operator()(T a, T b) const { return T(a & b); }
};
struct Or {
  template <class T> T operator()(T a, T b) const { return T(a | b); }
};
struct Xor {
  template <class T> T operator()(T a, T b) const { return T(a ^ b); }
};
struct Not {
  template <class T> T operator()(T a) const { return T(~a); }
};

template <class F> Flow on_predicates(Warp& w, const Instruction& i, Mask lanes) {
  Mask value, known = w.known(i);
  const Mask a = w.predicate(i.src[0]);
  if constexpr (std::is_same_v<F, Not>) {
    value = ~a;
  } else {
    const Mask b = w.predicate(i.src[1]);
    value = F()(a, b);
    if (!std::is_same_v<F, Xor>)
      known = known_of_two(std::is_same_v<F, Or>, a, b, w.defined[i.src[0]], w.defined[i.src[1]]);
  }
  w.set_predicate(i.dst[0], value, lanes, known);
  return Flow::next;
}

template <int kArity, class F> Decoder logic(F f) {
  return [=](Decoding& d) {
    if (d.statement().modifiers.at(0) != "pred") return same<kArity>(Unsigned(), f)(d);
    d.take("pred");
    d.write(0, Type::pred);
    for (int operand = 1; operand <= kArity; operand++) d.read(operand, Type::pred);
    d.out.execute = on_predicates<F>;
  };
}

struct ShiftLeft {
  template <class T> T operator()(T a, uint32_t n) const { return n < 8 * sizeof(T) ? T(a << n) : T(0); }
};
struct ShiftRight {
  template <class T> T operator()(T a, uint32_t n) const {
    const uint32_t most = 8 * sizeof(T) - 1;
    if constexpr (std::is_signed_v<T>)
      return T(a >> std::min(n, most));
    else
      return n <= most ? T(a >> n) : T(0);
  }
};
template <class F, class... T> Decoder shift(Types<T...> types, F) {
  return [=](Decoding& d) { d.by_type(types, d.take_type(), [&]<class U>(U) { elementwise<U, F, U, uint32_t>(d); }); };
}

// option: the truth table, whose entry 4a + 2b + c is the result for bits a, b, c.
Flow lop3(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t *a = w.cells<uint32_t>(i.src[0]), *b = w.cells<uint32_t>(i.src[1]), *c = w.cells<uint32_t>(i.src[2]);
  uint32_t out[kLanes] = {};
  for (int entry = 0; entry < 8; entry++) {
    if (!(i.option >> entry & 1)) continue;
    const uint32_t fa = entry & 4 ? 0 : ~0u, fb = entry & 2 ? 0 : ~0u, fc = entry & 1 ? 0 : ~0u;
    for (int l = 0; l < kLanes; l++) out[l] |= (a[l] ^ fa) & (b[l] ^ fb) & (c[l] ^ fc);
  }
  store_lanes<uint32_t>(w, i, out, lanes);
  return Flow::next;
}

template <bool kLeft, bool kWrap> struct FunnelShift {
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t n) const {
    const uint64_t both = uint64_t(high) << 32 | low;
    n = kWrap ? n & 31 : std::min(n, 32u);
    return uint32_t(kLeft ? both << n >> 32 : both >> n);
  }
};
void funnel(Decoding& d) {
  const bool left = d.take_one_of({"l", "r"}) == 0, wrap = d.take_one_of({"wrap", "clamp"}) == 0;
  if (!means<uint32_t>(d.take_type())) d.fail("type");
  if (left && wrap)
    elementwise<uint32_t, FunnelShift<true, true>, uint32_t, uint32_t, uint32_t>(d);
  else if (left)
    elementwise<uint32_t, FunnelShift<true, false>, uint32_t, uint32_t, uint32_t>(d);
  else if (wrap)
    elementwise<uint32_t, FunnelShift<false, true>, uint32_t, uint32_t, uint32_t>(d);
  else
    elementwise<uint32_t, FunnelShift<false, false>, uint32_t, uint32_t, uint32_t>(d);
}

struct Permute {
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t selector) const {
    const uint64_t both = uint64_t(high) << 32 | low;
    uint32_t result = 0;
    for (int b = 0; b < 4; b++) {
      const uint32_t which = selector >> 4 * b & 15;
      uint32_t byte = both >> 8 * (which & 7) & 0xff;
      if (which & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, eight times
      result |= byte << 8 * b;
    }
    return result;
  }
};

struct PopCount {
  template <class T> uint32_t operator()(T a) const { return std::popcount(a); }
};
struct LeadingZeros {
  template <class T> uint32_t operator()(T a) const { return std::countl_zero(a); }
};
template <bool kShiftAmount> struct FindLeading {
  template <class T> uint32_t operator()(T a) const {
    auto bits = std::make_unsigned_t<T>(std::is_signed_v<T> && a < 0 ? ~a : a);
    if (bits == 0) return ~0u;
    const uint32_t zeros = std::countl_zero(bits);
    return kShiftAmount ? zeros : 8 * sizeof(T) - 1 - zeros;
  }
};
struct Reverse {
  template <class T> T operator()(T a) const {
    T r = 0;
    for (size_t b = 0; b < 8 * sizeof(T); b++) r |= T(a >> b & 1) << (8 * sizeof(T) - 1 - b);
    return r;
  }
};
struct Extract {
  template <class T> T operator()(T a, uint32_t position, uint32_t length) const {
    using U = std::make_unsigned_t<T>;
    const uint32_t width = 8 * sizeof(T);
    position &= 255, length &= 255;
    const bool negative = std::is_signed_v<T> && length > 0 && (U(a) >> std::min(position + length - 1, width - 1) & 1);
    const U mask = length >= width ? U(~U(0)) : U((U(1) << length) - 1);
    const U field = position < width ? U(a) >> position : 0;
    const uint32_t there = position < width ? width - position : 0;
    const U filled = negative && there < width ? field | U(~U(0)) << there : field;
    return T(negative ? (filled & mask) | ~mask : filled & mask);
  }
};
struct Insert {
  template <class T> T operator()(T a, T b, uint32_t position, uint32_t length) const {
    const uint32_t width = 8 * sizeof(T);
    position &= 255, length &= 255;
    if (position >= width) return b;
    const T mask = (length >= width ? T(~T(0)) : T((T(1) << length) - 1)) << position;
    return T((b & ~mask) | (T(a << position) & mask));
  }
};
struct FieldMask {
  uint32_t operator()(uint32_t position, uint32_t length) const {
    const uint64_t mask = (uint64_t(1) << std::min(length, 32u)) - 1;
    return position < 32 ? uint32_t(mask << position) : 0;
  }
};

template <class F, class... T> Decoder count_bits(Types<T...> types, F) {
  return [=](Decoding& d) { d.by_type(types, d.take_type(), [&]<class U>(U) { elementwise<uint32_t, F, U>(d); }); };
}

}  // namespace

void add_bits(Table& t) {
  t["and"] = logic<2>(And());
  t["or"] = logic<2>(Or());
  t["xor"] = logic<2>(Xor());
  t["not"] = logic<1>(Not());
  t["shl"] = shift(Unsigned(), ShiftLeft());
  t["shr"] = shift(Integers(), ShiftRight());
  t["shf"] = funnel;
  t["lop3"] = [](Decoding& d) {
    if (!means<uint32_t>(d.take_type())) d.fail("type");
    d.write(0, Type::b32);
    for (int operand : {1, 2, 3}) d.read(operand, Type::b32);
    d.out.option = d.immediate(d.operand(4));
    d.out.execute = lop3;
  };
  t["prmt"] = same<3>(Types<uint32_t>(), Permute());
  t["popc"] = count_bits(Types<uint32_t, uint64_t>(), PopCount());
  t["clz"] = count_bits(Types<uint32_t, uint64_t>(), LeadingZeros());
  t["bfind"] = [](Decoding& d) {
    if (d.take("shiftamt")) return count_bits(Wide(), FindLeading<true>())(d);
    count_bits(Wide(), FindLeading<false>())(d);
  };
  t["brev"] = same<1>(Types<uint32_t, uint64_t>(), Reverse());
  t["bfe"] = [](Decoding& d) {
    d.by_type(Wide(), d.take_type(), [&]<class T>(T) { elementwise<T, Extract, T, uint32_t, uint32_t>(d); });
  };
  t["bfi"] = [](Decoding& d) {
    d.by_type(Types<uint32_t, uint64_t>(), d.take_type(),
              [&]<class T>(T) { elementwise<T, Insert, T, T, uint32_t, uint32_t>(d); });
  };
  t["bmsk"] = [](Decoding& d) {
    d.take("clamp");
    same<2>(Types<uint32_t>(), FieldMask())(d);
  };
}

}  // namespace interpreter
