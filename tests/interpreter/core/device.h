// The device: what a session has run on it so far, and the first fault.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "machine.h"

namespace interpreter {

struct Launched {
  std::string kernel;
  Dim grid, block;
  uint32_t shared_bytes = 0;
  Counts counts;
};

// The limits of an A100, but with fewer multiprocessors.
constexpr uint32_t kMultiprocessors = 8, kSharedOfBlock = 48 << 10, kMostSharedOfBlock = 163 << 10;
constexpr uint32_t kSharedOfMultiprocessor = 164 << 10, kThreadsOfMultiprocessor = 2048, kThreadsOfBlock = 1024;

class Device {
 public:
  // The only device.
  static Device& get();

  void begin(const Options& options);
  // The fault, if there was one. What was launched stays until the next session begins.
  std::optional<std::string> end();
  bool active() const { return active_; }

  // False if this launch, or an earlier one of the session, had a fault.
  bool launch(const Kernel& kernel, const LaunchConfig& config);
  void fail(const std::string& report);
  bool failed() const { return fault_.has_value(); }

  GlobalMemory memory;
  std::vector<Launched> launched;

 private:
  Options options_;
  bool active_ = false;
  std::optional<std::string> fault_;
};

}  // namespace interpreter
