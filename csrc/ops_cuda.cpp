// The operators' CUDA registration.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

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

std::tuple<Tensor, Tensor> cuda_merge(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
  return merge_on(outs, lses, [&](const MergeParams& p) {
    const OnDeviceOf device(outs[0]);
    Tensor scratch = torch::stable::new_empty(outs[0], {cuda::merge_scratch(p)}, ScalarType::Byte);
    cuda::merge(p, scratch.data_ptr(), device.stream());
  });
}

std::tuple<Tensor, Tensor> cuda_merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                               const std::vector<Tensor>& outs, const std::vector<Tensor>& lses,
                                               const Tensor& lse) {
  return merge_backward_on(grad_out, grad_lse, outs, lses, lse, [&](const MergeGradParams& p) {
    const OnDeviceOf device(lse);
    Tensor scratch = torch::stable::new_empty(lse, {cuda::merge_grad_scratch(p)}, ScalarType::Byte);
    cuda::merge_grad(p, scratch.data_ptr(), device.stream());
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CUDA, m) {
  m.impl("merge", TORCH_BOX(&cuda_merge));
  m.impl("merge_backward", TORCH_BOX(&cuda_merge_backward));
}

}  // namespace flashsoftmax
