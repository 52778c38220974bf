#include "memory.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "fault.h"
#include "machine.h"

namespace interpreter {
namespace {

// Calls visit(offset in bytes, number of elements) for each run of adjacent elements, in the tensor's order.
template <class Visit>
void for_elements(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t item, Visit&& visit) {
  for (int64_t size : sizes)
    if (size == 0) return;
  const bool rows = !sizes.empty() && strides.back() == 1;
  const size_t outer = sizes.size() - rows;
  std::vector<int64_t> index(outer, 0);
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < outer; d++) offset += index[d] * strides[d] * item;
    visit(offset, rows ? sizes.back() : 1);
    size_t d = outer;
    while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

std::string in_hex(uint64_t address) {
  std::ostringstream text;
  text << "0x" << std::hex << address;
  return text.str();
}

}  // namespace

void GlobalMemory::clear() {
  regions_.clear();
  by_tag_.assign(1, nullptr);
  last_ = nullptr;
}

void GlobalMemory::add(std::unique_ptr<Region> region) {
  const uint64_t bytes = region->end - region->begin;
  region->writer.assign(bytes, 0);
  region->reader.assign(bytes, 0);
  region->moment.assign(bytes, 0);
  if (region->tag == 0) {
    const auto unused = std::find(by_tag_.begin() + 1, by_tag_.end(), nullptr);
    region->tag = unused - by_tag_.begin();
    if (unused == by_tag_.end()) by_tag_.push_back(nullptr);
  }
  by_tag_.at(region->tag) = region.get();
  regions_.push_back(std::move(region));
  std::sort(regions_.begin(), regions_.end(), [](const auto& a, const auto& b) { return a->begin < b->begin; });
  last_ = nullptr;
}

void GlobalMemory::declare(const std::string& name, uint64_t data, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& strides, int64_t item, uint8_t flags) {
  int64_t end = item, begin = 0;
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 0) return;
    (strides[d] > 0 ? end : begin) += (sizes[d] - 1) * strides[d] * item;
  }
  auto region = std::make_unique<Region>();
  region->begin = data + begin;
  region->end = data + end;
  region->name = name;
  // Overlapping views become one region.
  std::vector<std::unique_ptr<Region>> apart, overlapping;
  for (auto& other : regions_)
    (other->begin < region->end && region->begin < other->end ? overlapping : apart).push_back(std::move(other));
  regions_ = std::move(apart);
  for (const auto& other : overlapping) {
    region->begin = std::min(region->begin, other->begin);
    region->end = std::max(region->end, other->end);
    if (other->name.find(name) == std::string::npos) region->name += "/" + other->name;
    by_tag_[other->tag] = nullptr;
    region->tag = other->tag;
  }
  region->flags.assign(region->end - region->begin, 0);
  for (const auto& other : overlapping)
    for (size_t b = 0; b < other->flags.size(); b++) region->flags[other->begin - region->begin + b] |= other->flags[b];
  for_elements(sizes, strides, item, [&](int64_t offset, int64_t elements) {
    uint8_t* of_elements = &region->flags[data + offset - region->begin];
    for (int64_t b = 0; b < elements * item; b++) of_elements[b] |= flags;
  });
  add(std::move(region));
}

void GlobalMemory::allocate(const std::string& name, uint64_t data, uint64_t bytes) {
  if (bytes == 0) return;
  auto region = std::make_unique<Region>();
  region->begin = data;
  region->end = data + bytes;
  region->name = name;
  region->flags.assign(bytes, kReadable | kWritable);
  region->host_may_have_written = true;
  add(std::move(region));
}

void GlobalMemory::release(uint64_t data) {
  std::erase_if(regions_, [&](const auto& region) {
    if (region->begin != data) return false;
    by_tag_[region->tag] = nullptr;
    return true;
  });
  last_ = nullptr;
}

void GlobalMemory::note_host_writes() {
  for (const auto& region : regions_) {
    if (!region->host_may_have_written) continue;
    region->host_may_have_written = false;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(region->begin);
    // Four bytes at a time, because single bytes, or halves, of a number may equal kPoison.
    for (size_t b = 0; b < region->flags.size(); b += 4) {
      const size_t end = std::min(b + 4, region->flags.size());
      if (std::any_of(bytes + b, bytes + end, [](uint8_t byte) { return byte != kPoison; }))
        for (size_t n = b; n < end; n++) region->flags[n] |= kWritten;
    }
  }
}

Region* GlobalMemory::find(uint64_t address) {
  if (last_ && last_->begin <= address && address < last_->end) return last_;
  const auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                      [](uint64_t a, const auto& region) { return a < region->begin; });
  if (after == regions_.begin()) return nullptr;
  Region* region = std::prev(after)->get();
  return address < region->end ? (last_ = region) : nullptr;
}

const Region* GlobalMemory::find(uint64_t address) const { return const_cast<GlobalMemory*>(this)->find(address); }

Region* GlobalMemory::region_of(uint64_t pointer) {
  const uint64_t tag = pointer >> kTagShift;
  return tag ? (tag < by_tag_.size() ? by_tag_[tag] : nullptr) : find(pointer);
}

uint64_t GlobalMemory::tagged(uint64_t pointer) const {
  const Region* region = find(pointer);
  return region ? pointer | uint64_t(region->tag) << kTagShift : pointer;
}

bool GlobalMemory::is_writable(uint64_t pointer) {
  const Region* region = region_of(pointer);
  return region && (region->flags[untagged(pointer) - region->begin] & kWritable);
}

std::string GlobalMemory::place(uint64_t pointer) const {
  const Region* region = find(untagged(pointer));
  return region ? describe(*region, untagged(pointer)) : in_hex(pointer);
}

std::string GlobalMemory::describe(const Region& region, uint64_t address) const {
  return region.name + " + " + std::to_string(address - region.begin) + " bytes";
}

std::string GlobalMemory::nearest(uint64_t address) const {
  const Region* best = nullptr;
  uint64_t least = ~uint64_t(0);
  for (const auto& region : regions_) {
    const uint64_t distance = address < region->begin ? region->begin - address : address - region->end;
    if (distance >= least) continue;
    least = distance;
    best = region.get();
  }
  if (!best || least > (1 << 20)) return "nothing is near";
  return std::to_string(least) + (address < best->begin ? " bytes before " : " bytes after the end of ") + best->name +
         ", which is of " + std::to_string(best->end - best->begin) + " bytes";
}

// Describes an address outside of the tensor it was meant for (null: unknown).
std::string GlobalMemory::outside(const Region* region, uint64_t address) const {
  if (!region) return nearest(address);
  if (region->begin <= address && address < region->end) return "it goes beyond the end of " + region->name;
  const bool before = address < region->begin;
  const Region* other = find(address);
  return std::to_string(before ? region->begin - address : address - region->end) +
         (before ? " bytes before " : " bytes after the end of ") + region->name + ", which is of " +
         std::to_string(region->end - region->begin) + " bytes" + (other ? ", in " + other->name : "");
}

void GlobalMemory::host_write(uint64_t data, uint64_t bytes) {
  Region* region = find(data);
  if (!region || data + bytes > region->end) fault(-1, "memset or memcpy out of bounds: ", nearest(data));
  for (uint64_t b = data - region->begin; b < data - region->begin + bytes; b++) {
    if (!(region->flags[b] & kWritable)) fault(-1, "memset or memcpy to an input: ", describe(*region, data));
    region->flags[b] |= kWritten;
  }
}

void GlobalMemory::host_read(uint64_t data, uint64_t bytes) {
  Region* region = find(data);
  if (!region) return;  // memory of the host
  for (uint64_t b = data - region->begin; b < data - region->begin + bytes; b++)
    if (b >= region->flags.size() || !(region->flags[b] & kWritten))
      fault(-1, "memcpy of bytes that were never written or are out of bounds: ", describe(*region, data));
}

int64_t GlobalMemory::unwritten(uint64_t data, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                int64_t item) const {
  const Region* region = find(data);
  int64_t first = -1, index = 0;
  if (!region) return first;
  for_elements(sizes, strides, item, [&](int64_t offset, int64_t elements) {
    const uint8_t* of_elements = &region->flags[data + offset - region->begin];
    for (int64_t b = 0; b < elements * item && first < 0; b++)
      if (!(of_elements[b] & kWritten)) first = index + b / item;
    index += elements;
  });
  return first;
}

void GlobalMemory::begin_launch(uint32_t blocks) {
  note_host_writes();
  if (uint64_t(next_stamp_) + blocks + 2 >= kStamp) {
    for (const auto& region : regions_) {
      std::fill(region->writer.begin(), region->writer.end(), 0);
      std::fill(region->reader.begin(), region->reader.end(), 0);
    }
    next_stamp_ = 1;
  }
  stamp_ = next_stamp_;
  next_stamp_ += blocks + 1;
  traffic = {};
}

// Fast path: whether an access is allowed, and no earlier access of this launch needs to be ordered before it.
template <uint32_t kSize>
bool GlobalMemory::is_plain(uint32_t me, const Region& region, uint64_t at, Access access) const {
  const uint8_t* flags = &region.flags[at];
  const uint32_t *writer = &region.writer[at], *reader = &region.reader[at];
  const uint8_t needed = (reads(access) ? kReadable | kWritten : 0) | (writes(access) ? kWritable : 0);
  const uint32_t harmless = atomic(access) ? kAtomic : 0;
  uint8_t all = 0xff;
  uint32_t met = 0;
  for (uint32_t b = 0; b < kSize; b++) all &= flags[b];
  for (uint32_t b = 0; b < kSize; b++) met += (writer[b] & kStamp) >= stamp_ && !(writer[b] & harmless);
  if (writes(access))
    for (uint32_t b = 0; b < kSize; b++) met += reader[b] >= stamp_ && reader[b] != me;
  return (all & needed) == needed && met == 0;
}

template <uint32_t kSize>
void GlobalMemory::note(uint32_t me, uint32_t moment, Region& region, uint64_t at, Access access) {
  uint32_t *writer = &region.writer[at], *reader = &region.reader[at];
  uint32_t fresh = 0;
  if (access == Access::read) {
    for (uint32_t b = 0; b < kSize; b++) {
      fresh += reader[b] < stamp_;
      reader[b] = reader[b] < stamp_ || reader[b] == me ? me : stamp_;
    }
    traffic.distinct_bytes_read += fresh;
  } else if (writes(access)) {
    for (uint32_t b = 0; b < kSize; b++) {
      const uint32_t before = writer[b] & kStamp;
      fresh += before < stamp_;
      region.flags[at + b] |= kWritten;
      // A block's plain write stays noted: it races with more accesses than its later atomic.
      if (atomic(access) && writer[b] == me) continue;
      const bool others = before >= stamp_ && (before != me || writer[b] & kSeveral);
      writer[b] = me | (atomic(access) ? kAtomic | (others ? kSeveral : 0) : 0);
      region.moment[at + b] = moment;
    }
    traffic.distinct_bytes_written += fresh;
  }
}

// Warp, lane and clock of an access, packed into a word.
constexpr int kClockBits = 22, kLaneBits = 5;
constexpr uint32_t kLastClock = (1u << kClockBits) - 1;
static uint32_t moment_of(const Warp& warp, int lane) {
  const uint32_t clock = std::min(warp.block->clock_of(warp.clock), kLastClock);
  return uint32_t(warp.id) << (kClockBits + kLaneBits) | uint32_t(lane) << kClockBits | clock;
}

template <uint32_t kSize>
void GlobalMemory::check_bytes(const Warp& warp, int lane, Region& region, uint64_t at, Access access,
                               const void* value) {
  const uint32_t me = stamp_ + 1 + warp.block->linear;
  if (!is_plain<kSize>(me, region, at, access)) [[unlikely]] {
    check_flags(lane, region, at, kSize, access);
    const uint8_t* before = reinterpret_cast<const uint8_t*>(region.begin + at);
    for (uint32_t b = 0; b < kSize; b++)
      check_order(warp, lane, region, at + b, access, value && static_cast<const uint8_t*>(value)[b] == before[b]);
  }
  note<kSize>(me, moment_of(warp, lane), region, at, access);
}

void GlobalMemory::check(const Warp& warp, int lane, uint64_t pointer, uint32_t size, Access access,
                         const void* value) {
  Region* region = region_of(pointer);
  const uint64_t address = untagged(pointer);
  if (!region || address < region->begin || address + size > region->end)
    fault(lane, "global ", writes(access) ? "write" : "read", " of ", size, " bytes out of bounds at ", in_hex(address),
          ": ", outside(region, address));
  if (address % size)
    fault(lane, "misaligned global access of ", size, " bytes at ", describe(*region, address), ", address ",
          in_hex(address));
  if (writes(access) && warp.block->watched_sources) warp.block->check_sources(lane, address, size);
  const uint64_t at = address - region->begin;
  switch (size) {
    case 1: return check_bytes<1>(warp, lane, *region, at, access, value);
    case 2: return check_bytes<2>(warp, lane, *region, at, access, value);
    case 4: return check_bytes<4>(warp, lane, *region, at, access, value);
    case 8: return check_bytes<8>(warp, lane, *region, at, access, value);
    default: return check_bytes<16>(warp, lane, *region, at, access, value);
  }
}

void GlobalMemory::check_flags(int lane, const Region& region, uint64_t at, uint32_t size, Access access) const {
  const std::string where = describe(region, region.begin + at);
  for (uint32_t b = 0; b < size; b++) {
    const uint8_t flags = region.flags[at + b];
    if (!(flags & kReadable))
      fault(lane, "global ", writes(access) ? "write" : "read", " between the elements of ", where);
    if (writes(access) && !(flags & kWritable)) fault(lane, "write to an input: ", where);
    if (reads(access) && !(flags & kWritten)) fault(lane, "read of uninitialised global memory: ", where);
  }
}

// Checks that earlier accesses of this launch to one byte are ordered before this one.
void GlobalMemory::check_order(const Warp& warp, int lane, const Region& region, uint64_t at, Access access,
                               bool same_value) const {
  const uint32_t me = stamp_ + 1 + warp.block->linear, wrote = region.writer[at] & kStamp, read = region.reader[at];
  const bool both_atomic = atomic(access) && (region.writer[at] & kAtomic);
  const std::string where = ": " + describe(region, region.begin + at);
  const std::string race = "race on global memory: ";
  if (wrote >= stamp_ && !both_atomic) {
    const uint32_t block = wrote - stamp_ - 1, clock = region.moment[at] & kLastClock;
    const int other = region.moment[at] >> (kClockBits + kLaneBits);
    const int other_lane = region.moment[at] >> kClockBits & (kLanes - 1);
    const std::string verb = writes(access) ? "writes" : "reads";
    // Which other blocks wrote is not kept. To have acquired anything is enough.
    if (region.writer[at] & kSeveral && warp.order.acquired.empty())
      fault(lane, race, "this block ", verb, " what several blocks of the same launch wrote", where);
    if (wrote != me && !warp.order.acquired.covers(block, other, clock)) {
      if (!writes(access)) fault(lane, race, "this block reads what block ", block, " of the same launch wrote", where);
      fault(lane, race, "another block of the same launch wrote the same address", where);
    }
    const bool own = other == warp.id && other_lane == lane;
    if (wrote == me && !own && !same_value && clock > warp.block->clock_of(warp.seen[other])) {
      if (other == warp.id)
        fault(lane, race, "this lane ", verb, " what lane ", other_lane,
              " of its warp wrote, without __syncwarp between", where);
      fault(lane, race, "warp ", warp.id, " ", verb, " what warp ", other, " wrote, without a barrier between", where);
    }
  }
  // The time of reads by other blocks is not kept. To have acquired anything from the reader's block is enough.
  if (!writes(access) || read < stamp_ || read == me) return;
  const bool knows =
      read == stamp_ ? !warp.order.acquired.empty() : warp.order.acquired.of(read - stamp_ - 1) != nullptr;
  if (!knows)
    fault(lane, race, "this block writes what ",
          read == stamp_ ? "other blocks" : "block " + std::to_string(read - stamp_ - 1), " of the same launch read",
          where);
}

void GlobalMemory::count(const uint64_t* addresses, uint32_t mask, uint32_t size, Access access) {
  uint64_t seen[64], sectors[64];  // two small hash tables
  uint64_t used = 0, used_sectors = 0;
  const auto add = [](uint64_t* table, uint64_t& used, uint64_t key) {
    uint32_t slot = (key * 0x9e3779b97f4a7c15ull) >> 58;
    while ((used >> slot & 1) && table[slot] != key) slot = (slot + 1) & 63;
    table[slot] = key;
    used |= uint64_t(1) << slot;
  };
  uint32_t lanes = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const uint64_t address = addresses[std::countr_zero(rest)];
    add(seen, used, address);
    add(sectors, used_sectors, address / 32);
    lanes++;
  }
  traffic.accesses++;
  traffic.sectors += std::popcount(used_sectors);
  traffic.ideal_sectors += (std::popcount(used) * size + 31) / 32;
  if (reads(access)) traffic.bytes_read += lanes * size;
  if (writes(access)) traffic.bytes_written += lanes * size;
}

}  // namespace interpreter
