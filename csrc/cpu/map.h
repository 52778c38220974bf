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

  // Calls f(r, row) for each row, with kCellKeys elements, `padding` behind the last; until f returns false.
  template <class F> INLINE void for_each_row(U padding, F&& f) const {
    for (int64_t r = 0; r < rows; r++) {
      U row[kCellKeys];
      const U* from = data + r * row_stride;
      if (key_stride == 1 && keys == kCellKeys) {
        std::memcpy(row, from, sizeof(row));
      } else {
        for (int64_t j = 0; j < kCellKeys; j++) row[j] = j < keys ? from[j * key_stride] : padding;
      }
      if (!f(r, row)) return;
    }
  }
};

// The verdict of a cell of a bool mask, and the words of its bits. broadcast: its one row stands for all queries.
INLINE Verdict map_cell(const MaskCell<uint8_t>& cell, bool broadcast, uint16_t* words) {
  uint8_t halves[2][kCellKeys] = {};  // of the words: queries 0 to 7, and 8 to 15
  cell.for_each_row(0, [&](int64_t r, const uint8_t* row) {
    const uint8_t bit = 1 << r % 8;
    uint8_t* half = halves[r / 8];
    for (int64_t j = 0; j < kCellKeys; j++) half[j] |= row[j] ? bit : 0;
    return true;
  });
  const uint16_t shown = broadcast ? 0xffff : (1 << cell.rows) - 1;
  uint16_t some = 0, hidden = 0;
  for (int64_t j = 0; j < kCellKeys; j++) {
    uint16_t word = halves[0][j] | halves[1][j] << 8;
    if (broadcast) word = word ? 0xffff : 0;
    words[j] = word;
    some |= word;
  }
  for (int64_t j = 0; j < cell.keys; j++) hidden |= shown & ~words[j];
  return !some ? Verdict::skip : hidden ? Verdict::partial : Verdict::full;
}
// The same for a bias, which each score still has to be given: a cell is hidden, or it is partial.
template <class U> INLINE Verdict map_cell(const MaskCell<U>& cell, bool, uint16_t*) {
  Verdict verdict = Verdict::skip;
  cell.for_each_row(cell.data[0], [&](int64_t, const U* row) {
    bool some = false;
    for (int64_t j = 0; j < kCellKeys; j++) some |= to_float(row[j]) != kHidden;
    if (some) verdict = Verdict::partial;
    return !some;
  });
  return verdict;
}

// The parameters with the map of their mask, which is made in `memory`, map_bytes(p) bytes.
template <class U> AttentionParams with_map_of(AttentionParams p, void* memory, const Runner& runner) {
  place_map(p, memory);
  const MapShape shape(p);
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
      const MaskCell<U> cell{static_cast<const U*>(p.mask.data) + p.mask.offset(b, h, i) + j * p.mask.dim, p.mask.row,
                             p.mask.dim, min(kCellQueries, shape.queries - i), min(kCellKeys, shape.keys - j)};
      cells[n] = static_cast<uint8_t>(map_cell(cell, p.mask.row == 0, bits + j));
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
  switch (p.mask_dtype) {
    case DType::boolean: return with_map_of<uint8_t>(p, memory, runner);
    case DType::f16: return with_map_of<f16>(p, memory, runner);
    case DType::bf16: return with_map_of<bf16>(p, memory, runner);
    case DType::f32: return with_map_of<float>(p, memory, runner);
    default: return with_map_of<double>(p, memory, runner);
  }
}

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
