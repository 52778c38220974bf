// The shared memory of a block: its bytes, which of them are initialised, and the last accesses, to find races.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"

namespace interpreter {

struct Warp;

// What kind of instruction wrote a cell last.
enum class Writer : uint8_t { plain, atomic, async };

struct BankConflicts {
  uint64_t accesses = 0;    // instructions of warps
  uint64_t wavefronts = 0;  // passes over the banks that they took
  uint64_t ideal = 0;       // passes without bank conflicts
};

// Races are found by vector clocks. A warp's clock counts its synchronisations; at barriers, warps learn the clocks of
// others. An access comes after another one if its warp has seen the clock of that one.
class SharedMemory {
 public:
  void begin_launch(uint32_t bytes, uint32_t warps, uint32_t cell);
  void begin_block();

  uint8_t* data() { return bytes_.data() + shift_; }
  uint8_t* known() { return known_.data(); }  // 0xff for each initialised byte
  uint32_t size() const { return size_; }

  // Checks an access by a lane. value: what a plain store is about to write; two threads may store equal values.
  // several: other lanes of the warp take part, as in ldmatrix.
  void check(Warp& warp, int lane, uint64_t address, uint32_t size, Access access, const void* value = nullptr,
             bool several = false);
  // An asynchronous copy to this address begins, and ends. by_mbarrier: its own lane has not waited for it either.
  void begin_async(Warp& warp, int lane, uint64_t address, uint32_t size);
  void end_async(Warp& warp, int lane, uint32_t address, uint32_t size, bool by_mbarrier);

 private:
  // For each cell: its last write, followed by the clock of each warp's last read.
  struct Cell {
    uint32_t clock;
    uint8_t warp, lane;
    Writer writer;
    uint8_t reader;  // the lane of the last reading warp, or kSeveral

    uint32_t* reads() { return reinterpret_cast<uint32_t*>(this + 1); }
  };
  static constexpr uint8_t kSeveral = 0xff;

  Cell& cell(uint32_t index) { return *reinterpret_cast<Cell*>(&cells_[size_t(index) * stride_]); }
  template <uint32_t kSize>
  void check_sized(Warp& warp, int lane, uint32_t address, Access access, const void* value, bool several);
  template <class Visit> void for_cells(uint32_t address, uint32_t size, bool joins, Visit&& visit);
  template <class Same>
  void check_cell(Warp& warp, int lane, uint32_t cell, Access access, bool several, Same&& same);
  bool same_value(uint32_t cell, uint32_t address, uint32_t size, const void* value);
  void after_write(const Warp& warp, int lane, uint32_t cell, bool write, bool several);
  [[noreturn]] void after_reads(const Warp& warp, int lane, uint32_t cell);
  [[noreturn]] void race(const Warp& warp, int lane, uint32_t cell, const std::string& what) const;

  std::vector<uint8_t> bytes_;
  uint32_t shift_ = 0, size_ = 0, warps_ = 1, cell_ = 4, cell_shift_ = 2, per_segment_ = 4, stride_ = 6;
  std::vector<uint8_t> known_;
  // Most accesses are 16 bytes wide. Where all are, only the first cell of the 16 bytes is in use.
  std::vector<uint8_t> divided_;
  std::vector<uint32_t> cells_;  // each a Cell and its reads, of stride_
};

// Counts the passes over the banks for one access of a warp. size: bytes per lane.
void count_banks(BankConflicts& counts, const uint64_t* addresses, uint32_t mask, uint32_t size);

}  // namespace interpreter
