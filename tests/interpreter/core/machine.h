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

// Lanes of a warp at the same instruction.
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
  uint64_t from;  // the source, or 0 if no kernel may write there
  uint32_t to, group;
  uint8_t size, lane;
  uint8_t bytes[16];
};

// Repeated reads of memory that other threads may write, as in a spin loop.
struct Poll {
  uint64_t hash = 0, times = 0;
  const void* at = nullptr;
  uint32_t bytes = 0;
};

// The uninitialised memory that a register was loaded from.
struct Origin {
  Mask lanes;
  Space space;
  uint32_t pc;                 // the instruction that read it
  uint64_t address;            // read by the first of the lanes
  uint8_t known[kLanes] = {};  // a bit for each byte of the register that is initialised
};

class Block;

struct Warp {
  Block* block = nullptr;
  int id = 0;
  Mask live = 0;  // lanes that have not exited
  std::vector<Path> paths;
  size_t current = 0;  // of paths

  std::vector<Slot> registers;
  std::vector<Mask> defined;                     // for each register, the lanes that have a value
  std::unordered_map<uint32_t, Origin> origins;  // by register
  std::vector<uint8_t> local, local_known;       // local_known: 0xff for each initialised byte

  // For races: this warp's clock, and the latest clock of each warp that it has synchronised with. seen[id] is the
  // clock of its own lanes' last synchronisation.
  uint32_t clock = 1;
  std::array<uint32_t, 32> seen{};
  Order order;

  std::vector<AsyncCopy> async_copies;          // under way, in order
  std::array<uint32_t, kLanes> async_groups{};  // the number each lane has committed
  uint64_t turns = 0, budget = 0;               // budget: instructions left in this turn
  std::unordered_map<uint32_t, Poll> polls;     // by the pc of the read

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
  // The current instruction loads these lanes of a register from uninitialised memory.
  Origin& note_origin(uint32_t slot, Mask lanes, Space space, uint64_t address);
  // The current instruction computes these lanes of a register from an uninitialised source.
  void inherit_origin(uint32_t slot, Mask lanes);
  // Sets known to 0xff for each initialised byte of one lane of a register, to 0 for the others.
  void known_bytes(uint32_t slot, int lane, uint32_t bytes, uint8_t* known) const;
  // A fault unless the register has a value in these lanes.
  void need(uint32_t slot, Mask lanes, const char* what);
  void set_predicate(uint32_t slot, Mask value, Mask lanes, Mask known) {
    predicate(slot) = (predicate(slot) & ~lanes) | (value & lanes);
    define(slot, lanes, known);
  }
  // The address that each lane gives, from one of i's sources.
  void addresses(const Instruction& i, Mask lanes, uint64_t* to, size_t source = 0);
  // Orders all earlier accesses of the warp's lanes before all later ones.
  void synchronise() { seen[id] = clock++; }
  void fence(MemoryScope scope);
  // The current instruction has read memory that other threads may write. Ends the warp's turn.
  void poll(const void* at, uint32_t bytes, uint64_t hash);
  // Whether the warp spins: such a read has had the same result many times in a row.
  bool is_polling() const;
};

struct Options {
  uint64_t seed = 0;  // 0: warps and blocks run in order, each until it must wait
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
  bool cooperative = false;  // all blocks are resident at the same time
};

class Launch;

class Block {
 public:
  explicit Block(Launch& launch);
  void start(uint64_t index);
  // Gives each warp a turn. False if the block has ended.
  bool run();

  Launch& launch;
  const Kernel& kernel;
  Dim index;
  uint32_t linear = 0;
  SharedMemory shared;
  std::vector<Warp> warps;
  uint32_t first_clock = 0;      // the warps' clock when the block started
  uint32_t watched_sources = 0;  // asynchronous copies under way whose source a kernel may write
  uint64_t polls = 0;

  // A warp's clock since the block began.
  uint32_t clock_of(uint32_t clock) const { return clock - first_clock; }
  // A fault if a write hits the source of an asynchronous copy that is under way.
  void check_sources(int lane, uint64_t address, uint32_t bytes) const;
  // Whether every warp spins or waits at a barrier.
  bool is_waiting() const;
  // For a report: the line that each warp is at, and what it spins on.
  std::string whereabouts();
  std::string place(const void* at);
  void arrive(Warp& warp, uint32_t barrier, uint32_t threads, bool waits);
  // To be called when lanes of a warp have exited.
  void exited(Warp& warp);
  struct Barrier {
    uint32_t threads = 0, wanted = 0;
    uint32_t arrived = 0, waiting = 0;  // warps
    std::array<uint32_t, 32> seen{};
    Order order;
    uint32_t count = 0, all = 1, any = 0;  // for bar.red
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
  // Where execution is, for reports.
  const Warp* warp = nullptr;
  uint32_t pc = 0;
  uint32_t shared_bytes = 0, dynamic_at = 0, warps = 0;

  BankConflicts& banks(const Instruction& i);
  // A strong write publishes what the warp has fenced; a strong read of the same address learns that.
  // replaces: a plain store rather than an atomic operation, which continues what others released there.
  void release(Warp& w, const void* at, bool replaces);
  void acquire(Warp& w, const void* at);
  // The counters of cooperative_groups' grid barrier; 0 unless the launch is cooperative.
  uint64_t grid_workspace() const;
  std::string report(const Fault& fault) const;
  // "file:line" of the CUDA source.
  std::string source(uint32_t pc) const;

 private:
  void tag_pointers();
  void start_block();
  [[noreturn]] void no_end(const std::string& why);

  std::vector<BankConflicts> banks_;  // by kind
  uint32_t workspace_[4] = {};
  std::unordered_map<uint64_t, Released> released_;
  std::vector<uint32_t> waiting_;  // blocks not yet started, the next one last
  std::vector<std::unique_ptr<Block>> resident_, idle_;
};

// The generic address of a space's offset 0.
uint64_t window(const Warp& w, Space space, int lane);

std::string demangled(const std::string& name);

}  // namespace interpreter
