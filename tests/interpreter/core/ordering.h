// What happened before what, beyond barriers: fences, and what threads read that others wrote after a fence.
#pragma once

#include <array>
#include <cstdint>
#include <map>

namespace interpreter {

// To whom a fence, or a write with release, shows what happened before.
enum class MemoryScope : uint8_t { none, block, device };

// For each block, the clocks of its warps up to which everything is known to have happened.
class Knowledge {
 public:
  using Clocks = std::array<uint32_t, 32>;

  bool empty() const { return blocks_.empty(); }
  void clear() { blocks_.clear(); }
  void learn(uint32_t block, const Clocks& clocks);
  void merge(const Knowledge& other);
  const Clocks* of(uint32_t block) const;
  bool covers(uint32_t block, uint32_t warp, uint32_t clock) const;

 private:
  std::map<uint32_t, Clocks> blocks_;
};

// What can be seen by those who read a value: by the block of who wrote it, and by all.
struct Released {
  Knowledge to_block, to_all;

  bool empty() const { return to_block.empty() && to_all.empty(); }
  void clear() { *this = {}; }
  void merge(const Released& other) {
    to_block.merge(other.to_block);
    to_all.merge(other.to_all);
  }
};

// A warp's part of it; barriers pass it on.
struct Order {
  Knowledge acquired;  // about other blocks
  Released fenced;     // by a fence: what is written from now on releases it

  bool empty() const { return acquired.empty() && fenced.empty(); }
  void clear() { *this = {}; }
  void merge(const Order& other) {
    acquired.merge(other.acquired);
    fenced.merge(other.fenced);
  }
};

}  // namespace interpreter
