// Global memory: its tensors, what is allowed on each byte, and which thread accessed it in this launch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace interpreter {

struct Warp;

// Flags of a byte.
enum : uint8_t { kReadable = 1, kWritable = 2, kWritten = 4 };

// update: an atomic operation. observe, publish: a strong load or store (volatile, relaxed, acquire or release). Strong
// accesses may race with each other.
enum class Access : uint8_t { read, write, update, observe, publish };
inline bool reads(Access a) { return a == Access::read || a == Access::update || a == Access::observe; }
inline bool writes(Access a) { return a == Access::write || a == Access::update || a == Access::publish; }
inline bool atomic(Access a) { return a != Access::read && a != Access::write; }

// A range of addresses: a tensor, or several that are overlapping views of one memory.
struct Region {
  uint64_t begin, end;
  std::string name;
  std::vector<uint8_t> flags;
  uint32_t tag = 0;
  // The last writer and reader of each byte: the launch's stamp + 1 + the block. Flags are added for atomic writes.
  // The stamp itself: readers in several blocks.
  std::vector<uint32_t> writer, reader;
  std::vector<uint32_t> moment;  // the writer's warp, lane and clock
  bool host_may_have_written = false;
};

struct Traffic {
  uint64_t bytes_read = 0, bytes_written = 0;                    // summed over lanes
  uint64_t distinct_bytes_read = 0, distinct_bytes_written = 0;  // counted once per launch
  uint64_t sectors = 0, ideal_sectors = 0, accesses = 0;         // of 32 bytes
};

class GlobalMemory {
 public:
  static constexpr uint8_t kPoison = 0xff;

  void clear();
  // Declares a tensor, whose elements get these flags; bytes between its elements get none. strides are in elements.
  void declare(const std::string& name, uint64_t data, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& strides, int64_t item, uint8_t flags);
  // Memory that the operator allocates itself, filled with kPoison.
  void allocate(const std::string& name, uint64_t data, uint64_t bytes);
  void release(uint64_t data);
  // Marks bytes that the host has written since the allocation: those that are no longer kPoison.
  void note_host_writes();
  // A write by the host through the runtime: memset, memcpy.
  void host_write(uint64_t data, uint64_t bytes);
  void host_read(uint64_t data, uint64_t bytes);
  // The first element that was never written, or -1.
  int64_t unwritten(uint64_t data, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                    int64_t item) const;

  void begin_launch(uint32_t blocks);

  // Pointers that a kernel gets carry a tag in their upper 16 bits: the number of their tensor. Address arithmetic
  // keeps it, so an access that leaves its tensor is found even if it lands in another one.
  static uint64_t untagged(uint64_t pointer) { return pointer & ((uint64_t(1) << kTagShift) - 1); }
  uint64_t tagged(uint64_t pointer) const;

  // Checks an access by a lane. value: what a plain store is about to write.
  void check(const Warp& warp, int lane, uint64_t pointer, uint32_t size, Access access, const void* value = nullptr);
  bool is_writable(uint64_t pointer);
  // "tensor + n bytes"
  std::string place(uint64_t pointer) const;
  // Counts one access of a warp.
  void count(const uint64_t* addresses, uint32_t mask, uint32_t size, Access access);

  Traffic traffic;

 private:
  // Flags of a writer, above its stamp. kSeveral: of several blocks that wrote atomically, it is the last one.
  static constexpr uint32_t kAtomic = 1u << 31, kSeveral = 1u << 30, kStamp = kSeveral - 1;
  static constexpr int kTagShift = 48;

  void add(std::unique_ptr<Region> region);
  // By an address without a tag.
  Region* find(uint64_t address);
  const Region* find(uint64_t address) const;
  Region* region_of(uint64_t pointer);
  std::string nearest(uint64_t address) const;
  std::string outside(const Region* region, uint64_t address) const;
  std::string describe(const Region& region, uint64_t address) const;
  template <uint32_t kSize> bool is_plain(uint32_t me, const Region& region, uint64_t at, Access access) const;
  template <uint32_t kSize> void note(uint32_t me, uint32_t moment, Region& region, uint64_t at, Access access);
  template <uint32_t kSize>
  void check_bytes(const Warp& warp, int lane, Region& region, uint64_t at, Access access, const void* value);
  void check_flags(int lane, const Region& region, uint64_t at, uint32_t size, Access access) const;
  void check_order(const Warp& warp, int lane, const Region& region, uint64_t at, Access access, bool same_value) const;

  std::vector<std::unique_ptr<Region>> regions_;  // by address
  std::vector<Region*> by_tag_ = {nullptr};
  Region* last_ = nullptr;
  uint32_t stamp_ = 0;  // of this launch; block b has stamp + 1 + b
  uint32_t next_stamp_ = 1;
};

}  // namespace interpreter
