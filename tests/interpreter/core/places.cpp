#include "places.h"

#include <bit>
#include <cstring>

#include "fault.h"

namespace interpreter {
namespace {

// The space of a generic address.
Space space_of(Warp& w, uint64_t address) {
  Block& block = *w.block;
  const auto within = [&](const void* data, uint64_t size) {
    const uint64_t begin = reinterpret_cast<uint64_t>(data);
    return address >= begin && address < begin + size;
  };
  if (within(block.shared.data(), block.shared.size())) return Space::shared;
  if (within(w.local.data(), w.local.size())) return Space::local;
  if (within(block.launch.config.params.data(), block.launch.config.params.size())) return Space::param;
  return Space::global;
}

// Local memory and parameters.
void locate_private(Warp& w, Places& p, int lane, uint32_t bytes, Access access) {
  const std::vector<uint8_t>& params = w.block->launch.config.params;
  const uint64_t local_bytes = w.block->kernel.local_bytes, address = p.address[lane];
  const bool local = p.space == Space::local;
  if (address + bytes > (local ? local_bytes : params.size()))
    fault(lane, "out of bounds of ", local ? "local memory" : "parameters");
  if (address % bytes) fault(lane, "misaligned access of ", bytes, " bytes");
  if (!local && writes(access)) fault(lane, "write to a parameter");
  p.data[lane] = local ? &w.local[lane * local_bytes + address] : const_cast<uint8_t*>(&params[address]);
  if (local) p.known[lane] = &w.local_known[lane * local_bytes + address];
}

}  // namespace

void locate(Warp& w, const Instruction& i, Mask lanes, uint32_t bytes, Access access, Places& p) {
  w.addresses(i, lanes, p.address);
  place(w, i, lanes, bytes, access, p);
}

void place(Warp& w, const Instruction& i, Mask lanes, uint32_t bytes, Access access, Places& p) {
  Block& block = *w.block;
  p.space = i.space;
  if (p.space == Space::generic) {
    p.space = space_of(w, p.address[std::countr_zero(lanes)]);
    for (Mask rest = lanes; rest; rest &= rest - 1)
      if (space_of(w, p.address[std::countr_zero(rest)]) != p.space)
        fault(std::countr_zero(rest), "lanes of one access go to different spaces");
    for (int l = 0; l < kLanes; l++) p.address[l] -= window(w, p.space, l);
  }
  if (p.space == Space::global) {
    block.launch.memory.count(p.address, lanes, bytes, access);
    for (int l = 0; l < kLanes; l++) p.data[l] = reinterpret_cast<uint8_t*>(GlobalMemory::untagged(p.address[l]));
  } else if (p.space == Space::shared) {
    count_banks(block.launch.banks(i), p.address, lanes, bytes);
    for (int l = 0; l < kLanes; l++) {
      p.data[l] = block.shared.data() + p.address[l];
      p.known[l] = block.shared.known() + p.address[l];
    }
  } else {
    for (Mask rest = lanes; rest; rest &= rest - 1) locate_private(w, p, std::countr_zero(rest), bytes, access);
  }
}

void check(Warp& w, const Places& p, int lane, uint32_t bytes, Access access, const void* value) {
  Block& block = *w.block;
  if (p.space == Space::global) block.launch.memory.check(w, lane, p.address[lane], bytes, access, value);
  if (p.space == Space::shared) block.shared.check(w, lane, p.address[lane], bytes, access, value);
}

void check_reads(Warp& w, const Places& p, Mask lanes, uint32_t bytes, Access access) {
  if (p.space != Space::shared) {
    for (Mask rest = lanes; rest; rest &= rest - 1) check(w, p, std::countr_zero(rest), bytes, access);
    return;
  }
  for (Mask rest = lanes; rest;) {
    // Neighbouring lanes often read the same address: check it once.
    const int l = std::countr_zero(rest);
    Mask same = Mask(1) << l;
    for (int n = l + 1; access == Access::read && n < kLanes && (rest >> n & 1) && p.address[n] == p.address[l]; n++)
      same |= Mask(1) << n;
    w.block->shared.check(w, l, p.address[l], bytes, access, nullptr, (same & (same - 1)) != 0);
    rest &= ~same;
  }
}

void acquire(Warp& w, const Places& p, Mask lanes, uint32_t bytes) {
  uint64_t hash = lanes;
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    w.block->launch.acquire(w, p.data[l]);
    for (uint32_t b = 0; b < bytes; b++) hash = (hash ^ p.data[l][b]) * 0x100000001b3;
    hash = (hash ^ p.address[l]) * 0x9e3779b97f4a7c15;
  }
  w.poll(p.data[std::countr_zero(lanes)], bytes, hash);
}

}  // namespace interpreter
