#include "shared.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "fault.h"
#include "machine.h"

namespace interpreter {

constexpr uint32_t kSegment = 16;
constexpr uint32_t kInFlight = ~0u;  // the clock of an asynchronous copy under way, later than any clock seen

void SharedMemory::begin_launch(uint32_t bytes, uint32_t warps, uint32_t cell) {
  size_ = bytes;
  warps_ = (warps + 3) / 4 * 4;
  cell_ = cell;
  cell_shift_ = std::countr_zero(cell);
  per_segment_ = kSegment / cell;
  divided_.assign(bytes / kSegment + 1, false);
  bytes_.assign(bytes + 2048, 0);
  shift_ = (1024 - reinterpret_cast<uint64_t>(bytes_.data()) % 1024) % 1024;
  known_.assign(bytes + 16, 0);
  stride_ = sizeof(Cell) / sizeof(uint32_t) + warps_;
  cells_.assign((bytes / cell + 16) * size_t(stride_), 0);
}

void SharedMemory::begin_block() {
  std::memset(data(), 0xff, size_);
  std::fill(known_.begin(), known_.end(), 0);
  for (uint32_t index = 0; index < size_ / cell_; index++)
    if (cell(index).clock == kInFlight) cell(index).clock = 0;
}

void SharedMemory::race(const Warp& warp, int lane, uint32_t cell, const std::string& what) const {
  fault(lane, "race on shared memory: warp ", warp.id, " ", what, ", at shared + ", cell * cell_, " bytes");
}

// The last write of a cell is not ordered before this access.
void SharedMemory::after_write(const Warp& warp, int lane, uint32_t index, bool write, bool several) {
  const Cell& cell = this->cell(index);
  const std::string verb = write ? "writes" : "reads", writer = std::to_string(cell.warp);
  if (cell.clock == kInFlight)
    race(warp, lane, index, verb + " where a cp.async of warp " + writer + " has not been waited for");
  if (cell.warp != warp.id)
    race(warp, lane, index, verb + " what warp " + writer + " wrote, without a barrier between");
  if (several || cell.lane != lane)
    race(warp, lane, index, verb + " what another of its lanes wrote, without __syncwarp between");
}

void SharedMemory::after_reads(const Warp& warp, int lane, uint32_t index) {
  const uint32_t* read = cell(index).reads();
  for (uint32_t other = 0; other < warps_; other++)
    if (int(other) != warp.id && read[other] > warp.seen[other])
      race(warp, lane, index, "overwrites what warp " + std::to_string(other) + " read, without a barrier between");
  race(warp, lane, index, "overwrites what another of its lanes read, without __syncwarp between");
}

// Whether a store leaves a cell's value unchanged.
bool SharedMemory::same_value(uint32_t index, uint32_t address, uint32_t size, const void* value) {
  const uint32_t bytes = size == kSegment && !divided_[address / kSegment] ? kSegment : cell_;
  const uint32_t begin = std::max(address, index * cell_), end = std::min(address + size, index * cell_ + bytes);
  const uint8_t* from = static_cast<const uint8_t*>(value) + (begin - address);
  return cell(index).clock != kInFlight && std::memcmp(data() + begin, from, end - begin) == 0;
}

template <class Same>
inline void SharedMemory::check_cell(Warp& warp, int lane, uint32_t index, Access access, bool several, Same&& same) {
  Cell& cell = this->cell(index);
  const uint8_t lane8 = several ? kSeveral : lane;
  if (cell.clock > warp.seen[cell.warp] && !(atomic(access) && cell.writer == Writer::atomic) && !same())
    after_write(warp, lane, index, writes(access), several);
  uint32_t* read = cell.reads();
  if (access == Access::observe) return;
  if (access == Access::read) {
    const bool again = read[warp.id] == warp.clock;
    cell.reader = again && cell.reader != lane8 ? kSeveral : lane8;
    read[warp.id] = warp.clock;
    return;
  }
  // A lane's own reads come before its write.
  const uint32_t own = read[warp.id];
  if (cell.reader == lane8 && lane8 != kSeveral) read[warp.id] = 0;
  for (uint32_t base = 0; base < warps_; base += 4) {
    uint32_t later = 0;
    for (uint32_t other = base; other < base + 4; other++) later |= read[other] > warp.seen[other];
    if (later) after_reads(warp, lane, index);
  }
  read[warp.id] = own;
  cell = {warp.clock, uint8_t(warp.id), lane8, atomic(access) ? Writer::atomic : Writer::plain, cell.reader};
}

// Visits the cells of these bytes. joins: they will hold the same state, so that one cell may stand for all.
template <class Visit>
inline void SharedMemory::for_cells(uint32_t address, uint32_t size, bool joins, Visit&& visit) {
  const uint32_t segment = address / kSegment, first = segment * per_segment_;
  const bool divided = divided_[segment];
  if (size == kSegment) {
    for (uint32_t cell = first; cell < (divided ? first + per_segment_ : first + 1); cell++) visit(cell);
    if (divided && joins) divided_[segment] = false;
    return;
  }
  if (!divided) {
    divided_[segment] = true;
    for (uint32_t cell = first + 1; cell < first + per_segment_; cell++) {
      std::copy_n(&cells_[size_t(first) * stride_], stride_, &cells_[size_t(cell) * stride_]);
    }
  }
  for (uint32_t cell = address >> cell_shift_; cell <= (address + size - 1) >> cell_shift_; cell++) visit(cell);
}

template <uint32_t kSize>
void SharedMemory::check_sized(Warp& warp, int lane, uint32_t address, Access access, const void* value, bool several) {
  for_cells(address, kSize, writes(access), [&](uint32_t cell) {
    check_cell(warp, lane, cell, access, several, [&] { return value && same_value(cell, address, kSize, value); });
  });
}

void SharedMemory::check(Warp& warp, int lane, uint64_t address, uint32_t size, Access access, const void* value,
                         bool several) {
  if (address + size > size_)
    fault(lane, "shared ", writes(access) ? "write" : "read", " of ", size, " bytes out of bounds: at ", address,
          " of ", size_, " bytes");
  if (address % size) fault(lane, "misaligned shared access of ", size, " bytes at shared + ", address, " bytes");
  switch (size) {
    case 1: return check_sized<1>(warp, lane, address, access, value, several);
    case 2: return check_sized<2>(warp, lane, address, access, value, several);
    case 4: return check_sized<4>(warp, lane, address, access, value, several);
    case 8: return check_sized<8>(warp, lane, address, access, value, several);
    default: return check_sized<16>(warp, lane, address, access, value, several);
  }
}

void SharedMemory::begin_async(Warp& warp, int lane, uint64_t address, uint32_t size) {
  check(warp, lane, address, size, Access::write);
  for_cells(address, size, true, [&](uint32_t index) {
    cell(index).clock = kInFlight;
    cell(index).writer = Writer::async;
  });
  std::memset(data() + address, 0xff, size);
  std::memset(&known_[address], 0, size);
}

void SharedMemory::end_async(Warp& warp, int lane, uint32_t address, uint32_t size, bool by_mbarrier) {
  const uint8_t writer = by_mbarrier ? kSeveral : lane;
  for_cells(address, size, true, [&](uint32_t index) {
    cell(index) = {warp.clock, uint8_t(warp.id), writer, Writer::plain, cell(index).reader};
  });
  std::memset(&known_[address], 0xff, size);
}

void count_banks(BankConflicts& counts, const uint64_t* addresses, uint32_t mask, uint32_t size) {
  // A turn moves at most 128 bytes: it serves all lanes, half or a quarter of them.
  const uint32_t unit = std::max(size, 4u), groups = 128 / unit, per_turn = std::min(groups, 32u);
  counts.accesses++;
  for (uint32_t first = 0; first < 32; first += per_turn) {
    uint32_t turn = mask >> first & (per_turn == 32 ? ~0u : (1u << per_turn) - 1);
    if (!turn) continue;
    counts.ideal++;
    // A pass serves one unit in each group of banks, to all lanes that access this unit.
    while (turn) {
      uint64_t served[32];
      uint32_t busy = 0, left = 0;
      for (uint32_t rest = turn; rest; rest &= rest - 1) {
        const int lane = std::countr_zero(rest);
        const uint64_t at = addresses[first + lane] / unit;
        const uint32_t group = at % groups;
        if (busy >> group & 1) {
          left |= served[group] == at ? 0 : 1u << lane;
        } else {
          busy |= 1u << group;
          served[group] = at;
        }
      }
      counts.wavefronts++;
      turn = left;
    }
  }
}

}  // namespace interpreter
