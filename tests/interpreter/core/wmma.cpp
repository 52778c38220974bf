// wmma: loads, products and stores of matrices by a warp.
//
// PTX does not say which lane holds which element. Here lane 0 holds the first elements, row by row, lane 1 the next,
// and so on. Where the registers have room for more elements than the matrix has, the matrix is repeated.
#include "elementwise.h"
#include "places.h"

namespace interpreter {
namespace {

enum Fragment { kA, kB, kC, kD };

struct Shape {
  int m, n, k;
};

// How elements are stored in memory and in registers.
struct Element {
  Type type;
  uint32_t bytes;           // in memory
  uint32_t register_bytes;  // 4 or 8
  uint32_t per_register() const { return register_bytes / bytes; }
};

Element element_of(Type type) {
  if (type == Type::f64) return {type, 8, 8};
  if (type == Type::f16 || type == Type::bf16) return {type, 2, 4};
  if (type == Type::s8 || type == Type::u8) return {type, 1, 4};
  return {type, 4, 4};
}

int rows(const Shape& s, int fragment) { return fragment == kB ? s.k : s.m; }
int columns(const Shape& s, int fragment) { return fragment == kA ? s.k : s.n; }

// The details of an instruction. Instruction::option is its index in forms().
struct Form {
  Shape shape;
  int fragment = kD;
  bool columns_first = false;
  Element element;  // for load and store
  Element of[4];    // for mma
  uint32_t registers[4] = {};
};
std::vector<Form>& forms() {
  static std::vector<Form> all;
  return all;
}

// Where an element of a fragment is: the index of the register among the fragment's, the lane, and the byte within.
struct Slot {
  uint32_t index;
  int lane, byte;
};
Slot slot_of(const Element& element, uint32_t registers, uint32_t e) {
  const uint32_t per_lane = registers * element.per_register(), in_lane = e % per_lane;
  return {in_lane / element.per_register(), int(e / per_lane), int(in_lane % element.per_register() * element.bytes)};
}
uint32_t slots(const Element& element, uint32_t registers) { return registers * element.per_register() * kLanes; }

uint8_t* byte_of(Warp& w, uint32_t reg, const Element& element, const Slot& slot) {
  uint8_t* cell = element.register_bytes == 8 ? reinterpret_cast<uint8_t*>(&w.cells<uint64_t>(reg)[slot.lane])
                                              : reinterpret_cast<uint8_t*>(&w.cells<uint32_t>(reg)[slot.lane]);
  return cell + slot.byte;
}

// Visits the elements of a matrix in memory, up to 32 at a time: visit(first element, places, lanes).
template <class Visit>
void for_memory(Warp& w, const Instruction& i, Mask lanes, const Form& form, Access access, Visit&& visit) {
  uint64_t base[kLanes];
  w.addresses(i, lanes, base);
  const uint32_t stride_source = i.srcs - 1;
  if (i.count) w.need(i.src[stride_source], lanes, "the stride of a matrix");
  const int height = rows(form.shape, form.fragment), width = columns(form.shape, form.fragment);
  const uint64_t stride = i.count ? w.cells<uint32_t>(i.src[stride_source])[0] : form.columns_first ? height : width;
  const uint32_t elements = height * width, bytes = form.element.bytes;
  for (uint32_t first = 0; first < elements; first += kLanes) {
    const uint32_t here = std::min<uint32_t>(kLanes, elements - first);
    const Mask used = here == kLanes ? kAllLanes : (Mask(1) << here) - 1;
    Places p;
    for (uint32_t l = 0; l < here; l++) {
      const uint64_t row = (first + l) / width, column = (first + l) % width;
      p.address[l] = base[0] + (form.columns_first ? column * stride + row : row * stride + column) * bytes;
    }
    place(w, i, used, bytes, access, p);
    visit(first, p, used);
  }
}

Flow load_fragment(Warp& w, const Instruction& i, Mask lanes) {
  const Form& form = forms()[i.option];
  const uint32_t elements = rows(form.shape, form.fragment) * columns(form.shape, form.fragment);
  const uint32_t all = slots(form.element, i.dsts);
  Mask known[8];
  std::fill_n(known, 8, kAllLanes);
  std::pair<Space, uint64_t> origin;
  for_memory(w, i, lanes, form, Access::read, [&](uint32_t first, const Places& p, Mask used) {
    check_reads(w, p, used, form.element.bytes, Access::read);
    for (Mask rest = used; rest; rest &= rest - 1) {
      const int l = std::countr_zero(rest);
      bool initialised = true;
      for (uint32_t b = 0; p.has_known() && b < form.element.bytes; b++) initialised &= p.known[l][b] != 0;
      for (uint32_t e = first + l; e < all; e += elements) {
        const Slot slot = slot_of(form.element, i.dsts, e);
        std::memcpy(byte_of(w, i.dst[slot.index], form.element, slot), p.data[l], form.element.bytes);
        if (initialised) continue;
        known[slot.index] &= ~(Mask(1) << slot.lane);
        origin = {p.space, p.address[l]};
      }
    }
  });
  for (int d = 0; d < i.dsts; d++) {
    w.define(i.dst[d], lanes, known[d]);
    if (lanes & ~known[d]) w.note_origin(i.dst[d], lanes & ~known[d], origin.first, origin.second);
  }
  return Flow::next;
}

Flow store_fragment(Warp& w, const Instruction& i, Mask lanes) {
  const Form& form = forms()[i.option];
  const uint32_t registers = i.srcs - 1 - i.count;
  for (uint32_t r = 0; r < registers; r++) w.need(i.src[1 + r], lanes, "a matrix to store");
  for_memory(w, i, lanes, form, Access::write, [&](uint32_t first, const Places& p, Mask used) {
    for (Mask rest = used; rest; rest &= rest - 1) {
      const int l = std::countr_zero(rest);
      const Slot slot = slot_of(form.element, registers, first + l);
      const uint8_t* value = byte_of(w, i.src[1 + slot.index], form.element, slot);
      check(w, p, l, form.element.bytes, Access::write, value);
      std::memcpy(p.data[l], value, form.element.bytes);
      if (p.has_known()) std::memset(p.known[l], 0xff, form.element.bytes);
    }
  });
  return Flow::next;
}

template <class T> T number(Type type, const uint8_t* from) {
  const auto as = [&]<class S>(S x) {
    std::memcpy(&x, from, sizeof(x));
    return x;
  };
  switch (type) {
    case Type::f16: return T(double(as(f16())));
    case Type::bf16: return T(double(as(bf16())));
    case Type::tf32: return T(std::bit_cast<float>(as(uint32_t()) & 0xffffe000));
    case Type::s8: return T(as(int8_t()));
    case Type::u8: return T(as(uint8_t()));
    case Type::s32: return T(as(int32_t()));
    case Type::f64: return T(as(double()));
    default: return T(as(float()));
  }
}

// D = A B + C, computed in T.
template <class T> Flow multiply_fragments(Warp& w, const Instruction& i, Mask lanes) {
  const Form& form = forms()[i.option];
  const Shape& s = form.shape;
  std::vector<T> values[3];
  // The elements of D that are initialised: those whose row of A, column of B and element of C are.
  std::vector<bool> known(s.m * s.n, true);
  uint32_t first = 0;
  for (int f : {kA, kB, kC}) {
    const int width = columns(s, f), elements = rows(s, f) * width;
    for (int e = 0; e < elements; e++) {
      const Slot slot = slot_of(form.of[f], form.registers[f], e);
      const uint32_t reg = i.src[first + slot.index];
      values[f].push_back(number<T>(form.of[f].type, byte_of(w, reg, form.of[f], slot)));
      if (w.defined[reg] >> slot.lane & 1) continue;
      if (f == kC) known[e] = false;
      for (int column = 0; f == kA && column < s.n; column++) known[e / width * s.n + column] = false;
      for (int row = 0; f == kB && row < s.m; row++) known[row * s.n + e % width] = false;
    }
    first += form.registers[f];
  }
  std::vector<T>& c = values[kC];
  for (int row = 0; row < s.m; row++)
    for (int k = 0; k < s.k; k++)
      for (int column = 0; column < s.n; column++)
        c[row * s.n + column] += values[kA][row * s.k + k] * values[kB][k * s.n + column];
  Mask defined[8];
  std::fill_n(defined, 8, kAllLanes);
  for (uint32_t e = 0; e < slots(form.of[kD], form.registers[kD]); e++) {
    const Slot slot = slot_of(form.of[kD], form.registers[kD], e);
    const T x = c[e % c.size()];
    if (!known[e % c.size()]) defined[slot.index] &= ~(Mask(1) << slot.lane);
    uint8_t* to = byte_of(w, i.dst[slot.index], form.of[kD], slot);
    if (form.of[kD].type == Type::f16) {
      const f16 half = f16::of(float(x));
      std::memcpy(to, &half, sizeof(half));
    } else {
      std::memcpy(to, &x, form.of[kD].bytes);
    }
  }
  for (int d = 0; d < i.dsts; d++) w.define(i.dst[d], lanes, defined[d]);
  w.block->launch.counts.mmas++;
  return Flow::next;
}

// --------------------------------------------------------------------------------------------------------- decoding

Shape take_shape(Decoding& d) {
  static const std::pair<const char*, Shape> shapes[] = {{"m16n16k16", {16, 16, 16}},
                                                         {"m32n8k16", {32, 8, 16}},
                                                         {"m8n32k16", {8, 32, 16}},
                                                         {"m16n16k8", {16, 16, 8}},
                                                         {"m8n8k4", {8, 8, 4}}};
  for (const auto& [name, shape] : shapes)
    if (d.take(name)) return shape;
  d.fail("shape");
}

Space take_space(Decoding& d) {
  switch (d.take_one_of({"global", "shared", "shared::cta"})) {
    case 0: return Space::global;
    case 1:
    case 2: return Space::shared;
    default: return Space::generic;
  }
}

Type cell_type(const Element& element) { return element.register_bytes == 8 ? Type::b64 : Type::b32; }

void check_room(Decoding& d, const Form& form, int fragment, const Element& element, uint32_t registers) {
  const uint32_t elements = rows(form.shape, fragment) * columns(form.shape, fragment);
  if (registers > 8 || slots(element, registers) % elements) d.fail("registers of a fragment");
}

void load_or_store(Decoding& d, bool is_store) {
  Form form;
  if (!is_store) form.fragment = d.take_one_of({"a", "b", "c"});
  if (is_store && !d.take("d")) d.fail("fragment");
  if (form.fragment < 0 || !d.take("sync") || !d.take("aligned")) d.fail("wmma");
  const int layout = d.take_one_of({"row", "col"});
  if (layout < 0) d.fail("layout");
  form.columns_first = layout == 1;
  form.shape = take_shape(d);
  d.out.space = take_space(d);
  form.element = element_of(d.take_type());
  d.translator().kernel().cell = std::min(d.translator().kernel().cell, form.element.bytes);
  d.read_address(is_store ? 0 : 1);
  const std::vector<std::string> registers = d.elements(is_store ? 1 : 0);
  check_room(d, form, form.fragment, form.element, registers.size());
  for (const std::string& text : registers) {
    if (is_store)
      d.read_text(text, cell_type(form.element));
    else
      d.write_text(text, cell_type(form.element));
  }
  d.out.count = d.operands() > 2;
  if (d.out.count) d.read(2, Type::b32);
  d.out.execute = is_store ? store_fragment : load_fragment;
  d.out.option = forms().size();
  forms().push_back(form);
}

void multiply(Decoding& d) {
  Form form;
  if (!d.take("sync") || !d.take("aligned")) d.fail("wmma");
  // The layouts of A and B matter only to their loads.
  for (int matrix : {kA, kB})
    if (d.take_one_of({"row", "col"}) < 0) d.fail(matrix == kA ? "layout of A" : "layout of B");
  form.shape = take_shape(d);
  d.take("rn");
  std::vector<Type> types;
  for (Type type = d.take_type(); type != Type::none; type = d.take_type()) types.push_back(type);
  if (types.size() == 2)
    types = {types[0], Type::f16, Type::f16, types[1]};  // products of f16 name only the types of D and C
  if (types.size() != 4) d.fail("types");
  const Type in_order[] = {types[1], types[2], types[3], types[0]};  // A, B, C, D
  for (int f : {kA, kB, kC, kD}) {
    form.of[f] = element_of(in_order[f]);
    const std::vector<std::string> registers = d.elements(f == kD ? 0 : f + 1);
    form.registers[f] = registers.size();
    check_room(d, form, f, form.of[f], registers.size());
    for (const std::string& text : registers) {
      if (f == kD)
        d.write_text(text, cell_type(form.of[f]));
      else
        d.read_text(text, cell_type(form.of[f]));
    }
  }
  const Type type = types[1];
  if (type == Type::f64)
    d.out.execute = multiply_fragments<double>;
  else if (type == Type::s8 || type == Type::u8)
    d.out.execute = multiply_fragments<int32_t>;
  else
    d.out.execute = multiply_fragments<float>;
  d.out.option = forms().size();
  forms().push_back(form);
}

void wmma(Decoding& d) {
  const int operation = d.take_one_of({"load", "store", "mma"});
  if (operation < 0) d.fail("wmma");
  if (operation == 2)
    multiply(d);
  else
    load_or_store(d, operation == 1);
  d.out.together = Together::live;
}

}  // namespace

void add_wmma(Table& t) { t["wmma"] = wmma; }

}  // namespace interpreter
