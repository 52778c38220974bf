// The map of a mask (MaskMap in mask.h): one pass over each distinct plane of the mask, before the kernel.
#pragma once

#include "convert.h"
#include "tasks.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// The part of a mask that a cell covers. Broadcast axes have one row or key, which stands for all.
template <class U> struct MaskCell {
  const U* data;
  int64_t row_stride, key_stride;
  int64_t rows, keys;

  // The elements of row r: those of the mask or, where they are not contiguous, a copy in `row`, with padding behind it.
  INLINE const U* elements(int64_t r, U padding, U (&row)[kCellKeys]) const {
    const U* from = data + r * row_stride;
    if (key_stride == 1 && keys == kCellKeys) return from;
    for (int64_t j = 0; j < kCellKeys; j++) row[j] = j < keys ? from[j * key_stride] : padding;
    return row;
  }
};

// Whether any bit of a vector is set.
template <class N> INLINE bool any(const N& vector) {
  uint64_t parts[sizeof(N) / 8], some = 0;
  std::memcpy(parts, &vector, sizeof(N));
  for (uint64_t part : parts) some |= part;
  return some != 0;
}

// The verdict of a cell of a bool mask, and the words of its bits. broadcast: its one row stands for all queries.
INLINE Verdict map_cell(const MaskCell<uint8_t>& cell, bool broadcast, uint16_t* to) {
  using Bytes = Native<uint8_t, kCellKeys>::type;
  using Words = Native<uint16_t, 2 * kCellKeys>::type;
  Bytes halves[2] = {};  // of the words: queries 0 to 7, and 8 to 15
  for (int64_t r = 0; r < cell.rows; r++) {
    uint8_t copy[kCellKeys];
    Bytes row;
    std::memcpy(&row, cell.elements(r, 0, copy), sizeof(row));
    halves[r / 8] |= Bytes(row != 0) & uint8_t(1 << r % 8);
  }
  Words words = __builtin_convertvector(halves[0], Words) | __builtin_convertvector(halves[1], Words) << 8;
  if (broadcast) words = Words(words != 0);
  std::memcpy(to, &words, sizeof(words));
  if (!any(words)) return Verdict::skip;
  uint16_t shown[kCellKeys];  // the words of a cell that hides nothing
  for (int64_t j = 0; j < kCellKeys; j++) shown[j] = j >= cell.keys ? 0 : broadcast ? 0xffff : (1 << cell.rows) - 1;
  Words hidden;
  std::memcpy(&hidden, shown, sizeof(hidden));
  return any(hidden & ~words) ? Verdict::partial : Verdict::full;
}
// The same for a bias, which each score still has to be given: a cell is hidden, or it is partial.
template <class U> INLINE Verdict map_cell(const MaskCell<U>& cell, bool, uint16_t*) {
  using V = Vec<Accumulate<U>>;
  for (int64_t r = 0; r < cell.rows; r++) {
    U copy[kCellKeys];
    const U* row = cell.elements(r, cell.data[0], copy);
    decltype(V() == V()) hidden = V(0) == V(0);
    for (int64_t j = 0; j < kCellKeys; j += V::lanes) hidden = hidden & (load(row + j) == V(kHidden));
    if (any(~hidden.v)) return Verdict::partial;
  }
  return Verdict::skip;
}

// The parameters with the map of their mask, which is made in `memory`, map_bytes(p) bytes.
template <class U> AttentionParams with_map_of(AttentionParams p, void* memory, const Runner& runner) {
  place_map(p, memory);
  const MapShape shape(p);
  const Tensor4& mapped = p.mapped();
  constexpr int64_t cells_per_task = 64;
  const int64_t tasks_per_row = ceil_div(shape.key_cells, cells_per_task);
  const int64_t tasks = shape.batch * shape.heads * shape.query_cells * tasks_per_row;
  const auto map = [&](int64_t, int64_t index) {
    const int64_t begin = index % tasks_per_row * cells_per_task, row = index / tasks_per_row;
    const int64_t query_cell = row % shape.query_cells, i = query_cell * kCellQueries;
    const int64_t h = row / shape.query_cells % shape.heads, b = row / shape.query_cells / shape.heads;
    uint8_t* cells = static_cast<uint8_t*>(p.map_cells.data) + p.map_cells.offset(b, h, query_cell);
    uint16_t* bits = static_cast<uint16_t*>(p.map_bits.data);
    if (bits) bits += p.map_bits.offset(b, h, query_cell);
    for (int64_t n = begin; n < min(begin + cells_per_task, shape.key_cells); n++) {
      const int64_t j = n * kCellKeys;
      const MaskCell<U> cell{static_cast<const U*>(mapped.data) + mapped.offset(b, h, i) + j * mapped.dim, mapped.row,
                             mapped.dim, min(kCellQueries, shape.queries - i), min(kCellKeys, shape.keys - j)};
      cells[n] = static_cast<uint8_t>(map_cell(cell, mapped.row == 0, bits + j));
    }
  };
  constexpr int64_t cells_alone = 1024;  // so few take less time than to wake the other threads
  if (shape.cells() <= cells_alone)
    for (int64_t index = 0; index < tasks; index++) map(0, index);
  else
    runner.run(tasks, map);
  return p;
}
inline AttentionParams with_map(const AttentionParams& p, void* memory, const Runner& runner) {
  if (map_bytes(p) == 0) return p;
  if (p.mask.data) return with_map_of<uint8_t>(p, memory, runner);
  switch (p.bias_dtype) {
    case DType::f16: return with_map_of<f16>(p, memory, runner);
    case DType::bf16: return with_map_of<bf16>(p, memory, runner);
    case DType::f32: return with_map_of<float>(p, memory, runner);
    default: return with_map_of<double>(p, memory, runner);
  }
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
