// Comparison and selection.
#include "elementwise.h"

namespace interpreter {
namespace {

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

// option: combination with a third predicate: 0 none, 1 and, 2 or, 3 xor.
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

void add_comparisons(Table& t) {
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
