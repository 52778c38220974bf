// Global memory: which bytes there are, what may be done with them, and who did it in this launch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace interpreter {

struct Warp;

// Of a byte.
enum : uint8_t { kReadable = 1, kWritable = 2, kWritten = 4 };

// update: an atomic operation. observe, publish: a read or a write that others may do at the same time, volatile or with an
// order.
enum class Access : uint8_t { read, write, update, observe, publish };
inline bool reads(Access a) { return a == Access::read || a == Access::update || a == Access::observe; }
inline bool writes(Access a) { return a == Access::write || a == Access::update || a == Access::publish; }
inline bool atomic(Access a) { return a != Access::read && a != Access::write; }

// What lies between two addresses: a tensor, or tensors that are views of one memory.
struct Region {
  uint64_t begin, end;
  std::string name;
  std::vector<uint8_t> flags;
  uint32_t tag = 0;
  // Who wrote or read a byte last: the launch's stamp + 1 + its block, and kAtomic for a writer; the stamp alone for
  // readers of several blocks.
  std::vector<uint32_t> writer, reader;
  std::vector<uint32_t> moment;  // warp, lane and clock of that writer
  bool host_may_have_written = false;
};

struct Traffic {
  uint64_t bytes_read = 0, bytes_written = 0;                    // as the lanes asked
  uint64_t distinct_bytes_read = 0, distinct_bytes_written = 0;  // in a launch
  uint64_t sectors = 0, ideal_sectors = 0, accesses = 0;         // of 32 bytes
};

class GlobalMemory {
 public:
  static constexpr uint8_t kPoison = 0xff;

  void clear();
  // A tensor: its bytes are those of its elements, not those between its rows. strides are in elements. flags are of its
  // bytes.
  void declare(const std::string& name, uint64_t data, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& strides, int64_t item, uint8_t flags);
  // Memory of the operator's own, as long as it lives. Every byte of it is kPoison.
  void allocate(const std::string& name, uint64_t data, uint64_t bytes);
  void release(uint64_t data);
  // Bytes of an allocation that are no longer poison when the device first runs were written by the host.
  void note_host_writes();
  // A write by the host through the runtime: memset, memcpy.
  void host_write(uint64_t data, uint64_t bytes);
  void host_read(uint64_t data, uint64_t bytes);
  // The first element that was never written, or -1.
  int64_t unwritten(uint64_t data, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                    int64_t item) const;

  void begin_launch(uint32_t blocks);

  // Where a pointer points, and the pointer with the tag of the tensor that this belongs to. The tag is in the upper
  // 16 bits, and stays there while a kernel computes addresses: so an access that leaves its tensor is noticed though
  // there is another one.
  static uint64_t untagged(uint64_t pointer) { return pointer & ((uint64_t(1) << kTagShift) - 1); }
  uint64_t tagged(uint64_t pointer) const;

  // Checks an access by a lane. value: what a plain store is about to write.
  void check(const Warp& warp, int lane, uint64_t pointer, uint32_t size, Access access, const void* value = nullptr);
  bool is_writable(uint64_t pointer);
  // A tensor and how far from its beginning.
  std::string place(uint64_t pointer) const;
  // Counts what the lanes of one warp accessed together.
  void count(const uint64_t* addresses, uint32_t mask, uint32_t size, Access access);

  Traffic traffic;

 private:
  static constexpr uint32_t kAtomic = 1u << 31;
  static constexpr int kTagShift = 48;

  void add(std::unique_ptr<Region> region);
  // Of a pointer without a tag.
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
  uint32_t stamp_ = 0;  // of this launch: readers of several blocks have it, block b has stamp + 1 + b
  uint32_t next_stamp_ = 1;
};

}  // namespace interpreter
