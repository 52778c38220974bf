// Control flow, barriers, and instructions that the lanes of a warp execute together.
#include "elementwise.h"

namespace interpreter {

Flow exit_lanes(Warp& w, const Instruction& i, Mask lanes);

static Flow illegal(Warp&, const Instruction&, Mask lanes) { fault(std::countr_zero(lanes), "illegal instruction"); }
void make_illegal(Instruction& out) { out.execute = illegal; }

Flow branch(Warp& w, const Instruction& i, Mask lanes) {
  Path& path = w.path();
  if (lanes == path.lanes) {
    path.pc = i.target;
  } else {
    path.lanes &= ~lanes;
    path.pc++;
    w.paths.push_back({i.target, lanes});
  }
  return Flow::jump;
}

// Each lane branches to its own target.
Flow branch_to_each(Warp& w, Mask lanes, const uint32_t* targets) {
  const Path path = w.path();
  std::vector<Path> ways;
  for (Mask left = lanes; left;) {
    const uint32_t target = targets[std::countr_zero(left)];
    Mask there = 0;
    for (Mask rest = left; rest; rest &= rest - 1)
      if (targets[std::countr_zero(rest)] == target) there |= rest & -rest;
    ways.push_back({target, there});
    left &= ~there;
  }
  if (path.lanes & ~lanes) ways.push_back({path.pc + 1, path.lanes & ~lanes});
  w.paths[w.current] = ways[0];
  w.paths.insert(w.paths.end(), ways.begin() + 1, ways.end());
  return Flow::jump;
}

namespace {

Flow trap(Warp&, const Instruction&, Mask lanes) { fault(std::countr_zero(lanes), "trap"); }

// Lanes that return from an inlined call branch to its end; others exit.
Flow return_lanes(Warp& w, const Instruction& i, Mask lanes) {
  return i.option ? branch(w, i, lanes) : exit_lanes(w, i, lanes);
}

Flow indexed_branch(Warp& w, const Instruction& i, Mask lanes) {
  w.need(i.src[0], lanes, "the index of a branch");
  const std::vector<uint32_t>& table = w.block->kernel.branch_tables[i.option];
  uint32_t targets[kLanes];
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const uint32_t index = w.cells<uint32_t>(i.src[0])[l];
    if (index >= table.size()) fault(l, "a branch beyond its table: ", index, " of ", table.size());
    targets[l] = table[index];
  }
  return branch_to_each(w, lanes, targets);
}

// ---------------------------------------------------------------------------------------------------------- barriers

// src[0]: the barrier's number. src[1]: the number of threads, if i.count. With i.dsts it is bar.red, whose predicate
// is the last source.
Flow barrier(Warp& w, const Instruction& i, Mask lanes) {
  const int first = std::countr_zero(lanes);
  w.need(i.src[0], lanes, "the barrier's number");
  const uint32_t number = w.cells<uint32_t>(i.src[0])[first];
  const uint32_t threads = i.count ? w.cells<uint32_t>(i.src[1])[first] : 0;
  if (number > 15) fault(first, "barrier ", number, ", wanted 0 to 15");
  if (i.dsts) {
    Block::Barrier& b = w.block->barriers[number];
    w.need(i.src[i.srcs - 1], lanes, "the predicate of a barrier");
    const Mask p = i.negated ? ~w.predicate(i.src[i.srcs - 1]) : w.predicate(i.src[i.srcs - 1]);
    b.count += std::popcount(p & lanes);
    b.all &= (p & lanes) == lanes;
    b.any |= (p & lanes) != 0;
  }
  const bool waits = !i.atomic;
  if (!waits) w.path().pc++;
  w.block->arrive(w, number, threads, waits);
  return Flow::jump;
}

Flow sync_lanes(Warp& w, const Instruction&, Mask) {
  w.synchronise();
  return Flow::next;
}

void barriers(Decoding& d) {
  if (d.take("warp")) {
    if (!d.take("sync")) d.fail("bar.warp");
    d.read(0, Type::b32);
    d.out.together = Together::members;
    d.out.members = d.out.src[0];
    d.out.atomic = true;  // may be executed at different places
    d.out.execute = sync_lanes;
    d.out.kind = kind_of("bar.warp.sync");
    return;
  }
  d.take("cta");
  const int form = d.take_one_of({"sync", "arrive", "red"});
  d.take("aligned");
  size_t operand = 0;
  if (form == 2) {
    d.out.option = d.take_one_of({"popc", "and", "or"});
    d.take_type();
    d.write(operand++, d.out.option == 0 ? Type::b32 : Type::pred);
  } else if (form < 0) {
    d.fail("barrier");
  }
  d.read(operand++, Type::b32);
  d.out.count = d.operands() > operand + (form == 2);
  if (d.out.count) d.read(operand++, Type::b32);
  if (form == 2) d.read_predicate(operand, d.out.negated);
  d.out.atomic = form == 1;
  d.out.together = Together::live;
  d.out.execute = barrier;
  d.out.kind = kind_of("bar.sync");
}

// ------------------------------------------------------------------------------------------- lanes of a warp together

enum Shuffle { up, down, butterfly, indexed };

Flow shuffle(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t *from = w.cells<uint32_t>(i.src[0]), *bs = w.cells<uint32_t>(i.src[1]),
                 *cs = w.cells<uint32_t>(i.src[2]);
  w.need(i.src[1], lanes, "a lane to read");
  w.need(i.src[2], lanes, "limits of lanes to read");
  uint32_t out[kLanes];
  Mask within = 0, known = 0;
  for (int l = 0; l < kLanes; l++) {
    const int b = bs[l] & 31, clamp = cs[l] & 31, segment = cs[l] >> 8 & 31;
    const int highest = (l & segment) | (clamp & ~segment), lowest = l & segment;
    int source = l;
    bool inside = false;
    switch (i.option) {
      case up:
        source = l - b;
        inside = source >= highest;
        break;
      case down:
        source = l + b;
        inside = source <= highest;
        break;
      case butterfly:
        source = l ^ b;
        inside = source <= highest;
        break;
      default:
        source = lowest | (b & ~segment);
        inside = source <= highest;
        break;
    }
    if (!inside) source = l;
    if ((lanes >> l & 1) && !(lanes >> source & 1)) fault(l, "shfl from lane ", source, ", which does not take part");
    out[l] = from[source & 31];
    within |= Mask(inside) << l;
    known |= (w.defined[i.src[0]] >> (source & 31) & 1) << l;
  }
  blend(w.cells<uint32_t>(i.dst[0]), out, lanes);
  w.define(i.dst[0], lanes, known);
  if (i.dsts > 1) w.set_predicate(i.dst[1], within, lanes, kAllLanes);
  return Flow::next;
}

void together(Decoding& d, size_t operand) {
  d.read(operand, Type::b32);
  d.out.together = Together::members;
  d.out.members = d.out.src[d.out.srcs - 1];
}

// to|p
void write_with_predicate(Decoding& d, Type type) {
  const std::string& to = d.operand(0);
  const size_t bar = to.find('|');
  d.write_text(trim(to.substr(0, bar)), type);
  if (bar != std::string::npos) d.write_text(trim(to.substr(bar + 1)), Type::pred);
}

void shfl(Decoding& d) {
  if (!d.take("sync")) d.fail("shfl");
  d.out.option = d.take_one_of({"up", "down", "bfly", "idx"});
  if (d.out.option > 3 || !means<uint32_t>(d.take_type())) d.fail("shfl");
  write_with_predicate(d, Type::b32);
  for (int operand : {1, 2, 3}) d.read(operand, Type::b32);
  together(d, 4);
  d.out.execute = shuffle;
}

enum Vote { all, any, uniform, ballot };

Flow vote_lanes(Warp& w, const Instruction& i, Mask lanes) {
  w.need(i.src[0], lanes, "a vote");
  const Mask yes = (i.negated ? ~w.predicate(i.src[0]) : w.predicate(i.src[0])) & lanes;
  if (i.option == ballot) {
    uint32_t out[kLanes];
    std::fill_n(out, kLanes, yes);
    blend(w.cells<uint32_t>(i.dst[0]), out, lanes);
    w.define(i.dst[0], lanes, kAllLanes);
  } else {
    const bool result = i.option == all ? yes == lanes : i.option == any ? yes != 0 : yes == lanes || yes == 0;
    w.set_predicate(i.dst[0], result ? kAllLanes : 0, lanes, kAllLanes);
  }
  return Flow::next;
}

void vote(Decoding& d) {
  if (!d.take("sync")) d.fail("vote");
  d.out.option = d.take_one_of({"all", "any", "uni", "ballot"});
  d.take_type();
  d.write(0, d.out.option == ballot ? Type::b32 : Type::pred);
  d.read_predicate(1, d.out.negated);
  together(d, 2);
  d.out.execute = vote_lanes;
}

// option: 1 for match.all.
template <class T> Flow match_lanes(Warp& w, const Instruction& i, Mask lanes) {
  w.need(i.src[0], lanes, "a value to match");
  const Cell<T>* values = w.cells<T>(i.src[0]);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    out[l] = 0;
    for (Mask rest = lanes; rest; rest &= rest - 1)
      if (values[std::countr_zero(rest)] == values[l]) out[l] |= rest & -rest;
  }
  if (i.option) {
    const bool equal = out[std::countr_zero(lanes)] == lanes;
    for (uint32_t& mask : out) mask = equal ? lanes : 0;
    if (i.dsts > 1) w.set_predicate(i.dst[1], equal ? kAllLanes : 0, lanes, kAllLanes);
  }
  blend(w.cells<uint32_t>(i.dst[0]), out, lanes);
  w.define(i.dst[0], lanes, kAllLanes);
  return Flow::next;
}

void match(Decoding& d) {
  d.out.option = d.take_one_of({"any", "all"});
  if (!d.take("sync")) d.fail("match");
  write_with_predicate(d, Type::b32);
  d.by_type(Types<uint32_t, uint64_t>(), d.take_type(), [&]<class T>(T) {
    d.read(1, Decoding::type_of<T>());
    d.out.execute = match_lanes<T>;
  });
  together(d, 2);
}

Flow active_lanes(Warp& w, const Instruction& i, Mask lanes) {
  uint32_t out[kLanes];
  std::fill_n(out, kLanes, lanes);
  store_lanes(w, i, out, lanes);
  return Flow::next;
}

enum Reduction { sum, smallest, largest, conjunction, disjunction, parity };

template <class T> Flow reduce_lanes(Warp& w, const Instruction& i, Mask lanes) {
  w.need(i.src[0], lanes, "a value to reduce");
  const Cell<T>* values = w.cells<T>(i.src[0]);
  T result = from_cell<T>(values[std::countr_zero(lanes)]);
  for (Mask rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
    const T x = from_cell<T>(values[std::countr_zero(rest)]);
    switch (i.option) {
      case sum: result += x; break;
      case smallest: result = std::min(result, x); break;
      case largest: result = std::max(result, x); break;
      case conjunction: result &= x; break;
      case disjunction: result |= x; break;
      default: result ^= x; break;
    }
  }
  uint32_t out[kLanes];
  std::fill_n(out, kLanes, to_cell<T>(result));
  blend(w.cells<uint32_t>(i.dst[0]), out, lanes);
  w.define(i.dst[0], lanes, kAllLanes);
  return Flow::next;
}

void redux(Decoding& d) {
  if (!d.take("sync")) d.fail("redux");
  d.out.option = d.take_one_of({"add", "min", "max", "and", "or", "xor"});
  d.by_type(Types<uint32_t, int32_t>(), d.take_type(), [&]<class T>(T) {
    d.write(0, Type::b32);
    d.read(1, Type::b32);
    d.out.execute = reduce_lanes<T>;
  });
  together(d, 2);
}

// Elects the lowest lane.
Flow elect_lane(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t leader = std::countr_zero(lanes);
  uint32_t out[kLanes];
  std::fill_n(out, kLanes, leader);
  blend(w.cells<uint32_t>(i.dst[0]), out, lanes);
  w.define(i.dst[0], lanes, kAllLanes);
  if (i.dsts > 1) w.set_predicate(i.dst[1], Mask(1) << leader, lanes, kAllLanes);
  return Flow::next;
}

}  // namespace

void add_warp(Table& t) {
  t["bra"] = [](Decoding& d) {
    d.take("uni");
    d.translator().branch_to(d.operand(0));
    d.out.execute = branch;
  };
  t["brx"] = [](Decoding& d) {
    d.take("idx");
    d.take("uni");
    d.read(0, Type::b32);
    d.out.option = d.translator().branch_table(d.operand(1));
    d.out.execute = indexed_branch;
  };
  t["ret"] = [](Decoding& d) {
    d.take("uni");
    d.out.option = d.translator().in_call();
    if (d.out.option) d.translator().branch_to("return");
    d.out.execute = return_lanes;
  };
  t["exit"] = [](Decoding& d) { d.out.execute = exit_lanes; };
  t["trap"] = [](Decoding& d) { d.out.execute = trap; };
  t["brkpt"] = [](Decoding& d) { d.out.execute = trap; };
  t["bar"] = barriers;
  t["barrier"] = barriers;
  t["shfl"] = shfl;
  t["vote"] = vote;
  t["match"] = match;
  t["activemask"] = [](Decoding& d) {
    d.take_type();
    d.write(0, Type::b32);
    d.out.execute = active_lanes;
  };
  t["redux"] = redux;
  t["elect"] = [](Decoding& d) {
    if (!d.take("sync")) d.fail("elect");
    write_with_predicate(d, Type::b32);
    together(d, 1);
    d.out.execute = elect_lane;
  };
}

}  // namespace interpreter
