// Python bindings.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>

#include "device.h"

namespace py = pybind11;
using namespace interpreter;

namespace {

// Replaces torch's CPU allocator while it records: each allocation is declared to the device with its exact size,
// poisoned, and far from all others.
class RecordingAllocator : public c10::Allocator {
 public:
  static RecordingAllocator& get() {
    static RecordingAllocator* allocator = new RecordingAllocator;  // torch keeps it until the end
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    char* memory = static_cast<char*>(std::aligned_alloc(kApart, (bytes + 3 * kApart - 1) / kApart * kApart));
    char* data = memory + kApart;
    std::memset(data, GlobalMemory::kPoison, bytes);
    Device::get().memory.allocate("allocation " + std::to_string(++count_), reinterpret_cast<uint64_t>(data), bytes);
    c10::reportMemoryUsageToProfiler(data, int64_t(bytes), 0, 0, c10::Device(c10::kCPU));
    return {data, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  // Replaces torch's own allocator, or puts that back.
  void record(bool on) {
    if (on == recording) return;
    if (on) before_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(on ? this : before_, 255);
    recording = on;
    if (on) count_ = 0;
  }

 private:
  static constexpr size_t kApart = 512;

  static void release(void* memory) {
    Device::get().memory.release(reinterpret_cast<uint64_t>(memory) + kApart);
    std::free(memory);
  }

  bool recording = false;
  int count_ = 0;
  c10::Allocator* before_ = nullptr;
};

py::tuple tuple(const Dim& d) { return py::make_tuple(d.x, d.y, d.z); }

// The fields of Python's Launched.
py::dict described(const Launched& launched) {
  const Counts& counts = launched.counts;
  py::dict by_kind, shared;
  for (size_t kind = 0; kind < counts.by_kind.size(); kind++)
    if (counts.by_kind[kind]) by_kind[kinds()[kind].c_str()] = counts.by_kind[kind];
  for (const auto& [kind, banks] : counts.shared)
    shared[kind.c_str()] = py::make_tuple(banks.accesses, banks.wavefronts, banks.ideal);
  py::dict d;
  d["kernel"] = launched.kernel;
  d["grid"] = tuple(launched.grid);
  d["block"] = tuple(launched.block);
  d["shared_bytes"] = launched.shared_bytes;
  d["instructions"] = counts.instructions;
  d["by_kind"] = by_kind;
  d["mmas"] = counts.mmas;
  d["shared"] = shared;
  d["bytes_read"] = counts.global.bytes_read;
  d["bytes_written"] = counts.global.bytes_written;
  d["distinct_bytes_read"] = counts.global.distinct_bytes_read;
  d["distinct_bytes_written"] = counts.global.distinct_bytes_written;
  d["global_accesses"] = counts.global.accesses;
  d["sectors"] = counts.global.sectors;
  d["ideal_sectors"] = counts.global.ideal_sectors;
  return d;
}

Dim dim(const std::vector<uint32_t>& sizes) {
  return {sizes.at(0), sizes.size() > 1 ? sizes[1] : 1, sizes.size() > 2 ? sizes[2] : 1};
}

void launch(Module& module, const std::string& name, const std::vector<uint32_t>& grid,
            const std::vector<uint32_t>& block, uint32_t shared, const std::vector<py::bytes>& arguments,
            bool cooperative) {
  const Kernel& kernel = module.kernel(name);
  if (arguments.size() != kernel.params.size())
    throw std::invalid_argument(name + ": " + std::to_string(arguments.size()) + " arguments, wanted " +
                                std::to_string(kernel.params.size()));
  LaunchConfig config{dim(grid), dim(block), shared, std::vector<uint8_t>(kernel.param_bytes), cooperative};
  for (size_t p = 0; p < arguments.size(); p++) {
    const std::string bytes = arguments[p];
    if (bytes.size() != kernel.param_sizes[p])
      throw std::invalid_argument(name + ": argument " + std::to_string(p) + " of " + std::to_string(bytes.size()) +
                                  " bytes, wanted " + std::to_string(kernel.param_sizes[p]));
    std::memcpy(&config.params[kernel.params[p]], bytes.data(), bytes.size());
  }
  Device::get().launch(kernel, config);
}

}  // namespace

PYBIND11_MODULE(core, m) {
  using Sizes = std::vector<int64_t>;
  m.def("begin", [](uint64_t seed, uint64_t max_instructions) { Device::get().begin({seed, max_instructions}); });
  m.def("end", [] { return Device::get().end(); });
  m.def("failed", [] { return Device::get().failed(); });
  m.def("clear_memory", [] { Device::get().memory.clear(); });
  m.def("record_allocations", [](bool on) { RecordingAllocator::get().record(on); });
  m.def("declare_input",
        [](const std::string& name, uint64_t data, const Sizes& sizes, const Sizes& strides, int64_t item) {
          Device::get().memory.declare(name, data, sizes, strides, item, kReadable | kWritten);
        });
  m.def("declare_output",
        [](const std::string& name, uint64_t data, const Sizes& sizes, const Sizes& strides, int64_t item) {
          Device::get().memory.declare(name, data, sizes, strides, item, kReadable | kWritable);
        });
  m.def("declare_memory",
        [](const std::string& name, uint64_t data, const Sizes& sizes, const Sizes& strides, int64_t item) {
          Device::get().memory.declare(name, data, sizes, strides, item, kReadable | kWritable | kWritten);
        });
  m.def("host_write", [](uint64_t data, uint64_t bytes) { Device::get().memory.host_write(data, bytes); });
  m.def("unwritten", [](uint64_t data, const Sizes& sizes, const Sizes& strides, int64_t item) {
    Device::get().memory.note_host_writes();
    return Device::get().memory.unwritten(data, sizes, strides, item);
  });
  m.def("launches", [] {
    py::list all;
    for (const Launched& launched : Device::get().launched) all.append(described(launched));
    return all;
  });
  py::class_<Module>(m, "Module")
      .def(py::init<std::string>())
      .def("kernels",
           [](const Module& module) {
             std::vector<std::string> names;
             for (const auto& [name, function] : module.functions)
               if (function.entry) names.push_back(name);
             return names;
           })
      .def("unknown",
           [](Module& module, const std::string& name) {
             std::vector<std::string> texts;
             for (const Statement& s : module.kernel(name).statements)
               if (!s.problem.empty())
                 texts.push_back("line " + std::to_string(s.line) + ": " + s.text + ": " + s.problem);
             return texts;
           })
      .def("launch", &launch);
}
