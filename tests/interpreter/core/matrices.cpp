// Matrices in the registers of a warp: ldmatrix, stmatrix, mma.
//
// With g = lane / 4 and t = lane % 4, a lane has row g, columns 2t and 2t + 1 of an 8 x 8 matrix of 16-bit elements.
#include "elementwise.h"

namespace interpreter {
namespace {

// Checks the rows, of 16 bytes, of i.count matrices. Lane 8 q + r has the address of row r of matrix q.
void check_rows(Warp& w, const Instruction& i, Mask lanes, bool write, uint64_t (&addresses)[kLanes]) {
  const Mask rows = i.count == 4 ? kAllLanes : (Mask(1) << 8 * i.count) - 1;
  if (lanes & rows & ~w.live) fault(-1, "a lane that has exited would give an address");
  w.addresses(i, rows, addresses);
  count_banks(w.block->launch.banks(i), addresses, rows, 16);
  for (int l = 0; l < 8 * i.count; l++) {
    if (addresses[l] + 16 > w.block->shared.size())
      fault(l, "row of a matrix out of bounds of shared memory: at ", addresses[l], " of ", w.block->shared.size());
    w.block->shared.check(w, l, addresses[l], 16, write ? Access::write : Access::read, nullptr, true);
  }
}

// The offset of a lane's low (half 0) or high element in a matrix of 8 rows of 16 bytes.
int byte_of(const Instruction& i, int lane, int half) {
  const int row = lane / 4, column = lane % 4 * 2 + half;
  return i.option ? 16 * column + 2 * row : 16 * row + 2 * column;  // option: transposed
}

// The lanes whose two elements are initialised.
Mask known_lanes(const Instruction& i, const uint8_t (&known)[128]) {
  Mask all = 0;
  for (int l = 0; l < kLanes; l++) {
    const int low = byte_of(i, l, 0), high = byte_of(i, l, 1);
    all |= Mask((known[low] & known[low + 1] & known[high] & known[high + 1]) & 1) << l;
  }
  return all;
}

Flow load_matrices(Warp& w, const Instruction& i, Mask lanes) {
  uint64_t addresses[kLanes];
  SharedMemory& shared = w.block->shared;
  check_rows(w, i, lanes, false, addresses);
  for (int q = 0; q < i.count; q++) {
    uint8_t bytes[128], known[128];
    for (int r = 0; r < 8; r++) {
      std::memcpy(bytes + 16 * r, shared.data() + addresses[8 * q + r], 16);
      std::memcpy(known + 16 * r, shared.known() + addresses[8 * q + r], 16);
    }
    uint32_t* to = w.cells<uint32_t>(i.dst[q]);
    for (int l = 0; l < kLanes; l++) {
      uint16_t low, high;
      std::memcpy(&low, bytes + byte_of(i, l, 0), 2);
      std::memcpy(&high, bytes + byte_of(i, l, 1), 2);
      to[l] = low | uint32_t(high) << 16;
    }
    uint8_t all = 0xff;
    for (uint8_t byte : known) all &= byte;
    const Mask initialised = all ? kAllLanes : known_lanes(i, known);
    w.define(i.dst[q], kAllLanes, initialised);
    if (const Mask missing = ~initialised)
      w.note_origin(i.dst[q], missing, Space::shared, addresses[8 * q + byte_of(i, std::countr_zero(missing), 0) / 16]);
  }
  return Flow::next;
}

Flow store_matrices(Warp& w, const Instruction& i, Mask lanes) {
  uint64_t addresses[kLanes];
  SharedMemory& shared = w.block->shared;
  check_rows(w, i, lanes, true, addresses);
  for (int q = 0; q < i.count; q++) {
    const uint32_t* from = w.cells<uint32_t>(i.src[1 + q]);
    for (int l = 0; l < kLanes; l++) {
      const uint8_t known = w.defined[i.src[1 + q]] >> l & 1 ? 0xff : 0;
      for (int half = 0; half < 2; half++) {
        const uint16_t element = from[l] >> 16 * half;
        const int byte = byte_of(i, l, half);
        const uint64_t at = addresses[8 * q + byte / 16] + byte % 16;
        std::memcpy(shared.data() + at, &element, 2);
        std::memset(shared.known() + at, known, 2);
      }
    }
  }
  return Flow::next;
}

void matrices(Decoding& d, bool is_store) {
  if (!d.take("sync") || !d.take("aligned") || !d.take("m8n8")) d.fail("shape");
  const int count = d.take_one_of({"x1", "x2", "x4"});
  if (count < 0) d.fail("count");
  d.out.count = 1 << count;
  d.out.option = d.take("trans");
  if (d.take_one_of({"shared", "shared::cta"}) < 0 || d.take_type() != Type::b16) d.fail("type");
  d.out.space = Space::shared;
  d.read_address(is_store ? 0 : 1);
  for (const std::string& text : d.elements(is_store ? 1 : 0)) {
    if (is_store)
      d.read_text(text, Type::b32);
    else
      d.write_text(text, Type::b32);
  }
  d.out.together = Together::live;
  d.out.execute = is_store ? store_matrices : load_matrices;
}

// --------------------------------------------------------------------------------------------------------------- mma

struct tf32 {};

// A register's two elements as floats.
template <class T> void unpack(const uint32_t* cells, float (&low)[kLanes], float (&high)[kLanes]) {
  for (int l = 0; l < kLanes; l++) {
    if constexpr (std::is_same_v<T, bf16>) {
      low[l] = std::bit_cast<float>(cells[l] << 16);
      high[l] = std::bit_cast<float>(cells[l] & 0xffff0000);
    } else {
      low[l] = float(std::bit_cast<_Float16>(uint16_t(cells[l])));
      high[l] = float(std::bit_cast<_Float16>(uint16_t(cells[l] >> 16)));
    }
  }
}

// The lanes in which register c of D is initialised: those whose row of A, column of B and element of C are.
template <int kA, int kB> Mask known_products(const Warp& w, const Instruction& i, int c) {
  Mask known = w.defined[i.src[kA + kB + c]];
  for (int part = 0; part < kA; part++) {
    const Mask a = w.defined[i.src[part]];
    for (int row = 0; row < 8 && part % 2 == c / 2; row++)
      if ((a >> 4 * row & 15) != 15) known &= ~(Mask(15) << 4 * row);
  }
  for (int part = 0; part < kB; part++) {
    const Mask b = w.defined[i.src[kA + part]];
    for (int column = 0; column < 8; column++)
      if (column % 2 == c % 2 && (b >> 4 * column & 15) != 15) known &= ~(Mask(0x11111111) << column / 2);
  }
  return known;
}

// D[16][8] = A[16][K] B[K][8] + C, K = 8 or 16. T is the type of A and B; C and D are float.
//   A register a (two 16-bit elements): row g + 8 (a % 2), columns 2t + 8 (a / 2) and the next
//   A register a (one tf32): row g + 8 (a % 2), column t + 4 (a / 2)
//   B register b: rows 2t + 8 b and the next, column g; tf32: row t + 4 b
//   C, D register c: row g + 8 (c / 2), column 2t + c % 2
template <class T, int K> Flow multiply_matrices(Warp& w, const Instruction& i, Mask) {
  constexpr bool kWhole = std::is_same_v<T, tf32>;
  constexpr int kA = kWhole ? K / 2 : K / 4, kB = kWhole ? K / 4 : K / 8;
  float a[16][K], b[K][8], c[16][8], low[kLanes], high[kLanes];
  for (int s = 0; s < kA + kB; s++) {
    const uint32_t* cells = w.cells<uint32_t>(i.src[s]);
    const bool of_a = s < kA;
    const int part = of_a ? s : s - kA;
    if constexpr (kWhole) {
      for (int l = 0; l < kLanes; l++) {
        const float x = std::bit_cast<float>(cells[l] & 0xffffe000);
        if (of_a)
          a[l / 4 + 8 * (part % 2)][l % 4 + 4 * (part / 2)] = x;
        else
          b[l % 4 + 4 * part][l / 4] = x;
      }
    } else {
      unpack<T>(cells, low, high);
      for (int l = 0; l < kLanes; l++) {
        const int k = l % 4 * 2 + 8 * (of_a ? part / 2 : part);
        if (of_a) {
          a[l / 4 + 8 * (part % 2)][k] = low[l];
          a[l / 4 + 8 * (part % 2)][k + 1] = high[l];
        } else {
          b[k][l / 4] = low[l];
          b[k + 1][l / 4] = high[l];
        }
      }
    }
  }
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < kLanes; l++) c[l / 4 + 8 * (r / 2)][l % 4 * 2 + r % 2] = w.value<float>(i.src[kA + kB + r], l);
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < K; k++)
      for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
  for (int r = 0; r < 4; r++) {
    uint32_t* to = w.cells<uint32_t>(i.dst[r]);
    for (int l = 0; l < kLanes; l++) to[l] = to_cell<float>(c[l / 4 + 8 * (r / 2)][l % 4 * 2 + r % 2]);
  }
  Mask known[4];
  const bool all = w.known(i) == kAllLanes;
  for (int r = 0; r < 4; r++) known[r] = all ? kAllLanes : known_products<kA, kB>(w, i, r);
  for (int r = 0; r < 4; r++) w.define(i.dst[r], kAllLanes, known[r]);
  w.block->launch.counts.mmas++;
  return Flow::next;
}

void mma(Decoding& d) {
  if (!d.take("sync") || !d.take("aligned")) d.fail("mma");
  const std::string shape = d.take_prefixed("m16n8");
  if (!d.take("row") || !d.take("col")) d.fail("layout");
  const Type type_d = d.take_type(), type_a = d.take_type(), type_b = d.take_type(), type_c = d.take_type();
  if (type_d != Type::f32 || type_c != Type::f32 || type_a != type_b) d.fail("types");
  const bool k16 = shape == "m16n8k16";
  if (!k16 && shape != "m16n8k8" && shape != "m16n8k4") d.fail("shape");
  if (type_a == Type::f16)
    d.out.execute = k16 ? multiply_matrices<f16, 16> : multiply_matrices<f16, 8>;
  else if (type_a == Type::bf16)
    d.out.execute = k16 ? multiply_matrices<bf16, 16> : multiply_matrices<bf16, 8>;
  else if (type_a == Type::tf32)
    d.out.execute = shape == "m16n8k8" ? multiply_matrices<tf32, 8> : multiply_matrices<tf32, 4>;
  else
    d.fail("types");
  if (shape == "m16n8k4" ? type_a != Type::tf32 : k16 && type_a == Type::tf32) d.fail("shape");
  for (const std::string& text : d.elements(0)) d.write_text(text, Type::b32);
  for (int operand : {1, 2, 3})
    for (const std::string& text : d.elements(operand)) d.read_text(text, Type::b32);
  d.out.together = Together::live;
}

}  // namespace

void add_matrix(Table& t) {
  t["ldmatrix"] = [](Decoding& d) { matrices(d, false); };
  t["stmatrix"] = [](Decoding& d) { matrices(d, true); };
  t["mma"] = mma;
}

}  // namespace interpreter
