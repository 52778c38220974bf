// Loads, stores and atomic operations.
#include "elementwise.h"
#include "places.h"

namespace interpreter {
namespace {

// ---------------------------------------------------------------------------------------------------------- ld, st

// Every lane reads the same parameter.
template <class T> Flow load_param(Warp& w, const Instruction& i, Mask lanes) {
  const std::vector<uint8_t>& params = w.block->launch.config.params;
  const uint64_t at = w.cells<uint64_t>(i.src[0])[std::countr_zero(lanes)] + i.offset;
  if (at + sizeof(T) > params.size()) fault(-1, "out of bounds of the parameters");
  T x;
  std::memcpy(&x, &params[at], sizeof(T));
  Cell<T> out[kLanes];
  std::fill_n(out, kLanes, to_cell<T>(x));
  store_lanes<Cell<T>>(w, i, out, lanes);
  return Flow::next;
}

// Notes that lanes of a register were loaded from uninitialised memory, `offset` bytes into their access.
void note_origin(Warp& w, uint32_t slot, Mask lanes, const Places& p, uint32_t offset, uint32_t bytes) {
  Origin& origin = w.note_origin(slot, lanes, p.space, p.address[std::countr_zero(lanes)] + offset);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    for (uint32_t b = 0; b < bytes; b++) origin.known[l] |= uint8_t(p.known[l][offset + b] & 1) << b;
  }
}

// C: the register's cell, which signed numbers fill; only 16 bits of it if i.option.
template <class T, class C> Flow load(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  const Access access = i.atomic ? Access::observe : Access::read;
  locate(w, i, lanes, sizeof(T) * i.count, access, p);
  check_reads(w, p, lanes, sizeof(T) * i.count, access);
  if (i.atomic) acquire(w, p, lanes, sizeof(T) * i.count);
  for (int e = 0; e < i.count; e++) {
    C* to = w.cells<C>(i.dst[e]);
    Mask known = kAllLanes;
    for (Mask rest = lanes; rest; rest &= rest - 1) {
      const int l = std::countr_zero(rest);
      T x;
      std::memcpy(&x, p.data[l] + e * sizeof(T), sizeof(T));
      to[l] = C(x);
      if (std::is_signed_v<T> && i.option) to[l] &= 0xffff;
      if (p.has_known() && !all_known<sizeof(T)>(p.known[l] + e * sizeof(T))) known &= ~(Mask(1) << l);
    }
    w.define(i.dst[e], lanes, known);
    if (lanes & ~known) note_origin(w, i.dst[e], lanes & ~known, p, e * sizeof(T), sizeof(T));
  }
  return Flow::next;
}

template <class T, class C> Flow store(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  const Access access = i.atomic ? Access::publish : Access::write;
  locate(w, i, lanes, sizeof(T) * i.count, access, p);
  if (i.release != MemoryScope::none) w.fence(i.release);
  if (!p.has_known())
    for (int e = 0; e < i.count; e++) w.need(i.src[1 + e], lanes, "a value to store");
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    T values[4];
    for (int e = 0; e < i.count; e++) values[e] = T(w.cells<C>(i.src[1 + e])[l]);
    check(w, p, l, sizeof(T) * i.count, access, i.atomic ? nullptr : values);
    std::memcpy(p.data[l], values, sizeof(T) * i.count);
    if (i.atomic) w.block->launch.release(w, p.data[l], true);
    if (!p.has_known()) continue;
    for (int e = 0; e < i.count; e++) w.known_bytes(i.src[1 + e], l, sizeof(T), p.known[l] + e * sizeof(T));
  }
  return Flow::next;
}

Space take_space(Decoding& d) {
  switch (
      d.take_one_of({"global", "shared", "shared::cta", "param", "param::entry", "param::func", "local", "const"})) {
    case 0:
    case 7: return Space::global;
    case 1:
    case 2: return Space::shared;
    case 3:
    case 4:
    case 5: return Space::param;
    case 6: return Space::local;
    default: return Space::generic;
  }
}

MemoryScope take_scope(Decoding& d) {
  return d.take_one_of({"gpu", "sys", "cluster", "cta"}) == 3 ? MemoryScope::block : MemoryScope::device;
}

void take_cache_hints(Decoding& d) {
  d.take_one_of({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  d.take("nc");
  d.take_prefixed("L1::");
  if (d.take_prefixed("L2::") == "L2::cache_hint") d.fail("L2::cache_hint");
  const bool is_volatile = d.take("volatile");
  const int order = d.take_one_of({"relaxed", "acquire", "release"});
  const MemoryScope scope = take_scope(d);
  d.take("weak");
  d.out.atomic = is_volatile || order >= 0;
  if (order == 2) d.out.release = scope;
}

// Races on shared memory are tracked per cell: as narrow as the narrowest access.
void note_shared(Decoding& d, uint32_t bytes) {
  Kernel& kernel = d.translator().kernel();
  if (d.out.space == Space::shared || d.out.space == Space::generic) kernel.cell = std::min(kernel.cell, bytes);
}

using Loaded = Types<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>;
Type as_bits(Type type) {
  switch (type) {
    case Type::f16:
    case Type::bf16: return Type::b16;
    case Type::f32:
    case Type::f16x2:
    case Type::bf16x2: return Type::b32;
    case Type::f64: return Type::b64;
    default: return type;
  }
}

void load_or_store(Decoding& d, bool is_store) {
  d.out.space = take_space(d);
  take_cache_hints(d);
  const int vector = d.take_one_of({"v2", "v4"});
  d.out.count = vector < 0 ? 1 : vector == 0 ? 2 : 4;
  const Type type = as_bits(d.take_type());
  const size_t address = is_store ? 0 : 1, value = 1 - address;
  d.read_address(address);
  const std::vector<std::string> elements = d.elements(value);
  if (elements.size() != d.out.count || bytes(type) * d.out.count > 16) d.fail("vector");
  note_shared(d, bytes(type));
  const RegisterClass kind = is_store && is_number(elements[0])
                                 ? (bytes(type) == 8 ? RegisterClass::b64 : RegisterClass::b32)
                                 : d.register_of(elements[0]).kind;
  const bool wide = kind == RegisterClass::b64;
  d.out.option = kind == RegisterClass::b16;
  for (const std::string& element : elements) {
    if (is_store)
      d.read_text(element, wide ? Type::b64 : Type::b32);
    else
      d.write_text(element, wide ? Type::b64 : Type::b32);
  }
  d.by_type(Loaded(), type, [&]<class T>(T) {
    if (sizeof(T) == 8 && !wide) d.fail("width of the register");
    if (is_store) {
      if constexpr (sizeof(T) < 8)
        d.out.execute = wide ? store<T, uint64_t> : store<T, uint32_t>;
      else
        d.out.execute = store<T, uint64_t>;
    } else {
      if constexpr (sizeof(T) < 8)
        d.out.execute = wide ? load<T, uint64_t> : load<T, uint32_t>;
      else
        d.out.execute = load<T, uint64_t>;
      const bool uniform = d.out.space == Space::param && !d.is_register(d.statement().operands[1]) &&
                           d.out.count == 1 && wide == (sizeof(T) == 8) && !std::is_signed_v<T>;
      const bool fixed = uniform && d.statement().operands[1][1] != '%';
      if (fixed) d.out.execute = load_param<T>;
    }
  });
  d.out.kind = kind_of(std::string(is_store ? "st." : "ld.") + kSpaces[int(d.out.space)]);
}

// --------------------------------------------------------------------------------------------------------- atom, red

enum Operation { exchange, add, minimum, maximum, bit_and, bit_or, bit_xor, increment, decrement, compare_and_swap };

template <class T> T combined(int operation, T old, T x, T y) {
  const auto bits = [](T v) { return std::bit_cast<Bits<T>>(v); };
  const auto back = [](Bits<T> v) { return std::bit_cast<T>(v); };
  switch (operation) {
    case exchange: return x;
    case add:
      if constexpr (is_half<T>)
        return T(double(old) + double(x));
      else if constexpr (is_pair<T>) {
        using H = decltype(old.low);
        return {H(double(old.low) + double(x.low)), H(double(old.high) + double(x.high))};
      } else
        return T(old + x);
    case minimum:
      if constexpr (std::is_arithmetic_v<T>)
        return std::min(old, x);
      else
        break;
    case maximum:
      if constexpr (std::is_arithmetic_v<T>)
        return std::max(old, x);
      else
        break;
    case bit_and: return back(bits(old) & bits(x));
    case bit_or: return back(bits(old) | bits(x));
    case bit_xor: return back(bits(old) ^ bits(x));
    case increment:
      if constexpr (std::is_integral_v<T>)
        return old >= x ? T(0) : T(old + 1);
      else
        break;
    case decrement:
      if constexpr (std::is_integral_v<T>)
        return old == 0 || old > x ? x : T(old - 1);
      else
        break;
    default: return bits(old) == bits(x) ? y : old;
  }
  return x;
}

template <class T> Flow update(Warp& w, const Instruction& i, Mask lanes) {
  for (int s = 1; s < i.srcs; s++) w.need(i.src[s], lanes, "an operand of an atomic operation");
  Places p;
  locate(w, i, lanes, sizeof(T) * i.count, Access::update, p);
  if (i.dsts) acquire(w, p, lanes, sizeof(T) * i.count);
  if (i.release != MemoryScope::none) w.fence(i.release);
  const bool swaps = i.option == compare_and_swap;
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    check(w, p, l, sizeof(T) * i.count, Access::update);
    for (int e = 0; e < i.count; e++) {
      if (p.has_known() && !all_known<sizeof(T)>(p.known[l] + e * sizeof(T)))
        fault(l, "an atomic operation on uninitialised ", kSpaces[int(p.space)], " memory");
      T old;
      std::memcpy(&old, p.data[l] + e * sizeof(T), sizeof(T));
      const T x = from_cell<T>(w.cells<T>(i.src[1 + e])[l]);
      const T y = swaps ? from_cell<T>(w.cells<T>(i.src[2])[l]) : x;
      const T result = combined(i.option, old, x, y);
      std::memcpy(p.data[l] + e * sizeof(T), &result, sizeof(T));
      if (i.dsts) w.cells<T>(i.dst[e])[l] = to_cell<T>(old);
    }
    w.block->launch.release(w, p.data[l], false);
  }
  for (int e = 0; e < i.dsts; e++) w.define(i.dst[e], lanes, kAllLanes);
  return Flow::next;
}

void atomics(Decoding& d, bool returns) {
  d.out.space = take_space(d);
  const bool releases = d.take_one_of({"relaxed", "acquire", "release", "acq_rel"}) >= 2;
  const MemoryScope scope = take_scope(d);
  if (releases) d.out.release = scope;
  d.take("noftz");
  if (d.take_prefixed("L2::") == "L2::cache_hint") d.fail("L2::cache_hint");
  const int operation = d.take_one_of({"exch", "add", "min", "max", "and", "or", "xor", "inc", "dec", "cas"});
  if (operation < 0) d.fail("operation");
  const int vector = d.take_one_of({"v2", "v4"});
  d.out.count = vector < 0 ? 1 : vector == 0 ? 2 : 4;
  d.out.option = operation;
  const Type type = d.take_type();
  d.read_address(returns ? 1 : 0);
  const std::vector<std::string> values = d.elements(returns ? 2 : 1);
  using Atomic = Types<uint16_t, uint32_t, int32_t, uint64_t, int64_t, float, double, f16, bf16, f16x2, bf16x2>;
  d.by_type(Atomic(), type, [&]<class T>(T) {
    note_shared(d, sizeof(T));
    if (returns)
      for (const std::string& text : d.elements(0)) d.write_text(text, Decoding::type_of<T>());
    for (const std::string& text : values) d.read_text(text, Decoding::type_of<T>());
    if (operation == compare_and_swap) d.read(returns ? 3 : 2, Decoding::type_of<T>());
    d.out.execute = update<T>;
  });
  d.out.kind = kind_of(std::string(returns ? "atom." : "red.") + kSpaces[int(d.out.space)]);
}

Flow nothing(Warp&, const Instruction&, Mask) { return Flow::next; }

// A hint.
void no_effect(Decoding& d) {
  for (const std::string& modifier : d.statement().modifiers) d.take(modifier.c_str());
  d.out.execute = nothing;
}

Flow fence(Warp& w, const Instruction& i, Mask) {
  w.fence(i.release);
  return Flow::next;
}

// membar.cta, .gl, .sys; fence.sc, .acq_rel
void fences(Decoding& d) {
  if (d.statement().modifiers.at(0) == "proxy") return no_effect(d);
  d.take_one_of({"sc", "acq_rel"});
  d.out.release = d.take("gl") ? MemoryScope::device : take_scope(d);
  d.out.execute = fence;
}

}  // namespace

void add_memory(Table& t) {
  t["ld"] = [](Decoding& d) { load_or_store(d, false); };
  t["ldu"] = [](Decoding& d) { load_or_store(d, false); };
  t["st"] = [](Decoding& d) { load_or_store(d, true); };
  t["atom"] = [](Decoding& d) { atomics(d, true); };
  t["membar"] = fences;
  t["fence"] = fences;
  t["red"] = [](Decoding& d) { atomics(d, false); };
  for (const char* opcode : {"prefetch", "prefetchu", "griddepcontrol", "nanosleep", "discard"}) t[opcode] = no_effect;
}

}  // namespace interpreter
