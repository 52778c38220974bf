// Memory accesses of a warp: where each lane's address leads, and the checks there.
#pragma once

#include "machine.h"

namespace interpreter {

// The places that the lanes of one instruction access, all in the same space.
struct Places {
  Space space;
  uint64_t address[kLanes];  // in that space
  uint8_t* data[kLanes];
  uint8_t* known[kLanes];  // 0xff for each initialised byte; for shared and local memory only

  bool has_known() const { return space == Space::shared || space == Space::local; }
};

// locate: fills p for an access of `bytes` by each lane, and counts it. place: the same for given p.address.
void locate(Warp& w, const Instruction& i, Mask lanes, uint32_t bytes, Access access, Places& p);
void place(Warp& w, const Instruction& i, Mask lanes, uint32_t bytes, Access access, Places& p);

// value: what a plain store is about to write.
void check(Warp& w, const Places& p, int lane, uint32_t bytes, Access access, const void* value = nullptr);
void check_reads(Warp& w, const Places& p, Mask lanes, uint32_t bytes, Access access);

// To be called after a strong read: acquires what the writer released, and notes the read as a possible spin.
void acquire(Warp& w, const Places& p, Mask lanes, uint32_t bytes);

// Completes the asynchronous copies of these lanes; only who waits for the mbarrier may read them.
void land_copies(Warp& w, Mask lanes);
Flow arrive_after_copies(Warp& w, const Instruction& i, Mask lanes);

template <size_t kBytes> bool all_known(const uint8_t* known) {
  typename UnsignedOf<kBytes>::type bytes;
  std::memcpy(&bytes, known, kBytes);
  return bytes == typename UnsignedOf<kBytes>::type(~uint64_t(0));
}

}  // namespace interpreter
