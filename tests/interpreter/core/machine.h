// Blocks of warps, and how a kernel runs on them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "fault.h"
#include "memory.h"
#include "ordering.h"
#include "program.h"
#include "shared.h"

namespace interpreter {

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t(x) * y * z; }
};

// Lanes of a warp that are at the same instruction.
struct Path {
  enum Waiting : uint8_t { no, for_lanes, for_barrier };
  uint32_t pc;
  Mask lanes;
  Waiting waiting = no;
};

struct alignas(128) Slot {
  uint32_t lane[kLanes];
};

// A cp.async under way. Groups are counted per lane.
struct AsyncCopy {
  uint64_t from;  // 0 if nobody can write there
  uint32_t to, group;
  uint8_t size, lane;
  uint8_t bytes[16];
};

// A read of what other threads may write, and how often in a row it found the same.
struct Poll {
  uint64_t hash = 0, times = 0;
  const void* at = nullptr;
  uint32_t bytes = 0;
};

// Uninitialised memory that lanes of a register come from.
struct Origin {
  Mask lanes;
  Space space;
  uint32_t pc;                 // of the instruction that read it
  uint64_t address;            // of the first lane
  uint8_t known[kLanes] = {};  // a bit for each byte of the register that is initialised all the same
};

class Block;

struct Warp {
  Block* block = nullptr;
  int id = 0;
  Mask live = 0;  // lanes that have not exited
  std::vector<Path> paths;
  size_t current = 0;  // of paths

  std::vector<Slot> registers;
  std::vector<Mask> defined;                     // of each register, the lanes in which it has a value
  std::unordered_map<uint32_t, Origin> origins;  // of registers
  std::vector<uint8_t> local, local_known;       // known: 0xff for each initialised byte

  // Races: this warp's clock, and what it has seen of each warp's. Of its own it has seen what its lanes did before
  // they last synchronised.
  uint32_t clock = 1;
  std::array<uint32_t, 32> seen{};
  Order order;

  std::vector<AsyncCopy> async_copies;          // not waited for, in order
  std::array<uint32_t, kLanes> async_groups{};  // committed so far by each lane
  uint64_t turns = 0, budget = 0;               // budget: of instructions, in this turn
  std::unordered_map<uint32_t, Poll> polls;     // by instruction

  Path& path() { return paths[current]; }
  template <class T> Cell<T>* cells(uint32_t slot) { return reinterpret_cast<Cell<T>*>(registers[slot].lane); }
  Mask& predicate(uint32_t slot) { return registers[slot].lane[0]; }
  template <class T> T value(uint32_t slot, int lane) { return from_cell<T>(cells<T>(slot)[lane]); }

  // The lanes in which every source is defined.
  Mask known(const Instruction& i) const {
    Mask all = kAllLanes;
    for (int s = 0; s < i.srcs; s++) all &= defined[i.src[s]];
    return all;
  }
  void define(uint32_t slot, Mask lanes, Mask known) {
    defined[slot] = (defined[slot] & ~lanes) | (known & lanes);
    if (lanes & ~known) [[unlikely]]
      inherit_origin(slot, lanes & ~known);
  }
  // Lanes of a register come from uninitialised memory, which this instruction reads.
  Origin& note_origin(uint32_t slot, Mask lanes, Space space, uint64_t address);
  // They come from a source of this instruction that has no value.
  void inherit_origin(uint32_t slot, Mask lanes);
  // Which bytes of a lane of a register have a value.
  void known_bytes(uint32_t slot, int lane, uint32_t bytes, uint8_t* known) const;
  // A value is used: it must be there.
  void need(uint32_t slot, Mask lanes, const char* what);
  void set_predicate(uint32_t slot, Mask value, Mask lanes, Mask known) {
    predicate(slot) = (predicate(slot) & ~lanes) | (value & lanes);
    define(slot, lanes, known);
  }
  // The address of each lane that executes i, in the order of its sources.
  void addresses(const Instruction& i, Mask lanes, uint64_t* to, size_t source = 0);
  // Everything that lanes did before is seen by all lanes of the warp after.
  void synchronise() { seen[id] = clock++; }
  void fence(MemoryScope scope);
  // This instruction has read, at an address, what others may write; that ends the warp's turn.
  void poll(const void* at, uint32_t bytes, uint64_t hash);
  // Whether it reads the same again and again.
  bool is_polling() const;
};

struct Options {
  uint64_t seed = 0;  // 0: warps and blocks in order, each as far as it goes
  uint64_t max_instructions = uint64_t(4) << 30;
};

struct Counts {
  std::vector<uint64_t> by_kind;
  uint64_t instructions = 0, mmas = 0;
  std::map<std::string, BankConflicts> shared;
  Traffic global;
};

struct LaunchConfig {
  Dim grid, block;
  uint32_t dynamic_shared = 0;
  std::vector<uint8_t> params;
  bool cooperative = false;  // all blocks run at the same time
};

class Launch;

class Block {
 public:
  explicit Block(Launch& launch);
  void start(uint64_t index);
  // Runs a little. False when the block has ended.
  bool run();

  Launch& launch;
  const Kernel& kernel;
  Dim index;
  uint32_t linear = 0;
  SharedMemory shared;
  std::vector<Warp> warps;
  uint32_t first_clock = 0;      // of the warps
  uint32_t watched_sources = 0;  // asynchronous copies under way from where a thread may write
  uint64_t polls = 0;

  // A warp's clock since the block began.
  uint32_t clock_of(uint32_t clock) const { return clock - first_clock; }
  // A write must not meet the source of an asynchronous copy.
  void check_sources(int lane, uint64_t address, uint32_t bytes) const;
  // Whether no warp can go on before another block has written something.
  bool is_waiting() const;
  // Where each warp is, and what it reads there again and again.
  std::string whereabouts();
  std::string place(const void* at);
  void arrive(Warp& warp, uint32_t barrier, uint32_t threads, bool waits);
  // Some lanes of a warp have ended.
  void exited(Warp& warp);
  // Of bar.red: what all of the block's threads agree on.
  struct Barrier {
    uint32_t threads = 0, wanted = 0;
    uint32_t arrived = 0, waiting = 0;  // warps
    std::array<uint32_t, 32> seen{};
    Order order;
    uint32_t count = 0, all = 1, any = 0;  // of bar.red
    uint32_t result_count = 0, result_all = 1, result_any = 0;
  };
  Barrier barriers[16];

 private:
  bool step(Warp& warp);
  bool choose(Warp& warp);
  void complete(Barrier& barrier);
  void specials(Warp& warp);
  [[noreturn]] void stuck();
  Mask group(Warp& warp, const Instruction& i, Mask lanes) const;
  bool gathered(Warp& warp, const Instruction& i, Mask lanes) const;
  Flow execute(Warp& warp, const Instruction& i, Mask lanes) const;
};

// One kernel<<<...>>>.
class Launch {
 public:
  Launch(const Kernel& kernel, const LaunchConfig& config, GlobalMemory& memory, const Options& options);
  void run();

  const Kernel& kernel;
  LaunchConfig config;
  GlobalMemory& memory;
  Options options;
  std::vector<Constant> constants;
  Counts counts;
  std::mt19937_64 random;
  // Where a fault happened.
  const Warp* warp = nullptr;
  uint32_t pc = 0;
  uint32_t shared_bytes = 0, dynamic_at = 0, warps = 0;

  BankConflicts& banks(const Instruction& i);
  // A write at an address releases what the warp has fenced; who reads it acquires that.
  void release(Warp& w, const void* at, bool replaces);
  void acquire(Warp& w, const void* at);
  // What the library of cooperative groups counts arrivals of blocks in; 0 if they need not run at the same time.
  uint64_t grid_workspace() const;
  std::string report(const Fault& fault) const;
  // The line of CUDA that an instruction comes from.
  std::string source(uint32_t pc) const;

 private:
  void tag_pointers();
  void start_block();
  [[noreturn]] void no_end(const std::string& why);

  std::vector<BankConflicts> banks_;  // by kind
  uint32_t workspace_[4] = {};
  std::unordered_map<uint64_t, Released> released_;
  std::vector<uint32_t> waiting_;  // blocks that have not started, the next one last
  std::vector<std::unique_ptr<Block>> resident_, idle_;
};

// The generic address of what is at 0 in a space.
uint64_t window(const Warp& w, Space space, int lane);

std::string demangled(const std::string& name);

}  // namespace interpreter
