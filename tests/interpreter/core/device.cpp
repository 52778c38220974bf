#include "device.h"

namespace interpreter {

Device& Device::get() {
  static Device device;
  return device;
}

void Device::begin(const Options& options) {
  options_ = options;
  active_ = true;
  fault_.reset();
  launched.clear();
  memory.clear();
}

std::optional<std::string> Device::end() {
  active_ = false;
  memory.clear();
  return fault_;
}

void Device::fail(const std::string& report) {
  if (!fault_) fault_ = report;
}

bool Device::launch(const Kernel& kernel, const LaunchConfig& config) {
  if (!active_) fail("a launch outside of a session");
  if (failed()) return false;
  Launch launch(kernel, config, memory, options_);
  std::string error;
  try {
    for (auto& [name, variable] : kernel.module->globals) {
      const uint64_t bytes = variable->bytes.size();
      memory.declare(name, reinterpret_cast<uint64_t>(variable->bytes.data()), {int64_t(bytes)}, {1}, 1,
                     kReadable | kWritable | kWritten);
    }
    launch.run();
  } catch (const std::exception& caught) {
    fail(caught.what());
  }
  launched.push_back({demangled(kernel.name), config.grid, config.block, launch.shared_bytes, launch.counts});
  return !failed();
}

}  // namespace interpreter
