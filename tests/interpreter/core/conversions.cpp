// Moves and conversions.
#include <cfenv>

#include "elementwise.h"

namespace interpreter {

void take_float_modifiers(Decoding& d) {
  constexpr uint32_t kRounding[] = {_MM_ROUND_NEAREST, _MM_ROUND_TOWARD_ZERO, _MM_ROUND_DOWN, _MM_ROUND_UP};
  constexpr uint32_t kFlush = _MM_FLUSH_ZERO_ON | 0x40;  // results, and operands
  uint32_t csr = MathMode::kUsual;
  if (const int rounding = d.take_one_of({"rn", "rz", "rm", "rp"}); rounding >= 0) csr |= kRounding[rounding];
  if (d.take("ftz")) csr |= kFlush;
  d.out.csr = csr == MathMode::kUsual ? 0 : csr;
  d.out.option = d.take("sat");
  d.take_one_of({"approx", "full"});
}

namespace {

struct Same {
  template <class T> T operator()(T x) const { return x; }
};

Flow move_predicate(Warp& w, const Instruction& i, Mask lanes) {
  w.set_predicate(i.dst[0], w.predicate(i.src[0]), lanes, w.known(i));
  return Flow::next;
}

// Packs registers of i.size bytes each into one register. unpack is the reverse.
Flow pack(Warp& w, const Instruction& i, Mask lanes) {
  uint64_t out[kLanes] = {};
  for (int s = 0; s < i.srcs; s++) {
    const uint32_t* from = w.cells<uint32_t>(i.src[s]);
    for (int l = 0; l < kLanes; l++) out[l] |= uint64_t(from[l]) << 8 * i.size * s;
  }
  if (i.wide) {
    store_lanes(w, i, out, lanes);
  } else {
    uint32_t narrow[kLanes];
    for (int l = 0; l < kLanes; l++) narrow[l] = out[l];
    store_lanes(w, i, narrow, lanes);
  }
  return Flow::next;
}

Flow unpack(Warp& w, const Instruction& i, Mask lanes) {
  const Mask known = w.known(i);
  const uint64_t mask = ~uint64_t(0) >> (64 - 8 * i.size);
  uint64_t from[kLanes];
  for (int l = 0; l < kLanes; l++) from[l] = i.wide ? w.cells<uint64_t>(i.src[0])[l] : w.cells<uint32_t>(i.src[0])[l];
  for (int d = 0; d < i.dsts; d++) {
    uint32_t out[kLanes];
    for (int l = 0; l < kLanes; l++) out[l] = from[l] >> 8 * i.size * d & mask;
    blend(w.cells<uint32_t>(i.dst[d]), out, lanes);
    w.define(i.dst[d], lanes, known);
  }
  return Flow::next;
}

void mov(Decoding& d) {
  const Type type = d.take_type();
  d.out.wide = bytes(type) == 8;
  if (type == Type::pred) {
    d.write(0, Type::pred);
    d.read(1, Type::pred);
    d.out.execute = move_predicate;
  } else if (d.is_vector(0) || d.is_vector(1)) {
    const std::vector<std::string> parts = d.elements(d.is_vector(0) ? 0 : 1);
    d.out.size = bytes(type) / parts.size();
    if (d.out.size == 0 || d.out.size > 4 || bytes(type) > 8) d.fail("vector");
    const Type part = d.out.size == 4 ? Type::b32 : d.out.size == 2 ? Type::b16 : Type::b8;
    if (d.is_vector(0)) {
      for (const std::string& text : parts) d.write_text(text, part);
      d.read(1, type);
      d.out.execute = unpack;
    } else {
      d.write(0, type);
      for (const std::string& text : parts) d.read_text(text, part);
      d.out.execute = pack;
    }
  } else if (d.out.wide) {
    elementwise<uint64_t, Same, uint64_t>(d);
  } else {
    elementwise<uint32_t, Same, uint32_t>(d);
  }
}

// ------------------------------------------------------------------------------------------------------------- cvt

enum class Round : uint8_t { none, zero, down, up, even };  // to an integer

template <class S> double rounded(S x, Round round) {
  switch (round) {
    case Round::zero: return std::trunc(double(x));
    case Round::down: return std::floor(double(x));
    case Round::up: return std::ceil(double(x));
    case Round::even: return std::nearbyint(double(x));
    default: return double(x);
  }
}

// Clamps to the range of D. NaN becomes 0, or 2^63 for 64 bits.
template <class D> D float_to_integer(double x) {
  if (x != x) return sizeof(D) == 8 ? D(uint64_t(1) << 63) : D(0);
  const double low = double(std::numeric_limits<D>::min()), high = double(std::numeric_limits<D>::max());
  if (x <= low) return std::numeric_limits<D>::min();
  if (x >= high) return std::numeric_limits<D>::max();
  return D(x);
}

template <class D, class S> D converted(S x, Round round, bool saturate) {
  if constexpr (is_float<S> && is_float<D>) {
    double y = rounded(x, round);
    if (saturate) y = y > 0 ? (y < 1 ? y : 1) : 0;
    if constexpr (std::is_same_v<S, float> && is_half<D>)
      return D::of(float(y));
    else
      return D(y);
  } else if constexpr (is_float<S>) {
    return float_to_integer<D>(rounded(x, round));
  } else if constexpr (is_half<D>) {
    return D(double(x));
  } else if constexpr (is_float<D>) {
    return D(x);
  } else {
    if (saturate) {
      const __int128 wide = x;
      if (wide < __int128(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
      if (wide > __int128(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    }
    return D(x);
  }
}

// i.wide: the source register has 64 bits, whatever the type. i.size: bytes of the destination register.
template <class D, class S> Flow convert(Warp& w, const Instruction& i, Mask lanes) {
  Cell<D> out[kLanes];
  {
    const MathMode mode(i.csr);
    const Round round = Round(i.count);
    const bool saturate = i.option & 1;
    if (i.wide && sizeof(S) < 8) {
      for (int l = 0; l < kLanes; l++)
        out[l] = to_cell<D>(converted<D>(from_cell<S>(uint32_t(w.cells<uint64_t>(i.src[0])[l])), round, saturate));
    } else if (round == Round::none && !saturate) {
      const Cell<S>* from = w.cells<S>(i.src[0]);
      for (int l = 0; l < kLanes; l++) out[l] = to_cell<D>(converted<D>(from_cell<S>(from[l]), Round::none, false));
    } else {
      const Cell<S>* from = w.cells<S>(i.src[0]);
      for (int l = 0; l < kLanes; l++) out[l] = to_cell<D>(converted<D>(from_cell<S>(from[l]), round, saturate));
    }
  }
  // A narrow signed number fills its register.
  if constexpr (sizeof(D) < 4 && std::is_signed_v<D>)
    for (int l = 0; l < kLanes; l++) out[l] = uint32_t(int32_t(D(out[l]))) & (i.size == 2 ? 0xffff : ~0u);
  if constexpr (is_float<D> && !is_half<D>)
    if (i.option & 2)  // .relu
      for (int l = 0; l < kLanes; l++)
        if (from_cell<D>(out[l]) < 0) out[l] = 0;
  store_lanes<Cell<D>>(w, i, out, lanes);
  return Flow::next;
}

// Converts two floats to the halves of a register; the first becomes the upper half.
template <class H> Flow convert_pair(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t *high = w.cells<uint32_t>(i.src[0]), *low = w.cells<uint32_t>(i.src[1]);
  uint32_t out[kLanes];
  const auto narrow = [&](uint32_t cell) {
    float x = from_cell<float>(cell);
    if (i.option & 2) x = x != x || x > 0 ? x : 0;
    return uint32_t(H::of(x).bits);
  };
  for (int l = 0; l < kLanes; l++) out[l] = narrow(low[l]) | narrow(high[l]) << 16;
  store_lanes(w, i, out, lanes);
  return Flow::next;
}

// bf16 towards zero: the upper half of a float.
Flow truncate_pair(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t *high = w.cells<uint32_t>(i.src[0]), *low = w.cells<uint32_t>(i.src[1]);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = low[l] >> 16 | (high[l] & 0xffff0000);
  store_lanes(w, i, out, lanes);
  return Flow::next;
}

// 10 bits of mantissa, ties away from zero (.rna), as a float.
Flow to_tf32(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t* from = w.cells<uint32_t>(i.src[0]);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    const float x = from_cell<float>(from[l]);
    out[l] = std::isfinite(x) ? (from[l] + 0x1000) & 0xffffe000 : from[l];
  }
  store_lanes(w, i, out, lanes);
  return Flow::next;
}

void cvt(Decoding& d) {
  const int to_integer = d.take_one_of({"rzi", "rmi", "rpi", "rni"}) + 1;
  const bool relu = d.take("relu"), away = d.take("rna");
  const bool toward_zero = d.statement().modifiers.at(0) == "rz";
  take_float_modifiers(d);
  const Type to = d.take_type(), from = d.take_type();
  if (relu) d.out.option |= 2;
  if (to == Type::tf32) {
    if (!away || from != Type::f32) d.fail("tf32 is rounded with .rna");
    d.write(0, Type::b32);
    d.read(1, Type::b32);
    d.out.execute = to_tf32;
    return;
  }
  if (away) d.fail("rna");
  if (to == Type::f16x2 || to == Type::bf16x2) {
    if (from != Type::f32 || (toward_zero && (to == Type::f16x2 || relu))) d.fail("conversion");
    d.write(0, Type::b32);
    d.read(1, Type::b32);
    d.read(2, Type::b32);
    d.out.csr = 0;
    d.out.execute = to == Type::f16x2 ? convert_pair<f16> : toward_zero ? truncate_pair : convert_pair<bf16>;
    return;
  }
  if ((to == Type::f16 || to == Type::bf16) && d.out.csr & ~MathMode::kUsual) d.fail("rounding to 16 bits");
  d.out.count = to_integer;
  const Register source = d.is_register(d.operand(1)) ? d.register_of(d.operand(1)) : Register{0, RegisterClass::b32};
  const bool wide = source.kind == RegisterClass::b64;
  using All = Types<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, f16, bf16, float, double>;
  d.by_type(All(), to, [&]<class D>(D) {
    d.by_type(All(), from, [&]<class S>(S) {
      if (sizeof(S) == 8 && !wide && d.is_register(d.operand(1))) d.fail("width of the source");
      d.write(0, Decoding::type_of<D>());
      d.read(1, wide || sizeof(S) == 8 ? Type::b64 : Type::b32);
      d.out.wide = wide;
      d.out.size = d.register_of(d.operand(0)).kind == RegisterClass::b16 ? 2 : 4;
      d.out.execute = convert<D, S>;
    });
  });
}

// ------------------------------------------------------------------------------------------------ kinds of addresses

// A generic address is the address in the interpreter's own memory. negated: from generic to the space.
Flow convert_address(Warp& w, const Instruction& i, Mask lanes) {
  const uint64_t* from = w.cells<uint64_t>(i.src[0]);
  uint64_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    const uint64_t base = window(w, i.space, l);
    out[l] = i.negated ? from[l] - base : from[l] + base;
  }
  store_lanes(w, i, out, lanes);
  return Flow::next;
}

Space take_space(Decoding& d) {
  switch (d.take_one_of({"global", "shared", "shared::cta", "param", "local", "const"})) {
    case 1:
    case 2: return Space::shared;
    case 3: return Space::param;
    case 4: return Space::local;
    default: return Space::global;
  }
}

void cvta(Decoding& d) {
  d.out.negated = d.take("to");
  d.out.space = take_space(d);
  if (d.out.space == Space::param && d.translator().in_call()) d.out.space = Space::local;
  if (!means<uint64_t>(d.take_type())) d.fail("type");
  d.write(0, Type::b64);
  d.read(1, Type::b64);
  d.out.execute = convert_address;
}

Flow is_in_space(Warp& w, const Instruction& i, Mask lanes) {
  Mask value = 0;
  const auto within = [&](Space space, int lane) {
    const uint64_t base = window(w, space, lane), address = w.cells<uint64_t>(i.src[0])[lane];
    const uint64_t size = space == Space::shared  ? w.block->shared.size()
                          : space == Space::local ? w.block->kernel.local_bytes
                                                  : w.block->launch.config.params.size();
    return address >= base && address < base + size;
  };
  for (int l = 0; l < kLanes; l++) {
    const bool yes = i.space == Space::global
                         ? !within(Space::shared, l) && !within(Space::local, l) && !within(Space::param, l)
                         : within(i.space, l);
    value |= Mask(yes) << l;
  }
  w.set_predicate(i.dst[0], value, lanes, w.known(i));
  return Flow::next;
}

void isspacep(Decoding& d) {
  d.out.space = take_space(d);
  d.write(0, Type::pred);
  d.read(1, Type::b64);
  d.out.execute = is_in_space;
}

}  // namespace

void add_conversions(Table& t) {
  t["mov"] = mov;
  t["cvt"] = cvt;
  t["cvta"] = cvta;
  t["isspacep"] = isspacep;
}

}  // namespace interpreter
