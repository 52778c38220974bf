// The operators' CUDA registration.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdlib>

#include "ops.h"

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

// Runs launch(params, scratch memory, stream) on the device of like.
template <class Params>
void launch_on(const Tensor& like, const Params& params, int64_t bytes,
               void (*launch)(const Params&, void* scratch, void* stream)) {
  const OnDeviceOf device(like);
  Tensor memory = scratch(like, bytes);
  launch(params, memory.data_ptr(), device.stream());
}

struct Cuda {
  // Only on request: to read them is to wait for the GPU, which a graph that is being captured cannot.
  static bool reads_lengths(const Tensor& like) {
    const char* wanted = std::getenv("FLASHSOFTMAX_CHECK");
    return wanted && std::string(wanted) == "1" && !cuda::is_capturing(OnDeviceOf(like).stream());
  }
  static void attention(const AttentionParams& p, const Tensor& like) {
    launch_on(like, p, cuda::attention_scratch(p), cuda::attention);
  }
  static void attention_grad(const AttentionGradParams& p, const Tensor& like) {
    launch_on(like, p, cuda::attention_grad_scratch(p), cuda::attention_grad);
  }
  static void merge(const MergeParams& p, const Tensor& like) {
    launch_on(like, p, cuda::merge_scratch(p), cuda::merge);
  }
  static void merge_grad(const MergeGradParams& p, const Tensor& like) {
    launch_on(like, p, cuda::merge_grad_scratch(p), cuda::merge_grad);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CUDA, m) { Operators<Cuda>::implement(m); }

}  // namespace flashsoftmax
