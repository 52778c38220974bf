// Warps: uninitialised values, and spin loops.
#include <algorithm>
#include <bit>
#include <cstring>

#include "machine.h"

namespace interpreter {

void Warp::need(uint32_t slot, Mask lanes, const char* what) {
  const Mask missing = lanes & ~defined[slot];
  if (!missing) return;
  const int lane = std::countr_zero(missing);
  const auto found = origins.find(slot);
  if (found == origins.end() || !(found->second.lanes >> lane & 1)) fault(lane, "uninitialised register: ", what);
  const Origin& origin = found->second;
  fault(lane, "use of uninitialised ", kSpaces[int(origin.space)], " memory: ", what, " was read at ",
        kSpaces[int(origin.space)], " + ", origin.address, " bytes, by ", block->launch.source(origin.pc));
}

Origin& Warp::note_origin(uint32_t slot, Mask lanes, Space space, uint64_t address) {
  return origins[slot] = {lanes, space, block->launch.pc, address};
}

void Warp::inherit_origin(uint32_t slot, Mask lanes) {
  const Instruction& i = block->kernel.code[block->launch.pc];
  for (int s = 0; s < i.srcs; s++) {
    const auto found = origins.find(i.src[s]);
    if (found == origins.end() || !(lanes & found->second.lanes & ~defined[i.src[s]])) continue;
    Origin origin = found->second;
    std::fill_n(origin.known, kLanes, 0);
    origins[slot] = origin;
    return;
  }
  origins.erase(slot);
}

void Warp::known_bytes(uint32_t slot, int lane, uint32_t bytes, uint8_t* known) const {
  const bool all = defined[slot] >> lane & 1;
  std::memset(known, all ? 0xff : 0, bytes);
  if (all) return;
  const auto origin = origins.find(slot);
  if (origin == origins.end() || !(origin->second.lanes >> lane & 1)) return;
  for (uint32_t b = 0; b < bytes; b++) known[b] = origin->second.known[lane] >> b & 1 ? 0xff : 0;
}

// A warp that has read the same value this often in a row is taken to wait.
constexpr uint64_t kPatience = 1 << 14;

void Warp::poll(const void* at, uint32_t bytes, uint64_t hash) {
  Poll& poll = polls[block->launch.pc];
  if (poll.times && poll.hash != hash) {  // the wait is over
    polls.clear();
    return;
  }
  poll = {hash, poll.times + 1, at, bytes};
  budget = 0;
  block->polls++;
}

bool Warp::is_polling() const {
  return std::any_of(polls.begin(), polls.end(), [](const auto& entry) { return entry.second.times >= kPatience; });
}

void Block::check_sources(int lane, uint64_t address, uint32_t bytes) const {
  for (const Warp& warp : warps)
    for (const AsyncCopy& copy : warp.async_copies)
      if (copy.from && address < copy.from + copy.size && copy.from < address + bytes)
        fault(lane, "race on global memory: a write to the source of a cp.async of warp ", warp.id,
              " that has not been waited for: ", launch.memory.place(address));
}

bool Block::is_waiting() const {
  return std::all_of(warps.begin(), warps.end(), [](const Warp& warp) {
    const auto stands = [](const Path& path) { return path.waiting != Path::no; };
    return !warp.live || warp.is_polling() || std::all_of(warp.paths.begin(), warp.paths.end(), stands);
  });
}

std::string Block::whereabouts() {
  std::ostringstream text;
  for (Warp& warp : warps) {
    for (const Path& path : warp.paths) {
      text << "\n  block " << linear << ", warp " << warp.id << (warp.paths.size() > 1 ? ", some lanes," : "")
           << " is at " << launch.source(path.pc) << (path.waiting == Path::for_barrier ? ", a barrier" : "");
      launch.warp = &warp;
      launch.pc = path.pc;
    }
    for (const auto& [pc, poll] : warp.polls) {
      if (poll.times < kPatience) continue;
      uint64_t value = 0;
      std::memcpy(&value, poll.at, std::min<size_t>(poll.bytes, sizeof(value)));
      text << "\n    and reads " << place(poll.at) << " at " << launch.source(pc) << " again and again: " << value;
      launch.warp = &warp;
      launch.pc = pc;
    }
  }
  return text.str();
}

std::string Block::place(const void* at) {
  const uint8_t *byte = static_cast<const uint8_t*>(at), *begin = shared.data();
  if (byte >= begin && byte < begin + shared.size()) return "shared + " + std::to_string(byte - begin) + " bytes";
  return launch.memory.place(reinterpret_cast<uint64_t>(at));
}

}  // namespace interpreter
