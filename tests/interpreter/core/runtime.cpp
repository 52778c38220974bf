// The part of the CUDA runtime that launchers use, with the interpreter as the device. Device pointers are host
// pointers, and everything runs synchronously.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace {

using namespace interpreter;

// A kernel, as registered by the host code.
struct KernelHandle {
  std::shared_ptr<Module> module;
  std::string name;
  uint32_t most_dynamic_shared = 0;

  const Kernel& kernel() const { return module->kernel(name); }
};

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

// What nvcc embeds: a header, followed by entries (one is the PTX text), each with a header of its own.
struct FatHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatEntry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
};
struct FatWrapper {
  int magic, version;
  const FatHeader* header;
  void* file;
};
constexpr uint16_t kPtx = 1;

std::string ptx_of(const FatHeader* header) {
  const char* at = reinterpret_cast<const char*>(header) + header->header_bytes;
  const char* end = at + header->bytes;
  while (at < end) {
    const auto* entry = reinterpret_cast<const FatEntry*>(at);
    const char* text = at + entry->header_bytes;
    if (entry->kind == kPtx) return std::string(text, strnlen(text, entry->bytes));
    at = text + entry->bytes;
  }
  return "";
}

std::map<const void*, KernelHandle>& kernels() {
  static std::map<const void*, KernelHandle> all;
  return all;
}

thread_local std::vector<Configuration> configurations;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

Dim dim(dim3 d) { return {d.x, d.y, d.z}; }

cudaError_t launch(KernelHandle& handle, dim3 grid, dim3 block, void** arguments, size_t shared,
                   bool cooperative = false) try {
  const Kernel& kernel = handle.kernel();
  Device& device = Device::get();
  const Dim threads = dim(block);
  const uint32_t most =
      std::max(handle.most_dynamic_shared, kSharedOfBlock - std::min(kSharedOfBlock, kernel.static_shared));
  if (dim(grid).count() == 0 || threads.count() == 0 || grid.y > 65535 || grid.z > 65535 ||
      threads.count() > kThreadsOfBlock || block.z > 64)
    return note(cudaErrorInvalidConfiguration);
  if (threads.count() > kernel.max_threads) return note(cudaErrorInvalidConfiguration);
  if (shared > most) return note(cudaErrorInvalidValue);
  LaunchConfig config{dim(grid), threads, uint32_t(shared), std::vector<uint8_t>(kernel.param_bytes), cooperative};
  for (size_t p = 0; p < kernel.params.size(); p++)
    std::memcpy(&config.params[kernel.params[p]], arguments[p], kernel.param_sizes[p]);
  return device.launch(kernel, config) ? cudaSuccess : note(cudaErrorLaunchFailure);
} catch (const std::exception& error) {
  Device::get().fail(error.what());
  return note(cudaErrorLaunchFailure);
}

cudaError_t checked(void (*check)(uint64_t, uint64_t), const void* data, size_t bytes) {
  try {
    check(reinterpret_cast<uint64_t>(data), bytes);
    return cudaSuccess;
  } catch (const std::exception& error) {
    Device::get().fail(error.what());
    return note(cudaErrorIllegalAddress);
  }
}
void check_write(uint64_t data, uint64_t bytes) { Device::get().memory.host_write(data, bytes); }
void check_read(uint64_t data, uint64_t bytes) { Device::get().memory.host_read(data, bytes); }

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  const FatHeader* header = static_cast<const FatWrapper*>(wrapper)->header;
  return reinterpret_cast<void**>(new std::shared_ptr<Module>(std::make_shared<Module>(ptx_of(header))));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  kernels()[host] = {*reinterpret_cast<std::shared_ptr<Module>*>(module), name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return note(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(&found->second);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return launch(*reinterpret_cast<KernelHandle*>(kernel), grid, block, arguments, shared);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return note(cudaErrorInvalidDeviceFunction);
  return launch(found->second, grid, block, arguments, shared);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return note(cudaErrorInvalidDeviceFunction);
  return launch(found->second, grid, block, arguments, shared, true);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
  return cudaLaunchKernel(host, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return note(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value + found->second.kernel().static_shared > kMostSharedOfBlock)
    return note(cudaErrorInvalidValue);
  found->second.most_dynamic_shared = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return note(cudaErrorInvalidDeviceFunction);
  const Kernel& kernel = found->second.kernel();
  *attributes = {};
  attributes->sharedSizeBytes = kernel.static_shared;
  attributes->localSizeBytes = kernel.local_bytes;
  attributes->maxThreadsPerBlock = kernel.max_threads;
  attributes->maxDynamicSharedSizeBytes = std::max(found->second.most_dynamic_shared, kSharedOfBlock);
  attributes->ptxVersion = attributes->binaryVersion = 80;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads,
                                                                   size_t shared, unsigned) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return note(cudaErrorInvalidDeviceFunction);
  const uint32_t bytes = shared + found->second.kernel().static_shared + 1024;
  *blocks = std::min(kThreadsOfMultiprocessor / std::max(threads, 1), kSharedOfMultiprocessor / bytes);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "error";
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : note(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedOfBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kMostSharedOfBlock; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = kSharedOfMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = kThreadsOfBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = kThreadsOfMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = kLanes; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrL2CacheSize: *value = 40 << 20; break;
    default: return note(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  if (bytes == 0) return cudaSuccess;
  const cudaError_t error = checked(check_write, data, bytes);
  if (error == cudaSuccess) std::memset(data, value, bytes);
  return error;
}
cudaError_t cudaMemset(void* data, int value, size_t bytes) { return cudaMemsetAsync(data, value, bytes, nullptr); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  if (bytes == 0) return cudaSuccess;
  cudaError_t error = checked(check_read, from, bytes);
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  if (error == cudaSuccess && to_device) error = checked(check_write, to, bytes);
  if (error == cudaSuccess) std::memcpy(to, from, bytes);
  return error;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return last_error; }
cudaError_t cudaDeviceSynchronize() { return last_error; }
}
