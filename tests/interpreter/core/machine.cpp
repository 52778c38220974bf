#include "machine.h"

#include <cxxabi.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace interpreter {

uint64_t window(const Warp& w, Space space, int lane) {
  switch (space) {
    case Space::shared: return reinterpret_cast<uint64_t>(w.block->shared.data());
    case Space::param: return reinterpret_cast<uint64_t>(w.block->launch.config.params.data());
    case Space::local: return reinterpret_cast<uint64_t>(w.local.data()) + lane * uint64_t(w.block->kernel.local_bytes);
    default: return 0;
  }
}

void Warp::addresses(const Instruction& i, Mask lanes, uint64_t* to, size_t source) {
  const uint32_t slot = i.src[source];
  need(slot, lanes, "an address");
  if (i.wide) {
    const uint64_t* from = cells<uint64_t>(slot);
    for (int l = 0; l < kLanes; l++) to[l] = from[l] + i.offset;
  } else {
    const uint32_t* from = cells<uint32_t>(slot);
    for (int l = 0; l < kLanes; l++) to[l] = uint32_t(from[l] + i.offset);
  }
}

Block::Block(Launch& launch) : launch(launch), kernel(launch.kernel) {
  shared.begin_launch(launch.shared_bytes, launch.warps, kernel.cell);
  warps.resize(launch.warps);
}

void Block::start(uint64_t number) {
  const Dim& grid = launch.config.grid;
  linear = number;
  index.x = number % grid.x;
  index.y = number / grid.x % grid.y;
  index.z = number / grid.x / grid.y;
  shared.begin_block();
  for (const Warp& warp : warps) first_clock = std::max(first_clock, warp.clock);  // of the block that ran here before
  watched_sources = polls = 0;
  for (Barrier& barrier : barriers) barrier = {};
  const uint64_t threads = launch.config.block.count();
  for (size_t w = 0; w < warps.size(); w++) {
    Warp& warp = warps[w];
    const uint64_t lanes = std::min<uint64_t>(kLanes, threads - w * kLanes);
    warp.block = this;
    warp.id = w;
    warp.live = lanes == kLanes ? kAllLanes : (Mask(1) << lanes) - 1;
    warp.paths.assign(1, {0, warp.live});
    warp.current = 0;
    warp.registers.resize(kernel.slots + 2);
    warp.defined.assign(kernel.slots + 2, 0);
    warp.origins.clear();
    warp.local.assign(size_t(kernel.local_bytes) * kLanes, 0xff);
    warp.local_known.assign(warp.local.size(), 0);
    warp.clock = first_clock + 1;
    warp.seen.fill(first_clock);
    warp.order.clear();
    warp.polls.clear();
    warp.async_copies.clear();
    warp.async_groups.fill(0);
    for (const Constant& constant : launch.constants) {
      for (int l = 0; l < kLanes; l++) {
        if (constant.wide)
          warp.cells<uint64_t>(constant.slot)[l] = constant.value;
        else
          warp.cells<uint32_t>(constant.slot)[l] = constant.value;
      }
      warp.defined[constant.slot] = kAllLanes;
    }
    specials(warp);
  }
}

void Block::specials(Warp& warp) {
  const Dim &grid = launch.config.grid, &block = launch.config.block;
  const auto value = [&](const std::string& name, uint32_t lane) -> uint64_t {
    const uint64_t thread = warp.id * kLanes + lane, bit = uint64_t(1) << lane;
    if (name == "%tid.x") return thread % block.x;
    if (name == "%tid.y") return thread / block.x % block.y;
    if (name == "%tid.z") return thread / block.x / block.y;
    if (name == "%ntid.x") return block.x;
    if (name == "%ntid.y") return block.y;
    if (name == "%ntid.z") return block.z;
    if (name == "%ctaid.x") return index.x;
    if (name == "%ctaid.y") return index.y;
    if (name == "%ctaid.z") return index.z;
    if (name == "%nctaid.x") return grid.x;
    if (name == "%nctaid.y") return grid.y;
    if (name == "%nctaid.z") return grid.z;
    if (name == "%laneid") return lane;
    if (name == "%warpid") return warp.id;
    if (name == "%nwarpid") return warps.size();
    if (name == "%lanemask_eq") return bit;
    if (name == "%lanemask_lt") return bit - 1;
    if (name == "%lanemask_le") return 2 * bit - 1;
    if (name == "%lanemask_gt") return uint32_t(~(2 * bit - 1));
    if (name == "%lanemask_ge") return uint32_t(~(bit - 1));
    if (name == "%dynamic_smem_size") return launch.config.dynamic_shared;
    if (name == "%total_smem_size") return launch.shared_bytes;
    if (name == "%envreg1") return launch.grid_workspace() >> 32;
    if (name == "%envreg2") return launch.grid_workspace();
    if (name == "dynamic_shared" || name == "dynamic_shared64") return launch.dynamic_at;
    return 0;  // clocks, and the number of the multiprocessor
  };
  for (const Special& special : kernel.specials) {
    const bool wide =
        special.name == "dynamic_shared64" || special.name == "%clock64" || special.name == "%globaltimer";
    for (int l = 0; l < kLanes; l++) {
      if (wide)
        warp.cells<uint64_t>(special.slot)[l] = value(special.name, l);
      else
        warp.cells<uint32_t>(special.slot)[l] = value(special.name, l);
    }
    warp.defined[special.slot] = kAllLanes;
  }
}

// Joins paths at the same instruction, and chooses the one furthest behind, so that paths meet again.
bool Block::choose(Warp& warp) {
  std::vector<Path>& paths = warp.paths;
  if (paths.size() == 1) {
    warp.current = 0;
    return paths[0].waiting == Path::no;
  }
  for (size_t a = 0; a < paths.size(); a++) {
    for (size_t b = a + 1; b < paths.size();) {
      if (paths[a].pc != paths[b].pc) {
        b++;
        continue;
      }
      paths[a].lanes |= paths[b].lanes;
      paths[a].waiting = Path::no;
      paths.erase(paths.begin() + b);
    }
  }
  size_t best = paths.size();
  for (size_t p = 0; p < paths.size(); p++)
    if (paths[p].waiting == Path::no && (best == paths.size() || paths[p].pc < paths[best].pc)) best = p;
  // A lane may wait for something that a lane further on does, so at times a random path is chosen.
  if (best < paths.size() && ++warp.turns % 1024 == 0) {
    const size_t behind = best;
    do best = launch.random() % paths.size();
    while (paths[best].waiting != Path::no);
    if (best != behind) warp.polls.clear();
  }
  warp.current = best;
  return best < paths.size();
}

// Lanes execute i together with those that name the same mask: the group of the first lane.
Mask Block::group(Warp& warp, const Instruction& i, Mask lanes) const {
  const uint32_t* masks = warp.cells<uint32_t>(i.members);
  const Mask members = masks[std::countr_zero(lanes)];
  Mask same = 0;
  for (int l = 0; l < kLanes; l++) same |= masks[l] == members ? Mask(1) << l : 0;
  return same & lanes;
}

// Whether all lanes that must execute i together are here.
bool Block::gathered(Warp& warp, const Instruction& i, Mask lanes) const {
  if (i.together == Together::live) return lanes == warp.live;
  warp.need(i.members, lanes, "the mask of lanes");
  for (Mask rest = lanes; rest;) {
    const Mask here = group(warp, i, rest);
    const Mask members = warp.cells<uint32_t>(i.members)[std::countr_zero(rest)];
    if (const Mask outside = here & ~members)
      fault(std::countr_zero(outside), "this lane is not in the mask of lanes that it names");
    if (members & warp.live & ~here) return false;
    rest &= ~here;
  }
  return true;
}

// Groups of lanes with different masks execute i in turn.
Flow Block::execute(Warp& warp, const Instruction& i, Mask lanes) const {
  if (i.together != Together::members) return i.execute(warp, i, lanes);
  while (lanes) {
    const Mask here = group(warp, i, lanes);
    i.execute(warp, i, here);
    lanes &= ~here;
  }
  return Flow::next;
}

bool Block::step(Warp& warp) {
  const Instruction* code = kernel.code.data();
  launch.warp = &warp;
  bool moved = false;
  while (warp.budget > 0) {
    if (warp.paths.empty() || !choose(warp)) return moved;
    const bool alone = warp.paths.size() == 1;
    uint32_t meet = ~0u;  // the nearest pc ahead at which another path waits to be joined
    for (const Path& other : warp.paths)
      if (other.pc > warp.path().pc) meet = std::min(meet, other.pc);
    while (warp.budget > 0) {
      Path& path = warp.path();
      const Instruction& i = code[path.pc];
      launch.pc = path.pc;
      Mask lanes = path.lanes;
      if (i.guarded) {
        warp.need(i.guard, lanes, "the predicate that guards this");
        lanes &= i.guard_negated ? ~warp.predicate(i.guard) : warp.predicate(i.guard);
      }
      if (lanes) {
        if (i.together != Together::no && !gathered(warp, i, lanes)) {
          if (lanes != path.lanes) {  // the lanes whose guard is false go on
            const Path others{path.pc + 1, path.lanes & ~lanes};
            path.lanes = lanes;
            path.waiting = Path::for_lanes;
            warp.paths.push_back(others);
          } else {
            path.waiting = Path::for_lanes;
          }
          break;
        }
        launch.counts.by_kind[i.kind]++;
        launch.counts.instructions++;
        warp.budget--;
        moved = true;
        if (execute(warp, i, lanes) != Flow::next) break;
      }
      const uint32_t pc = ++warp.path().pc;
      if (!alone && pc >= meet) break;
    }
  }
  return moved;
}

void Block::arrive(Warp& warp, uint32_t number, uint32_t threads, bool waits) {
  Barrier& barrier = barriers[number];
  if (barrier.threads && barrier.wanted != threads)
    fault(-1, "warps wait at barrier ", number, " for different numbers of threads: ", barrier.wanted, " and ",
          threads);
  if (threads % kLanes) fault(-1, "a barrier of ", threads, " threads, wanted a multiple of ", kLanes);
  if (barrier.waiting >> warp.id & 1) fault(-1, "a warp arrives twice at barrier ", number);
  barrier.threads += kLanes;
  barrier.wanted = threads;
  for (size_t w = 0; w < warps.size(); w++) barrier.seen[w] = std::max(barrier.seen[w], warp.seen[w]);
  barrier.seen[warp.id] = warp.clock;
  barrier.order.merge(warp.order);
  warp.synchronise();
  if (waits) {
    barrier.waiting |= 1u << warp.id;
    warp.path().waiting = Path::for_barrier;
  }
  complete(barrier);
}

void Block::complete(Barrier& barrier) {
  uint32_t wanted = barrier.wanted;
  if (wanted == 0) {
    for (const Warp& warp : warps) wanted += warp.live ? kLanes : 0;
  }
  if (barrier.threads == 0 || barrier.threads < wanted) return;
  for (Warp& warp : warps) {
    if (!(barrier.waiting >> warp.id & 1)) continue;
    for (size_t w = 0; w < warps.size(); w++)
      if (int(w) != warp.id) warp.seen[w] = std::max(warp.seen[w], barrier.seen[w]);
    warp.order.merge(barrier.order);
    Path& path = warp.path();
    const Instruction& i = kernel.code[path.pc];
    if (i.dsts) {  // bar.red; option: 0 popc, 1 and, 2 or
      if (i.option == 0) {
        for (int l = 0; l < kLanes; l++) warp.cells<uint32_t>(i.dst[0])[l] = barrier.count;
        warp.define(i.dst[0], path.lanes, kAllLanes);
      } else {
        warp.set_predicate(i.dst[0], (i.option == 1 ? barrier.all : barrier.any) ? kAllLanes : 0, path.lanes,
                           kAllLanes);
      }
    }
    path.waiting = Path::no;
    path.pc++;
  }
  barrier = {};
}

// Lanes that wait for exited lanes, and warps that wait at a barrier for exited warps, may go on.
void Block::exited(Warp& warp) {
  for (Path& path : warp.paths)
    if (path.waiting == Path::for_lanes) path.waiting = Path::no;
  if (warp.live == 0)
    for (Barrier& barrier : barriers) complete(barrier);
}

Flow exit_lanes(Warp& warp, const Instruction&, Mask lanes) {
  warp.live &= ~lanes;
  Path& path = warp.path();
  path.lanes &= ~lanes;
  if (path.lanes)
    path.pc++;
  else
    warp.paths.erase(warp.paths.begin() + warp.current);
  warp.block->exited(warp);
  return Flow::jump;
}

void Block::stuck() {
  std::string what;
  for (Warp& warp : warps) {
    for (const Path& path : warp.paths) {
      const Statement& s = kernel.statements[kernel.code[path.pc].statement];
      what += "\n  warp " + std::to_string(warp.id) + (path.waiting == Path::for_lanes ? ", some lanes," : "") +
              " waits at PTX line " + std::to_string(s.line) + ", " + launch.source(path.pc) + ": " + s.text;
      launch.warp = &warp;
      launch.pc = path.pc;
    }
  }
  for (Warp& warp : warps) {
    if (warp.paths.size() < 2) continue;
    launch.warp = &warp;
    launch.pc = warp.paths[0].pc;
    fault(std::countr_zero(warp.paths[0].lanes), "lanes of a warp wait for each other at different places:", what);
  }
  fault(-1, "deadlock: no warp can go on:", what);
}

bool Block::run() {
  Mask live = 0;
  bool moved = false;
  for (const Warp& warp : warps) live |= warp.live ? 1u << warp.id : 0;
  if (!live) return false;
  const auto turn = [&](Warp& warp) {
    warp.budget = launch.options.seed ? 1 + launch.random() % 64 : 1 << 16;
    return warp.live && step(warp);
  };
  // With a seed, random warps get as many turns as there are warps.
  for (size_t n = 0; n < warps.size(); n++)
    moved |= turn(warps[launch.options.seed ? launch.random() % warps.size() : n]);
  if (launch.options.seed && !moved)
    for (Warp& warp : warps) moved |= turn(warp);
  if (!moved) {
    // Lanes may meet at different bar.warp.sync instructions.
    for (Warp& warp : warps) {
      Mask there = 0, members = 0;
      for (const Path& path : warp.paths) {
        const Instruction& i = kernel.code[path.pc];
        if (path.waiting != Path::for_lanes || !i.atomic) continue;
        there |= path.lanes;
        members |= warp.cells<uint32_t>(i.members)[std::countr_zero(path.lanes)];
      }
      if (!there || (members & warp.live & ~there)) continue;
      for (Path& path : warp.paths) {
        if (path.waiting != Path::for_lanes || !kernel.code[path.pc].atomic) continue;
        path.waiting = Path::no;
        path.pc++;
        moved = true;
      }
      warp.synchronise();
    }
  }
  for (const Warp& warp : warps) moved |= warp.live == 0 && (live >> warp.id & 1);
  if (!moved) stuck();
  return true;
}

}  // namespace interpreter
