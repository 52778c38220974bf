// Arithmetic: what each lane computes by itself.
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
// The result is NaN if both operands are; with kNaN, if either is.
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

// add.cc, addc, sub.cc, subc. The carry has a register of its own; a borrow of a subtraction sets it to 1.
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

// mad.cc, madc: c plus the low (option & 2) or high half of a product. option & 1: .cc; negated: adds the carry.
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

// 2^x in double, more precise than a float.
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
}

}  // namespace interpreter
