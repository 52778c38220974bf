// mbarrier: a barrier in shared memory. Threads and asynchronous copies arrive at it.
//
// Its 64 bits hold the number of pending arrivals, the number of arrivals that each phase expects, and the number of
// the current phase. An arrival returns the bits before it; with these a thread can wait for the end of that phase.
#include "elementwise.h"
#include "places.h"

namespace interpreter {
namespace {

constexpr int kCountBits = 20;
constexpr uint64_t kMostCount = (uint64_t(1) << kCountBits) - 1;

struct State {
  uint64_t pending, expected, phase;

  explicit State(uint64_t bits)
      : pending(bits & kMostCount), expected(bits >> kCountBits & kMostCount), phase(bits >> 2 * kCountBits) {}
  uint64_t bits() const { return pending | expected << kCountBits | phase << 2 * kCountBits; }
};

enum Operation { initialise, invalidate, arrive, drop, test };

State load_state(const Places& p, int lane) {
  if (!all_known<8>(p.known[lane])) fault(lane, "an mbarrier that is not initialised");
  uint64_t bits;
  std::memcpy(&bits, p.data[lane], sizeof(bits));
  return State(bits);
}

void store_state(const Places& p, int lane, const State& state) {
  const uint64_t bits = state.bits();
  std::memcpy(p.data[lane], &bits, sizeof(bits));
}

void locate_barriers(Warp& w, const Instruction& i, Mask lanes, Access access, Places& p) {
  locate(w, i, lanes, sizeof(uint64_t), access, p);
  if (p.space != Space::shared) fault(std::countr_zero(lanes), "an mbarrier outside of shared memory");
}

// Returns the state before.
uint64_t arrive_at(Warp& w, const Places& p, int lane, uint64_t count, bool drops, bool may_complete) {
  State state = load_state(p, lane);
  const uint64_t before = state.bits();
  if (count > state.pending)
    fault(lane, "more arrivals at an mbarrier than it expects: ", count, " with ", state.pending, " pending");
  state.pending -= count;
  if (drops) state.expected -= count;
  if (state.pending == 0) {
    if (!may_complete) fault(lane, "an arrival with .noComplete completes the phase of an mbarrier");
    state.pending = state.expected;
    state.phase++;
  }
  store_state(p, lane, state);
  w.block->launch.release(w, p.data[lane], false);
  return before;
}

// src[0]: the address. src[1]: the number of arrivals, 1 if absent. negated: .noComplete
Flow arrivals(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  locate_barriers(w, i, lanes, Access::update, p);
  if (i.srcs > 1) w.need(i.src[1], lanes, "how many arrivals");
  w.fence(MemoryScope::block);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const uint64_t count = i.srcs > 1 ? w.cells<uint32_t>(i.src[1])[l] : 1;
    check(w, p, l, sizeof(uint64_t), Access::update);
    const uint64_t before = arrive_at(w, p, l, count, i.option == drop, !i.negated);
    if (i.dsts) w.cells<uint64_t>(i.dst[0])[l] = before;
  }
  if (i.dsts) w.define(i.dst[0], lanes, kAllLanes);
  return Flow::next;
}

Flow initialisation(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  locate_barriers(w, i, lanes, Access::write, p);
  w.need(i.src[1], lanes, "how many arrivals an mbarrier expects");
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const uint64_t count = w.cells<uint32_t>(i.src[1])[l], bits = count | count << kCountBits;
    if (count == 0 || count > kMostCount)
      fault(l, "an mbarrier that expects ", count, " arrivals, wanted 1 to ", kMostCount);
    check(w, p, l, sizeof(bits), Access::write, &bits);
    store_state(p, l, State(bits));
    std::memset(p.known[l], 0xff, sizeof(bits));
  }
  return Flow::next;
}

Flow invalidation(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  locate_barriers(w, i, lanes, Access::update, p);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    check(w, p, l, sizeof(uint64_t), Access::update);
    load_state(p, l);
    std::memset(p.known[l], 0, sizeof(uint64_t));
  }
  return Flow::next;
}

// Whether a phase is over: the one of the state src[1], or (negated) the latest with the parity src[1].
Flow test_phase(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  locate_barriers(w, i, lanes, Access::observe, p);
  w.need(i.src[1], lanes, "the phase to wait for");
  Mask over = 0;
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    check(w, p, l, sizeof(uint64_t), Access::observe);
    const uint64_t phase = load_state(p, l).phase;
    const bool yes = i.negated ? (phase & 1) != (w.cells<uint32_t>(i.src[1])[l] & 1)
                               : phase != State(w.cells<uint64_t>(i.src[1])[l]).phase;
    over |= Mask(yes) << l;
  }
  if (over) acquire(w, p, over, sizeof(uint64_t));
  if (lanes & ~over) acquire(w, p, lanes & ~over, sizeof(uint64_t));
  w.set_predicate(i.dst[0], over, lanes, kAllLanes);
  return Flow::next;
}

Flow pending_count(Warp& w, const Instruction& i, Mask lanes) {
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = State(w.cells<uint64_t>(i.src[0])[l]).pending;
  store_lanes(w, i, out, lanes);
  return Flow::next;
}

void mbarrier(Decoding& d) {
  if (d.take("pending_count")) {
    d.take_type();
    d.write(0, Type::b32);
    d.read(1, Type::b64);
    d.out.execute = pending_count;
    return;
  }
  const int operation = d.take_one_of({"init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait"});
  if (operation < 0) d.fail("mbarrier");
  d.out.option = std::min<int>(operation, test);
  d.take_one_of({"release", "acquire"});
  d.take("cta");
  d.out.space = d.take_one_of({"shared", "shared::cta"}) >= 0 ? Space::shared : Space::generic;
  d.translator().kernel().cell = std::min<uint32_t>(d.translator().kernel().cell, 8);
  if (d.take_type() != Type::b64) d.fail("type");
  if (operation <= invalidate) {
    d.read_address(0);
    if (operation == initialise) d.read(1, Type::b32);
    d.out.execute = operation == initialise ? initialisation : invalidation;
  } else if (operation <= drop) {
    d.out.negated = d.take("noComplete");
    d.write(0, Type::b64);
    d.read_address(1);
    if (d.operands() > 2) d.read(2, Type::b32);
    d.out.execute = arrivals;
  } else {
    d.out.negated = d.take("parity");
    d.write(0, Type::pred);
    d.read_address(1);
    d.read(2, d.out.negated ? Type::b32 : Type::b64);
    d.out.execute = test_phase;
  }
}

}  // namespace

// cp.async.mbarrier.arrive: an arrival when the lane's copies are complete; here they complete at once. With .noinc
// (negated) it is one of the expected arrivals; without, it first adds itself to them, so that nothing changes.
Flow arrive_after_copies(Warp& w, const Instruction& i, Mask lanes) {
  Places p;
  locate_barriers(w, i, lanes, Access::update, p);
  land_copies(w, lanes);
  w.fence(MemoryScope::block);
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    check(w, p, l, sizeof(uint64_t), Access::update);
    if (i.negated)
      arrive_at(w, p, l, 1, false, true);
    else
      w.block->launch.release(w, p.data[l], false);
  }
  return Flow::next;
}

void add_mbarriers(Table& t) { t["mbarrier"] = mbarrier; }

}  // namespace interpreter
