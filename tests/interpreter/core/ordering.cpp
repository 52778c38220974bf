#include "ordering.h"

#include <algorithm>

#include "machine.h"

namespace interpreter {

void Knowledge::learn(uint32_t block, const Clocks& clocks) {
  Clocks& known = blocks_[block];
  for (size_t warp = 0; warp < clocks.size(); warp++) known[warp] = std::max(known[warp], clocks[warp]);
}

void Knowledge::merge(const Knowledge& other) {
  for (const auto& [block, clocks] : other.blocks_) learn(block, clocks);
}

const Knowledge::Clocks* Knowledge::of(uint32_t block) const {
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? nullptr : &found->second;
}

bool Knowledge::covers(uint32_t block, uint32_t warp, uint32_t clock) const {
  const Clocks* clocks = of(block);
  return clocks && (*clocks)[warp] >= clock;
}

void Warp::fence(MemoryScope scope) {
  Knowledge now = order.acquired;
  Knowledge::Clocks clocks{};
  for (size_t w = 0; w < block->warps.size(); w++) clocks[w] = block->clock_of(seen[w]);
  clocks[id] = block->clock_of(clock);
  now.learn(block->linear, clocks);
  order.fenced.to_block = now;
  if (scope == MemoryScope::device) order.fenced.to_all = now;
  clock++;  // later accesses are not fenced
}

void Launch::release(Warp& w, const void* at, bool replaces) {
  const uint64_t address = reinterpret_cast<uint64_t>(at);
  if (w.order.fenced.empty()) {
    if (replaces && !released_.empty()) released_.erase(address);
    return;
  }
  Released& released = released_[address];
  if (replaces) released.clear();
  released.merge(w.order.fenced);
}

void Launch::acquire(Warp& w, const void* at) {
  if (released_.empty()) return;
  const auto found = released_.find(reinterpret_cast<uint64_t>(at));
  if (found == released_.end()) return;
  const Block& block = *w.block;
  const Released& released = found->second;
  w.order.acquired.merge(released.to_all);
  for (const Knowledge* known : {&released.to_all, &released.to_block}) {
    const Knowledge::Clocks* clocks = known->of(block.linear);
    for (size_t other = 0; clocks && other < block.warps.size(); other++)
      w.seen[other] = std::max(w.seen[other], (*clocks)[other] + block.first_clock);
  }
}

}  // namespace interpreter
