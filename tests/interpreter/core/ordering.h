// The order of accesses beyond barriers: fences, and strong accesses (atomic, volatile, acquire, release).
//
// As in PTX's memory model, a write after a fence shows everything before the fence to whoever reads it. Two
// simplifications, both lenient: a fence of one lane counts for its warp, and every strong read acquires.
#pragma once

#include <array>
#include <cstdint>
#include <map>

namespace interpreter {

// Which threads a fence or a release is for.
enum class MemoryScope : uint8_t { none, block, device };

// For each block, the latest clock of each of its warps that is known to have passed.
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

// What a value shows to its readers: to those in the writer's block, and to all others.
struct Released {
  Knowledge to_block, to_all;

  bool empty() const { return to_block.empty() && to_all.empty(); }
  void clear() { *this = {}; }
  void merge(const Released& other) {
    to_block.merge(other.to_block);
    to_all.merge(other.to_all);
  }
};

// What a warp knows and passes on. Barriers pass it to the whole block.
struct Order {
  Knowledge acquired;  // about other blocks
  Released fenced;     // what was known at its last fence, published by its strong writes since

  bool empty() const { return acquired.empty() && fenced.empty(); }
  void clear() { *this = {}; }
  void merge(const Order& other) {
    acquired.merge(other.acquired);
    fenced.merge(other.fenced);
  }
};

}  // namespace interpreter
