// PTX's number types, and the cells that registers store them in.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace interpreter {

// 16-bit floats. Sums and products are exact in double, so they are rounded once.
struct f16 {
  uint16_t bits;

  f16() = default;
  explicit f16(double x) {
    const _Float16 rounded = x;
    bits = x != x ? 0x7fff : std::bit_cast<uint16_t>(rounded);
  }
  operator double() const { return float(std::bit_cast<_Float16>(bits)); }
  static f16 of(float x) {
    f16 to;
    to.bits = x != x ? 0x7fff : std::bit_cast<uint16_t>(_Float16(x));
    return to;
  }
};

struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(double x) {
    // Round to odd first: rounding that to 16 bits gives the same as rounding x directly.
    float near = x;
    if (near != x && x == x && !std::isinf(near)) {
      const uint32_t word = std::bit_cast<uint32_t>(near);
      if (!(word & 1)) near = std::bit_cast<float>(std::fabs(near) < std::fabs(x) ? word + 1 : word - 1);
    }
    bits = of(near).bits;
  }
  operator double() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
  static bf16 of(float x) {
    const uint32_t word = std::bit_cast<uint32_t>(x);
    bf16 to;
    to.bits = x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return to;
  }
};

template <class T> struct Pair {
  T low, high;
};
using f16x2 = Pair<f16>;
using bf16x2 = Pair<bf16>;

template <class T> constexpr bool is_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T> struct IsPair : std::false_type {};
template <class T> struct IsPair<Pair<T>> : std::true_type {};
template <class T> constexpr bool is_pair = IsPair<T>::value;
template <class T> constexpr bool is_float = std::is_floating_point_v<T> || is_half<T>;

// A lane of a register: 32 bits, or 64 for types that need them. Narrower values have zeros above them.
template <class T> using Cell = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <size_t kBytes> struct UnsignedOf;
template <> struct UnsignedOf<1> {
  using type = uint8_t;
};
template <> struct UnsignedOf<2> {
  using type = uint16_t;
};
template <> struct UnsignedOf<4> {
  using type = uint32_t;
};
template <> struct UnsignedOf<8> {
  using type = uint64_t;
};
template <class T> using Bits = typename UnsignedOf<sizeof(T)>::type;

template <class T> T from_cell(Cell<T> cell) { return std::bit_cast<T>(Bits<T>(cell)); }
template <class T> Cell<T> to_cell(T x) { return std::bit_cast<Bits<T>>(x); }

enum class Type : uint8_t {
  none,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  b8,
  b16,
  b32,
  b64,
  b128,
  f16,
  bf16,
  tf32,
  f16x2,
  bf16x2,
  f32,
  f64,
  pred
};

inline int bytes(Type type) {
  switch (type) {
    case Type::u8:
    case Type::s8:
    case Type::b8:
    case Type::pred: return 1;
    case Type::u16:
    case Type::s16:
    case Type::b16:
    case Type::f16:
    case Type::bf16: return 2;
    case Type::u64:
    case Type::s64:
    case Type::b64:
    case Type::f64: return 8;
    case Type::b128: return 16;
    default: return 4;
  }
}
inline bool is_signed(Type t) { return t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64; }

// Whether an instruction's type is T. Untyped bits count as unsigned.
template <class T> bool means(Type type) {
  if constexpr (std::is_same_v<T, uint8_t>) return type == Type::u8 || type == Type::b8;
  if constexpr (std::is_same_v<T, uint16_t>) return type == Type::u16 || type == Type::b16;
  if constexpr (std::is_same_v<T, uint32_t>) return type == Type::u32 || type == Type::b32;
  if constexpr (std::is_same_v<T, uint64_t>) return type == Type::u64 || type == Type::b64;
  if constexpr (std::is_same_v<T, int8_t>) return type == Type::s8;
  if constexpr (std::is_same_v<T, int16_t>) return type == Type::s16;
  if constexpr (std::is_same_v<T, int32_t>) return type == Type::s32;
  if constexpr (std::is_same_v<T, int64_t>) return type == Type::s64;
  if constexpr (std::is_same_v<T, f16>) return type == Type::f16;
  if constexpr (std::is_same_v<T, bf16>) return type == Type::bf16;
  if constexpr (std::is_same_v<T, f16x2>) return type == Type::f16x2;
  if constexpr (std::is_same_v<T, bf16x2>) return type == Type::bf16x2;
  if constexpr (std::is_same_v<T, float>) return type == Type::f32;
  if constexpr (std::is_same_v<T, double>) return type == Type::f64;
  return false;
}

template <class... T> struct Types {};
using Unsigned = Types<uint16_t, uint32_t, uint64_t>;
using Integers = Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>;
using Wide = Types<uint32_t, int32_t, uint64_t, int64_t>;
using Floats = Types<float, double, f16, bf16, f16x2, bf16x2>;

}  // namespace interpreter
