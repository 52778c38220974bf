// A launch: which blocks run when, and the report of a fault.
#include <cxxabi.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "machine.h"

namespace interpreter {

Launch::Launch(const Kernel& kernel, const LaunchConfig& config, GlobalMemory& memory, const Options& options)
    : kernel(kernel), config(config), memory(memory), options(options), random(options.seed) {
  dynamic_at = (kernel.static_shared + kernel.dynamic_align - 1) / kernel.dynamic_align * kernel.dynamic_align;
  shared_bytes = dynamic_at + config.dynamic_shared;
  warps = (config.block.count() + kLanes - 1) / kLanes;
}

BankConflicts& Launch::banks(const Instruction& i) { return banks_[i.kind]; }

// Tags the pointers among the parameters and constants; any 8 bytes that are an address within a tensor count as one.
void Launch::tag_pointers() {
  for (size_t at = 0; at + sizeof(uint64_t) <= config.params.size(); at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, &config.params[at], sizeof(word));
    word = memory.tagged(word);
    std::memcpy(&config.params[at], &word, sizeof(word));
  }
  constants = kernel.constants;
  for (Constant& constant : constants)
    if (constant.wide) constant.value = memory.tagged(constant.value);
}

uint64_t Launch::grid_workspace() const {
  return config.cooperative ? memory.tagged(reinterpret_cast<uint64_t>(workspace_)) : 0;
}

void Launch::start_block() {
  if (idle_.empty()) idle_.push_back(std::make_unique<Block>(*this));
  resident_.push_back(std::move(idle_.back()));
  idle_.pop_back();
  resident_.back()->start(waiting_.back());
  waiting_.pop_back();
}

void Launch::no_end(const std::string& why) {
  constexpr size_t kMost = 8;
  std::string what;
  for (size_t b = resident_.size(); b-- > 0;)
    if (b < kMost) what = resident_[b]->whereabouts() + what;
  if (resident_.size() > kMost) what += "\n  ... and " + std::to_string(resident_.size() - kMost) + " other blocks";
  fault(-1, "no end: ", why, what);
}

void Launch::run() {
  constexpr size_t kMostResident = 256;
  constexpr uint64_t kPolls = 64;
  const uint64_t blocks = config.grid.count();
  counts.by_kind.assign(kinds().size(), 0);
  banks_.assign(kinds().size(), {});
  if (config.cooperative)
    memory.declare("the grid's workspace", reinterpret_cast<uint64_t>(workspace_), {sizeof(workspace_)}, {1}, 1,
                   kReadable | kWritable | kWritten);
  memory.begin_launch(blocks);
  tag_pointers();
  waiting_.resize(blocks);
  std::iota(waiting_.rbegin(), waiting_.rend(), 0);
  if (options.seed) std::shuffle(waiting_.begin(), waiting_.end(), random);
  const size_t together = config.cooperative ? blocks : options.seed ? 1 + random() % 3 : 1;
  try {
    for (uint64_t turn = 0; !waiting_.empty() || !resident_.empty(); turn++) {
      while (!waiting_.empty() && resident_.size() < together) start_block();
      const size_t b = (options.seed ? random() : turn) % resident_.size();
      Block& block = *resident_[b];
      if (!block.run()) {
        idle_.push_back(std::move(resident_[b]));
        resident_.erase(resident_.begin() + b);
      } else if (block.polls >= kPolls) {
        block.polls = 0;
        const auto waits = [](const auto& other) { return other->is_waiting(); };
        if (!waiting_.empty() && resident_.size() < kMostResident) {
          // It may wait for a block that has not started: start the lowest, as a GPU would.
          std::iter_swap(std::min_element(waiting_.begin(), waiting_.end()), waiting_.end() - 1);
          start_block();
        } else if (std::all_of(resident_.begin(), resident_.end(), waits)) {
          no_end("every thread that has not ended waits for what none writes:");
        }
      }
      if (counts.instructions > options.max_instructions)
        no_end(std::to_string(counts.instructions) + " instructions executed:");
    }
  } catch (const Fault& error) {
    throw Fault(error.lane, report(error));
  }
  memory.release(reinterpret_cast<uint64_t>(workspace_));
  for (size_t kind = 0; kind < banks_.size(); kind++)
    if (banks_[kind].accesses) counts.shared[kinds()[kind]] = banks_[kind];
  counts.global = memory.traffic;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string readable = status == 0 ? text : name;
  std::free(text);
  return readable;
}

static std::string file(const Module& module, uint32_t number) {
  const auto found = module.files.find(number);
  return found == module.files.end() ? "?" : found->second;
}

std::string Launch::source(uint32_t pc) const {
  const Location& at = kernel.statements[kernel.code[pc].statement].location;
  return file(*kernel.module, at.file) + ":" + std::to_string(at.line);
}

std::string Launch::report(const Fault& error) const {
  std::ostringstream text;
  text << error.what() << "\n  kernel  " << demangled(kernel.name);
  if (warp && pc < kernel.code.size()) {
    const Statement& s = kernel.statements[kernel.code[pc].statement];
    text << "\n  source  " << source(pc);
    if (s.location.inlined_line)
      text << ", inlined at " << file(*kernel.module, s.location.inlined_file) << ":" << s.location.inlined_line;
    text << "\n  PTX     line " << s.line << ": " << s.text;
    if (!s.problem.empty()) text << " (" << s.problem << ")";
    const Dim &b = warp->block->index, &size = config.block;
    text << "\n  block   (" << b.x << ", " << b.y << ", " << b.z << "), warp " << warp->id;
    if (error.lane >= 0) {
      const uint64_t thread = warp->id * kLanes + error.lane;
      text << ", lane " << error.lane << ", thread (" << thread % size.x << ", " << thread / size.x % size.y << ", "
           << thread / size.x / size.y << ")";
    }
  }
  text << "\n  seed    " << options.seed;
  return text.str();
}

}  // namespace interpreter
