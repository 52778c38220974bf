// Where the lanes of an instruction access memory.
#pragma once

#include "machine.h"

namespace interpreter {

// Where the lanes of one access go, all of them to the same space.
struct Places {
  Space space;
  uint64_t address[kLanes];  // in that space
  uint8_t* data[kLanes];
  uint8_t* known[kLanes];  // 0xff for each initialised byte; only of shared and local memory

  bool has_known() const { return space == Space::shared || space == Space::local; }
};

// Finds where the lanes of a warp access `bytes` each, and counts the access. place: p.address is given.
void locate(Warp& w, const Instruction& i, Mask lanes, uint32_t bytes, Access access, Places& p);
void place(Warp& w, const Instruction& i, Mask lanes, uint32_t bytes, Access access, Places& p);

// value: what a plain store is about to write.
void check(Warp& w, const Places& p, int lane, uint32_t bytes, Access access, const void* value = nullptr);
void check_reads(Warp& w, const Places& p, Mask lanes, uint32_t bytes, Access access);

// Lanes have read what others may write: they see what those released, or poll again.
void acquire(Warp& w, const Places& p, Mask lanes, uint32_t bytes);

// The asynchronous copies of these lanes arrive in shared memory, for those who wait for an mbarrier.
void land_copies(Warp& w, Mask lanes);
Flow arrive_after_copies(Warp& w, const Instruction& i, Mask lanes);

template <size_t kBytes> bool all_known(const uint8_t* known) {
  typename UnsignedOf<kBytes>::type bytes;
  std::memcpy(&bytes, known, kBytes);
  return bytes == typename UnsignedOf<kBytes>::type(~uint64_t(0));
}

}  // namespace interpreter
