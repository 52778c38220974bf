// Asynchronous copies from global to shared memory.
#include "elementwise.h"
#include "places.h"

namespace interpreter {
namespace {

// Copies i.size bytes to src[0] from src[1]. count 1: only the first src[2] bytes are copied, and the rest is set to
// zero. count 2: all is set to zero where the predicate src[2] holds (or does not hold, if negated).
Flow async_copy(Warp& w, const Instruction& i, Mask lanes) {
  Block& block = *w.block;
  uint64_t to[kLanes], from[kLanes];
  w.addresses(i, lanes, to);
  w.need(i.src[1], lanes, "an address");
  for (int l = 0; l < kLanes; l++) from[l] = w.cells<uint64_t>(i.src[1])[l] + i.target;
  if (i.count) w.need(i.src[2], lanes, "how many bytes to copy");
  const uint32_t size = i.size;
  count_banks(block.launch.banks(i), to, lanes, size);
  Mask reads = 0;
  uint32_t valid[kLanes];
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    valid[l] = size;
    if (i.count == 1) valid[l] = w.cells<uint32_t>(i.src[2])[l];
    if (i.count == 2) valid[l] = (w.predicate(i.src[2]) >> l & 1) != uint32_t(i.negated) ? 0 : size;
    if (valid[l] > size) fault(l, "cp.async of ", valid[l], " bytes, more than the ", size, " that it writes");
    if (valid[l]) reads |= Mask(1) << l;
  }
  if (reads) block.launch.memory.count(from, reads, size, Access::read);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    if (from[l] % size && valid[l]) fault(l, "misaligned source of a cp.async of ", size, " bytes");
    GlobalMemory& memory = block.launch.memory;
    if (valid[l] == size) {
      memory.check(w, l, from[l], size, Access::read);
    } else {
      for (uint32_t b = 0; b < valid[l]; b++) memory.check(w, l, from[l] + b, 1, Access::read);
    }
    const uint64_t source = GlobalMemory::untagged(from[l]);
    const bool watched = valid[l] && memory.is_writable(from[l]);
    AsyncCopy copy{watched ? source : 0, uint32_t(to[l]), w.async_groups[l], uint8_t(size), uint8_t(l), {}};
    block.watched_sources += watched;
    std::memcpy(copy.bytes, reinterpret_cast<const void*>(source), valid[l]);
    block.shared.begin_async(w, l, to[l], size);
    w.async_copies.push_back(copy);
  }
  return Flow::next;
}

// Completes the copies of these lanes that are done.
template <class Done> void land(Warp& w, Mask lanes, bool by_mbarrier, Done&& done) {
  SharedMemory& shared = w.block->shared;
  std::erase_if(w.async_copies, [&](const AsyncCopy& copy) {
    if (!(lanes >> copy.lane & 1) || !done(copy)) return false;
    std::memcpy(shared.data() + copy.to, copy.bytes, copy.size);
    shared.end_async(w, copy.lane, copy.to, copy.size, by_mbarrier);
    w.block->watched_sources -= copy.from != 0;
    return true;
  });
}

Flow async_commit(Warp& w, const Instruction&, Mask lanes) {
  for (int l = 0; l < kLanes; l++) w.async_groups[l] += lanes >> l & 1;
  return Flow::next;
}

// Each lane waits for all of its groups but the latest i.option.
Flow async_wait(Warp& w, const Instruction& i, Mask lanes) {
  land(w, lanes, false, [&](const AsyncCopy& copy) { return copy.group + i.option < w.async_groups[copy.lane]; });
  return Flow::next;
}

Flow async_wait_all(Warp& w, const Instruction&, Mask lanes) {
  land(w, lanes, false, [](const AsyncCopy&) { return true; });
  return Flow::next;
}

void cp(Decoding& d) {
  if (!d.take("async")) d.fail("cp");
  if (d.take("commit_group")) {
    d.out.execute = async_commit;
    d.out.kind = kind_of("cp.async.commit_group");
  } else if (d.take("mbarrier")) {
    if (!d.take("arrive") || d.take_one_of({"shared", "shared::cta"}) < 0) d.fail("cp.async.mbarrier");
    d.out.negated = d.take("noinc");
    d.take_type();
    d.out.space = Space::shared;
    d.read_address(0);
    d.out.execute = arrive_after_copies;
    d.out.kind = kind_of("cp.async.mbarrier.arrive");
  } else if (d.take("wait_group")) {
    d.out.option = d.immediate(d.operand(0));
    d.out.execute = async_wait;
    d.out.kind = kind_of("cp.async.wait_group");
  } else if (d.take("wait_all")) {
    d.out.execute = async_wait_all;
    d.out.kind = kind_of("cp.async.wait_group");
  } else {
    if (d.take_one_of({"ca", "cg"}) < 0) d.fail("cp.async");
    if (d.take_one_of({"shared", "shared::cta"}) < 0 || !d.take("global")) d.fail("spaces");
    if (d.take_prefixed("L2::") == "L2::cache_hint") d.fail("L2::cache_hint");
    d.out.space = Space::shared;
    // read_address sets out.offset, so the source is read first and its offset kept in out.target.
    Instruction& out = d.out;
    d.read_address(1);
    if (!out.wide) d.fail("a source of 32 bits");
    out.target = out.offset;
    if (out.offset < 0 || out.offset > int64_t(~0u)) d.fail("offset");
    out.offset = 0;
    d.read_address(0);
    std::swap(out.src[0], out.src[1]);
    out.size = d.immediate(d.operand(2));
    if (out.size != 4 && out.size != 8 && out.size != 16) d.fail("size");
    out.count = 0;
    if (d.operands() > 3) {
      const std::string text = d.operand(3)[0] == '!' ? trim(d.operand(3).substr(1)) : d.operand(3);
      const bool ignore = d.is_register(text) && d.register_of(text).kind == RegisterClass::predicate;
      out.count = ignore ? 2 : 1;
      if (ignore)
        d.read_predicate(3, out.negated);
      else
        d.read(3, Type::b32);
    }
    out.execute = async_copy;
    out.kind = kind_of("cp.async");
  }
}

}  // namespace

void land_copies(Warp& w, Mask lanes) {
  land(w, lanes, true, [](const AsyncCopy&) { return true; });
}

void add_async(Table& t) { t["cp"] = cp; }

}  // namespace interpreter
