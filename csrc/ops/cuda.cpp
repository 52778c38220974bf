// The operators' CUDA registration.
#include "cuda.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

namespace flashsoftmax {
namespace {

// Makes the device of a tensor the current one, for as long as this lives.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& x) : guard_(x.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CUDA, m) { Operators<CudaDevice<OnDeviceOf>>::implement(m); }

}  // namespace flashsoftmax
