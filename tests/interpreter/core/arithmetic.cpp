// Arithmetic, logic, comparison and selection: what each lane does by itself.
#include <immintrin.h>

#include <tuple>
#include <utility>

#include "elementwise.h"

namespace interpreter {
namespace {

// ------------------------------------------------------------------------------------------- what float types share

template <class T> Pair<T> pairwise(Pair<T> a, auto f) { return {T(f(a.low)), T(f(a.high))}; }
template <class T> Pair<T> pairwise(Pair<T> a, Pair<T> b, auto f) { return {T(f(a.low, b.low)), T(f(a.high, b.high))}; }

struct Add {
  template <class T> T operator()(T a, T b) const {
    if constexpr (is_pair<T>)
      return pairwise(a, b, *this);
    else if constexpr (is_half<T>)
      return T(double(a) + double(b));
    else
      return T(a + b);
  }
};
struct Sub {
  template <class T> T operator()(T a, T b) const {
    if constexpr (is_pair<T>)
      return pairwise(a, b, *this);
    else if constexpr (is_half<T>)
      return T(double(a) - double(b));
    else
      return T(a - b);
  }
};
struct Mul {
  template <class T> T operator()(T a, T b) const {
    if constexpr (is_pair<T>)
      return pairwise(a, b, *this);
    else if constexpr (is_half<T>)
      return T(double(a) * double(b));
    else
      return T(a * b);
  }
};
struct Fma {
  template <class T> T operator()(T a, T b, T c) const {
    if constexpr (is_pair<T>)
      return {operator()(a.low, b.low, c.low), operator()(a.high, b.high, c.high)};
    else if constexpr (is_half<T>)
      return T(double(a) * double(b) + double(c));
    else if constexpr (std::is_same_v<T, float>)
      return __builtin_fmaf(a, b, c);
    else
      return __builtin_fma(a, b, c);
  }
};
// A NaN counts only where both are NaN, or where kNaN says so.
template <bool kMax, bool kNaN = false> struct Extreme {
  template <class T> T operator()(T a, T b) const {
    if constexpr (is_pair<T>) {
      return pairwise(a, b, *this);
    } else if constexpr (is_float<T>) {
      const double x = a, y = b;
      if (x != x || y != y) {
        if (kNaN || (x != x && y != y)) return T(std::numeric_limits<float>::quiet_NaN());
        return x != x ? b : a;
      }
      if (x == y) return std::signbit(x) == kMax ? b : a;
      return (x > y) == kMax ? a : b;
    } else {
      return (a > b) == kMax ? a : b;
    }
  }
  float operator()(float x, float y) const {
    const bool x_nan = x != x, y_nan = y != y;
    float r = kMax ? (x > y ? x : y) : (x < y ? x : y);
    r = x == y ? (std::signbit(x) == kMax ? y : x) : r;
    r = y_nan ? x : r;
    r = x_nan ? y : r;
    if (kNaN) r = x_nan || y_nan ? std::numeric_limits<float>::quiet_NaN() : r;
    return r;
  }
};
struct Neg {
  template <class T> T operator()(T a) const {
    if constexpr (is_pair<T>)
      return pairwise(a, *this);
    else if constexpr (is_float<T>)
      return std::bit_cast<T>(Bits<T>(std::bit_cast<Bits<T>>(a) ^ Bits<T>(1) << (8 * sizeof(T) - 1)));
    else
      return T(-a);
  }
};
struct Abs {
  template <class T> T operator()(T a) const {
    if constexpr (is_pair<T>)
      return pairwise(a, *this);
    else if constexpr (is_float<T>)
      return std::bit_cast<T>(Bits<T>(std::bit_cast<Bits<T>>(a) & ~(Bits<T>(1) << (8 * sizeof(T) - 1))));
    else
      return T(a < 0 ? -a : a);
  }
};

// --------------------------------------------------------------------------------------------------------- entries

// An instruction of some types, T, ..., T -> T.
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

// The same of integers and floats, whose modifiers differ.
template <int kArity, class F> Decoder numbers(F f) {
  return [=](Decoding& d) {
    same<kArity>(
        Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double, f16, bf16, f16x2, bf16x2>(),
        f)(d);
  };
}

template <class T> struct Twice;
template <> struct Twice<uint16_t> {
  using type = uint32_t;
};
template <> struct Twice<int16_t> {
  using type = int32_t;
};
template <> struct Twice<uint32_t> {
  using type = uint64_t;
};
template <> struct Twice<int32_t> {
  using type = int64_t;
};
template <> struct Twice<uint64_t> {
  using type = unsigned __int128;
};
template <> struct Twice<int64_t> {
  using type = __int128;
};
using Narrow = Types<uint16_t, int16_t, uint32_t, int32_t>;

struct MulWide {
  template <class T> typename Twice<T>::type operator()(T a, T b) const { return typename Twice<T>::type(a) * b; }
};
struct MulHigh {
  template <class T> T operator()(T a, T b) const {
    using W = typename Twice<T>::type;
    return T(W(a) * W(b) >> (8 * sizeof(T)));
  }
};
struct MadWide {
  template <class T, class W> W operator()(T a, T b, W c) const { return W(W(a) * W(b) + c); }
};
struct MadLow {
  template <class T> T operator()(T a, T b, T c) const { return T(T(a * b) + c); }
};
struct MadHigh {
  template <class T> T operator()(T a, T b, T c) const { return T(MulHigh()(a, b) + c); }
};

void multiply(Decoding& d) {
  if (d.take("wide")) {
    d.by_type(Narrow(), d.take_type(), [&]<class T>(T) { elementwise<typename Twice<T>::type, MulWide, T, T>(d); });
  } else if (d.take("hi")) {
    same<2>(Integers(), MulHigh())(d);
  } else {
    d.take("lo");
    numbers<2>(Mul())(d);
  }
}

void multiply_carries(Decoding& d, bool carry_in);

void multiply_add(Decoding& d) {
  for (const std::string& modifier : d.statement().modifiers)
    if (modifier == "cc") return multiply_carries(d, false);
  if (d.take("wide")) {
    d.by_type(Narrow(), d.take_type(), [&]<class T>(T) {
      using W = typename Twice<T>::type;
      elementwise<W, MadWide, T, T, W>(d);
    });
  } else if (d.take("hi")) {
    same<3>(Integers(), MadHigh())(d);
  } else if (d.take("lo")) {
    same<3>(Integers(), MadLow())(d);
  } else {
    same<3>(Types<float, double>(), Fma())(d);
  }
}

struct Mad24 {
  template <class T> T operator()(T a, T b, T c) const { return T((a << 8 >> 8) * (b << 8 >> 8) + c); }
};
struct Mul24 {
  template <class T> T operator()(T a, T b) const { return T((a << 8 >> 8) * (b << 8 >> 8)); }
};
struct Sad {
  template <class T> T operator()(T a, T b, T c) const { return T(c + (a < b ? b - a : a - b)); }
};

struct Div {
  template <class T> T operator()(T a, T b) const {
    if constexpr (is_pair<T>) {
      return pairwise(a, b, *this);
    } else if constexpr (is_float<T>) {
      return T(a / b);
    } else {
      if (b == 0) return T(~T(0));
      return std::is_signed_v<T> && b == T(-1) ? T(-a) : T(a / b);
    }
  }
};
struct Rem {
  template <class T> T operator()(T a, T b) const {
    if (b == 0) return a;
    return std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
  }
};

struct AddSat {
  int32_t operator()(int32_t a, int32_t b) const {
    return std::clamp<int64_t>(int64_t(a) + b, std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max());
  }
};

// add.cc, addc, sub.cc, subc: the carry is a register of its own. kSub: a - b, where a borrow is a carry of 1.
template <class T, bool kSub> Flow with_carry(Warp& w, const Instruction& i, Mask lanes) {
  const Cell<T>*a = w.cells<T>(i.src[0]), *b = w.cells<T>(i.src[1]);
  Cell<T>* to = w.cells<T>(i.dst[0]);
  Mask& carry = w.predicate(w.block->kernel.carry);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const unsigned __int128 x = T(a[l]), y = T(b[l]), in = i.negated ? carry >> l & 1 : 0;
    const unsigned __int128 sum = kSub ? x - y - in : x + y + in;
    to[l] = T(sum);
    if (i.option) carry = (carry & ~(1u << l)) | (uint32_t(sum >> (8 * sizeof(T)) & 1) << l);
  }
  w.define(i.dst[0], lanes, w.known(i));
  return Flow::next;
}

template <bool kSub> void carries(Decoding& d, bool carry_in) {
  d.out.negated = carry_in;
  d.out.option = d.take("cc");
  d.by_type(Wide(), d.take_type(), [&]<class T>(T) {
    const Type type = Decoding::type_of<T>();
    d.write(0, type);
    d.read(1, type);
    d.read(2, type);
    d.out.execute = with_carry<std::make_unsigned_t<T>, kSub>;
  });
}

// mad.cc, madc: the low (option 2) or the high half of a product, plus c, with a carry.
template <class T> Flow multiply_with_carry(Warp& w, const Instruction& i, Mask lanes) {
  using U = std::make_unsigned_t<T>;
  using W = typename Twice<T>::type;
  const Cell<T>*a = w.cells<T>(i.src[0]), *b = w.cells<T>(i.src[1]), *c = w.cells<T>(i.src[2]);
  Cell<T> out[kLanes];
  Mask& carry = w.predicate(w.block->kernel.carry);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const W product = W(T(a[l])) * W(T(b[l]));
    const unsigned __int128 term = U(i.option & 2 ? product : product >> (8 * sizeof(T)));
    const unsigned __int128 sum = term + U(c[l]) + (i.negated ? carry >> l & 1 : 0);
    out[l] = U(sum);
    if (i.option & 1) carry = (carry & ~(1u << l)) | (uint32_t(sum >> (8 * sizeof(T)) & 1) << l);
  }
  store_lanes<Cell<T>>(w, i, out, lanes);
  return Flow::next;
}

void multiply_carries(Decoding& d, bool carry_in) {
  d.out.negated = carry_in;
  const int half = d.take_one_of({"hi", "lo"});
  if (half < 0) d.fail("mad with a carry");
  d.out.option = 2 * half + d.take("cc");
  d.by_type(Wide(), d.take_type(), [&]<class T>(T) {
    d.write(0, Decoding::type_of<T>());
    for (int operand : {1, 2, 3}) d.read(operand, Decoding::type_of<T>());
    d.out.execute = multiply_with_carry<T>;
  });
}

template <bool kSub> void add_or_sub(Decoding& d) {
  for (const std::string& modifier : d.statement().modifiers)
    if (modifier == "cc") return carries<kSub>(d, false);
  if (d.statement().modifiers[0] == "sat" && d.statement().modifiers[1] == "s32" && !kSub) {
    d.take("sat");
    return same<2>(Types<int32_t>(), AddSat())(d);
  }
  if constexpr (kSub)
    numbers<2>(Sub())(d);
  else
    numbers<2>(Add())(d);
}

template <bool kMax> void extreme(Decoding& d) {
  if (d.take("NaN")) return same<2>(Floats(), Extreme<kMax, true>())(d);
  numbers<2>(Extreme<kMax>())(d);
}

// ----------------------------------------------------------------------------------------------------------- bits

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

// The lanes in which the value of `a and b`, or of `a or b`, is known: one of the two may decide it alone.
Mask known_of_two(bool is_or, Mask a, Mask b, Mask known_a, Mask known_b) {
  return is_or ? (known_a & known_b) | (known_a & a) | (known_b & b)
               : (known_a & known_b) | (known_a & ~a) | (known_b & ~b);
}

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

// Bit by bit the table's entry for (a, b, c).
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

// Sums of products of bytes.
template <class A, class B> struct Dot4 {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    for (int k = 0; k < 4; k++) c += int32_t(A(a >> 8 * k)) * int32_t(B(b >> 8 * k));
    return c;
  }
};
void dot4(Decoding& d) {
  const Type a = d.take_type(), b = d.take_type();
  if (a == Type::u32 && b == Type::u32)
    elementwise<uint32_t, Dot4<uint8_t, uint8_t>, uint32_t, uint32_t, uint32_t>(d);
  else if (a == Type::s32 && b == Type::s32)
    elementwise<uint32_t, Dot4<int8_t, int8_t>, uint32_t, uint32_t, uint32_t>(d);
  else if (a == Type::u32)
    elementwise<uint32_t, Dot4<uint8_t, int8_t>, uint32_t, uint32_t, uint32_t>(d);
  else
    elementwise<uint32_t, Dot4<int8_t, uint8_t>, uint32_t, uint32_t, uint32_t>(d);
}

// ----------------------------------------------------------------------------------------------------- transcendental

// 2^x in double, to more digits than a float has.
inline double exp2_of(double x) {
  x = std::min(std::max(x, -1100.0), 1100.0);
  const double n = std::nearbyint(x), t = (x - n) * 0.69314718055994530942;
  double p = 1.0 / 362880;
  for (double inverse_factorial : {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    p = p * t + inverse_factorial;
  const double half = std::bit_cast<double>(uint64_t(int64_t(n / 2) + 1023) << 52);
  const double rest = std::bit_cast<double>(uint64_t(int64_t(n) - int64_t(n / 2) + 1023) << 52);
  return p * half * rest;
}
struct Exp2 {
  float operator()(float x) const { return x != x ? x : float(exp2_of(x)); }
  template <class T> T operator()(T x) const {
    if constexpr (is_pair<T>)
      return pairwise(x, *this);
    else
      return T(exp2_of(double(x)));
  }
};
struct Log2 {
  float operator()(float x) const { return std::log2(double(x)); }
};
struct Reciprocal {
  template <class T> T operator()(T x) const { return T(1) / x; }
};
struct SquareRoot {
  template <class T> T operator()(T x) const { return std::sqrt(x); }
};
struct ReciprocalRoot {
  template <class T> T operator()(T x) const { return T(1 / std::sqrt(double(x))); }
};
struct Tanh {
  template <class T> T operator()(T x) const {
    if constexpr (is_pair<T>)
      return pairwise(x, *this);
    else
      return T(std::tanh(double(x)));
  }
};
struct Sine {
  float operator()(float x) const { return std::sin(double(x)); }
};
struct Cosine {
  float operator()(float x) const { return std::cos(double(x)); }
};

struct CopySign {
  template <class T> T operator()(T sign, T x) const { return std::copysign(x, sign); }
};

template <int kTest> struct Test {
  template <class T> bool operator()(T x) const {
    switch (kTest) {
      case 0: return std::isfinite(x);
      case 1: return std::isinf(x);
      case 2: return !std::isnan(x);
      case 3: return std::isnan(x);
      case 4: return std::isnormal(x);
      default: return std::fpclassify(x) == FP_SUBNORMAL;
    }
  }
};
template <class T, class F> Flow test(Warp& w, const Instruction& i, Mask lanes) {
  Mask value = 0;
  for (int l = 0; l < kLanes; l++) value |= Mask(F()(from_cell<T>(w.cells<T>(i.src[0])[l]))) << l;
  w.set_predicate(i.dst[0], value, lanes, w.known(i));
  return Flow::next;
}
void test_property(Decoding& d) {
  const int which = d.take_one_of({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  d.by_type(Types<float, double>(), d.take_type(), [&]<class T>(T) {
    const Handler handlers[] = {test<T, Test<0>>, test<T, Test<1>>, test<T, Test<2>>,
                                test<T, Test<3>>, test<T, Test<4>>, test<T, Test<5>>};
    if (which < 0) d.fail("property");
    d.write(0, Type::pred);
    d.read(1, Decoding::type_of<T>());
    d.out.execute = handlers[which];
  });
}

// -------------------------------------------------------------------------------------------- comparison, selection

enum Comparison { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };

template <int kComparison> struct Compare {
  template <class T> bool operator()(T x, T y) const {
    if constexpr (is_half<T>) {
      return operator()(double(x), double(y));
    } else {
      const bool unordered = x != x || y != y;
      switch (kComparison) {
        case eq: return x == y;
        case ne: return x != y && !unordered;
        case lt: return x < y;
        case le: return x <= y;
        case gt: return x > y;
        case ge: return x >= y;
        case equ: return !(x != y) || unordered;
        case neu: return x != y;
        case ltu: return !(x >= y);
        case leu: return !(x > y);
        case gtu: return !(x <= y);
        case geu: return !(x < y);
        case num: return !unordered;
        default: return unordered;
      }
    }
  }
};

template <class T, class F> Mask compare_lanes(Warp& w, const Instruction& i) {
  const Cell<T>*a = w.cells<T>(i.src[0]), *b = w.cells<T>(i.src[1]);
  const MathMode mode(i.csr);
  Mask result = 0;
  for (int l = 0; l < kLanes; l++) result |= F()(from_cell<T>(a[l]), from_cell<T>(b[l])) ? Mask(1) << l : 0;
  return result;
}

// option: how a third predicate is combined, if there is one. 0 not, 1 and, 2 or, 3 xor.
template <class T, class F> Flow set_predicate(Warp& w, const Instruction& i, Mask lanes) {
  Mask p = compare_lanes<T, F>(w, i), q = ~p, known_p = w.known(i), known_q = known_p;
  if (i.option) {
    const Mask c = i.negated ? ~w.predicate(i.src[2]) : w.predicate(i.src[2]);
    if (i.option < 3) {
      const Mask compared = w.defined[i.src[0]] & w.defined[i.src[1]], known_c = w.defined[i.src[2]];
      known_p = known_of_two(i.option == 2, p, c, compared, known_c);
      known_q = known_of_two(i.option == 2, q, c, compared, known_c);
    }
    p = i.option == 1 ? p & c : i.option == 2 ? p | c : p ^ c;
    q = i.option == 1 ? q & c : i.option == 2 ? q | c : q ^ c;
  }
  w.set_predicate(i.dst[0], p, lanes, known_p);
  if (i.dsts > 1) w.set_predicate(i.dst[1], q, lanes, known_q);
  return Flow::next;
}

// The true value is all ones, or 1.0.
template <class T, class F> Flow set_value(Warp& w, const Instruction& i, Mask lanes) {
  const Mask p = compare_lanes<T, F>(w, i);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = p >> l & 1 ? i.option : 0;
  store_lanes<uint32_t>(w, i, out, lanes);
  return Flow::next;
}

template <class T> Handler comparison_handler(Decoding& d, int comparison, bool value) {
  return [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    static const Handler predicates[] = {set_predicate<T, Compare<kIndex>>...};
    static const Handler values[] = {set_value<T, Compare<kIndex>>...};
    if (comparison < 0) d.fail("comparison");
    return value ? values[comparison] : predicates[comparison];
  }(std::make_integer_sequence<int, 14>());
}

int take_comparison(Decoding& d) {
  const int of_unsigned = d.take_one_of({"lo", "ls", "hi", "hs"});
  if (of_unsigned >= 0) return lt + of_unsigned;
  return d.take_one_of({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
}

void setp(Decoding& d) {
  const int comparison = take_comparison(d);
  const int combined = d.take_one_of({"and", "or", "xor"}) + 1;
  take_float_modifiers(d);
  using Compared = Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double, f16, bf16>;
  d.by_type(Compared(), d.take_type(), [&]<class T>(T) {
    d.out.execute = comparison_handler<T>(d, comparison, false);
    const std::string& to = d.operand(0);
    const size_t bar = to.find('|');
    d.write_text(trim(to.substr(0, bar)), Type::pred);
    if (bar != std::string::npos) d.write_text(trim(to.substr(bar + 1)), Type::pred);
    d.read(1, Decoding::type_of<T>());
    d.read(2, Decoding::type_of<T>());
  });
  d.out.option = combined;
  if (combined) d.read_predicate(3, d.out.negated);
}

void set(Decoding& d) {
  const int comparison = take_comparison(d);
  take_float_modifiers(d);
  const Type to = d.take_type();
  if (to != Type::u32 && to != Type::s32 && to != Type::f32) d.fail("type");
  using Compared = Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double, f16, bf16>;
  d.by_type(Compared(), d.take_type(), [&]<class T>(T) {
    d.out.execute = comparison_handler<T>(d, comparison, true);
    d.write(0, to);
    d.read(1, Decoding::type_of<T>());
    d.read(2, Decoding::type_of<T>());
  });
  d.out.option = to == Type::f32 ? 0x3f800000 : ~0u;
}

template <class C> Flow select(Warp& w, const Instruction& i, Mask lanes) {
  const C *a = w.cells<C>(i.src[0]), *b = w.cells<C>(i.src[1]);
  const Mask p = w.predicate(i.src[2]);
  C out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = p >> l & 1 ? a[l] : b[l];
  blend(w.cells<C>(i.dst[0]), out, lanes);
  w.define(i.dst[0], lanes, w.defined[i.src[2]] & ((w.defined[i.src[0]] & p) | (w.defined[i.src[1]] & ~p)));
  return Flow::next;
}

void selp(Decoding& d) {
  const Type type = d.take_type();
  d.write(0, type);
  d.read(1, type);
  d.read(2, type);
  d.read_predicate(3, d.out.negated);
  if (d.out.negated) std::swap(d.out.src[0], d.out.src[1]);
  d.out.execute = bytes(type) == 8 ? select<uint64_t> : select<uint32_t>;
}

struct SelectBySign {
  template <class T> T operator()(T a, T b, int32_t c) const { return c >= 0 ? a : b; }
};

}  // namespace

void add_arithmetic(Table& t) {
  t["add"] = add_or_sub<false>;
  t["sub"] = add_or_sub<true>;
  t["addc"] = [](Decoding& d) { carries<false>(d, true); };
  t["subc"] = [](Decoding& d) { carries<true>(d, true); };
  t["mul"] = multiply;
  t["mad"] = multiply_add;
  t["madc"] = [](Decoding& d) { multiply_carries(d, true); };
  t["mul24"] = [](Decoding& d) {
    d.take("lo");
    same<2>(Types<uint32_t, int32_t>(), Mul24())(d);
  };
  t["mad24"] = [](Decoding& d) {
    d.take("lo");
    same<3>(Types<uint32_t, int32_t>(), Mad24())(d);
  };
  t["sad"] = same<3>(Integers(), Sad());
  t["fma"] = same<3>(Floats(), Fma());
  t["div"] = numbers<2>(Div());
  t["rem"] = same<2>(Integers(), Rem());
  t["min"] = extreme<false>;
  t["max"] = extreme<true>;
  t["neg"] = numbers<1>(Neg());
  t["abs"] = numbers<1>(Abs());

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
  t["dp4a"] = dot4;

  t["ex2"] = same<1>(Types<float, f16, bf16, f16x2, bf16x2>(), Exp2());
  t["lg2"] = same<1>(Types<float>(), Log2());
  t["rcp"] = same<1>(Types<float, double>(), Reciprocal());
  t["sqrt"] = same<1>(Types<float, double>(), SquareRoot());
  t["rsqrt"] = same<1>(Types<float, double>(), ReciprocalRoot());
  t["tanh"] = same<1>(Types<float, f16, bf16, f16x2, bf16x2>(), Tanh());
  t["sin"] = same<1>(Types<float>(), Sine());
  t["cos"] = same<1>(Types<float>(), Cosine());
  t["copysign"] = same<2>(Types<float, double>(), CopySign());
  t["testp"] = test_property;

  t["setp"] = setp;
  t["set"] = set;
  t["selp"] = selp;
  t["slct"] = [](Decoding& d) {
    const Type type = d.take_type();
    if (d.take_type() != Type::s32) d.fail("type");
    d.by_type(Integers(), type, [&]<class T>(T) { elementwise<T, SelectBySign, T, T, int32_t>(d); });
  };
}

}  // namespace interpreter
