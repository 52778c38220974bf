#include "memory.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "fault.h"

namespace interpreter {
namespace {

// Calls visit(offset in bytes, elements) for elements that follow each other, in the order of the tensor.
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
  // Views of one memory become one region.
  std::vector<std::unique_ptr<Region>> apart, overlapping;
  for (auto& other : regions_)
    (other->begin < region->end && region->begin < other->end ? overlapping : apart).push_back(std::move(other));
  regions_ = std::move(apart);
  for (const auto& other : overlapping) {
    region->begin = std::min(region->begin, other->begin);
    region->end = std::max(region->end, other->end);
    if (other->name.find(name) == std::string::npos) region->name += "/" + other->name;
  }
  const uint64_t bytes = region->end - region->begin;
  region->flags.assign(bytes, 0);
  region->writer.assign(bytes, 0);
  region->reader.assign(bytes, 0);
  for (const auto& other : overlapping)
    for (size_t b = 0; b < other->flags.size(); b++) region->flags[other->begin - region->begin + b] |= other->flags[b];
  for_elements(sizes, strides, item, [&](int64_t offset, int64_t elements) {
    uint8_t* of_elements = &region->flags[data + offset - region->begin];
    for (int64_t b = 0; b < elements * item; b++) of_elements[b] |= flags;
  });
  regions_.push_back(std::move(region));
  std::sort(regions_.begin(), regions_.end(), [](const auto& a, const auto& b) { return a->begin < b->begin; });
  last_ = nullptr;
}

void GlobalMemory::allocate(const std::string& name, uint64_t data, uint64_t bytes) {
  if (bytes == 0) return;
  auto region = std::make_unique<Region>();
  region->begin = data;
  region->end = data + bytes;
  region->name = name;
  region->flags.assign(bytes, kReadable | kWritable);
  region->writer.assign(bytes, 0);
  region->reader.assign(bytes, 0);
  region->host_may_have_written = true;
  regions_.push_back(std::move(region));
  std::sort(regions_.begin(), regions_.end(), [](const auto& a, const auto& b) { return a->begin < b->begin; });
  last_ = nullptr;
}

void GlobalMemory::release(uint64_t data) {
  std::erase_if(regions_, [&](const auto& region) { return region->begin == data; });
  last_ = nullptr;
}

void GlobalMemory::note_host_writes() {
  for (const auto& region : regions_) {
    if (!region->host_may_have_written) continue;
    region->host_may_have_written = false;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(region->begin);
    // By two bytes, the smallest element there is: that of -inf has one that is the poison.
    for (size_t b = 0; b < region->flags.size(); b++)
      if (bytes[b] != kPoison || ((b ^ 1) < region->flags.size() && bytes[b ^ 1] != kPoison))
        region->flags[b] |= kWritten;
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
  if (uint64_t(next_stamp_) + blocks + 2 >= kAtomic) {
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

// Of kSize bytes: true if all is well, and then it is noted.
template <uint32_t kSize> bool GlobalMemory::check_bytes(uint32_t me, Region& region, uint64_t at, Access access) {
  uint8_t* flags = &region.flags[at];
  uint32_t *writer = &region.writer[at], *reader = &region.reader[at];
  uint8_t all = 0xff;
  uint32_t bad = 0, fresh = 0;
  for (uint32_t b = 0; b < kSize; b++) all &= flags[b];
  const uint8_t needed = (reads(access) ? kReadable | kWritten : 0) | (writes(access) ? kWritable : 0);
  if ((all & needed) != needed) return false;
  const uint32_t harmless = atomic(access) ? kAtomic : 0;
  for (uint32_t b = 0; b < kSize; b++) {
    const uint32_t wrote = writer[b] & ~kAtomic;
    bad += wrote >= stamp_ && wrote != me && !(writer[b] & harmless);
  }
  if (access == Access::read) {
    for (uint32_t b = 0; b < kSize; b++) {
      fresh += reader[b] < stamp_;
      reader[b] = reader[b] < stamp_ || reader[b] == me ? me : stamp_;
    }
    traffic.distinct_bytes_read += fresh;
  } else if (writes(access)) {
    for (uint32_t b = 0; b < kSize; b++) {
      const uint32_t wrote = writer[b] & ~kAtomic;
      bad += reader[b] >= stamp_ && reader[b] != me;
      fresh += wrote < stamp_;
      // Where a block also wrote plainly, that is what others must not meet.
      writer[b] = me | (wrote == me ? writer[b] & harmless : harmless);
      flags[b] |= kWritten;
    }
    traffic.distinct_bytes_written += fresh;
  }
  return bad == 0;
}

void GlobalMemory::check(int lane, uint32_t block, uint64_t address, uint32_t size, Access access) {
  Region* region = find(address);
  const uint32_t me = stamp_ + 1 + block;
  if (!region || address + size > region->end) {
    fault(lane, "global ", writes(access) ? "write" : "read", " of ", size, " bytes out of bounds at ", in_hex(address),
          ": ", region ? "it goes beyond the end of " + region->name : nearest(address));
  }
  if (address % size)
    fault(lane, "misaligned global access of ", size, " bytes at ", describe(*region, address), ", address ",
          in_hex(address));
  const uint64_t at = address - region->begin;
  bool fine = true;
  switch (size) {
    case 1: fine = check_bytes<1>(me, *region, at, access); break;
    case 2: fine = check_bytes<2>(me, *region, at, access); break;
    case 4: fine = check_bytes<4>(me, *region, at, access); break;
    case 8: fine = check_bytes<8>(me, *region, at, access); break;
    default: fine = check_bytes<16>(me, *region, at, access); break;
  }
  if (!fine) explain(lane, me, *region, address, size, access);
}

void GlobalMemory::explain(int lane, uint32_t me, const Region& region, uint64_t address, uint32_t size,
                           Access access) const {
  const std::string where = describe(region, address);
  for (uint32_t b = 0; b < size; b++) {
    const uint64_t at = address - region.begin + b;
    const uint8_t flags = region.flags[at];
    const char* verb = writes(access) ? "write" : "read";
    if (!(flags & kReadable)) fault(lane, "global ", verb, " between the elements of ", where);
    if (writes(access) && !(flags & kWritable)) fault(lane, "write to an input: ", where);
    if (reads(access) && !(flags & kWritten)) fault(lane, "read of uninitialised global memory: ", where);
  }
  for (uint32_t b = 0; b < size; b++) {
    const uint64_t at = address - region.begin + b;
    const uint32_t wrote = region.writer[at] & ~kAtomic, read = region.reader[at];
    if (!writes(access) && wrote >= stamp_ && wrote != me)
      fault(lane, "race on global memory: this block reads what block ", wrote - stamp_ - 1,
            " of the same launch wrote: ", where);
    if (writes(access) && read >= stamp_ && read != me)
      fault(lane, "race on global memory: this block writes what ",
            read == stamp_ ? "other blocks" : "block " + std::to_string(read - stamp_ - 1),
            " of the same launch read: ", where);
  }
  fault(lane, "race on global memory: another block of the same launch wrote the same address: ", where);
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
