// The operators on the CUDA kernels, for whatever device runs these: CUDA, or what the tests put in its place.
#pragma once

#include <cstdlib>

#include "operators.h"

namespace flashsoftmax {

// While a Current(like) lives the device of the tensor is the current one, and stream() that device's stream.
template <class Current> struct CudaDevice {
  static constexpr bool kSumsGradMask = false;
  // Only on request: to read them is to wait for the GPU, which a graph that is being captured cannot.
  static bool reads_lengths(const Tensor& like) {
    const char* wanted = std::getenv("FLASHSOFTMAX_CHECK");
    return wanted && std::string(wanted) == "1" && !cuda::is_capturing(Current(like).stream());
  }
  static void attention(const AttentionParams& p, const Tensor& like) {
    launch(like, p, cuda::attention_scratch(p), cuda::attention);
  }
  static void attention_grad(const AttentionGradParams& p, const Tensor& like) {
    launch(like, p, cuda::attention_grad_scratch(p), cuda::attention_grad);
  }
  static void merge(const MergeParams& p, const Tensor& like) { launch(like, p, cuda::merge_scratch(p), cuda::merge); }
  static void merge_grad(const MergeGradParams& p, const Tensor& like) {
    launch(like, p, cuda::merge_grad_scratch(p), cuda::merge_grad);
  }

 private:
  template <class Params>
  static void launch(const Tensor& like, const Params& params, int64_t bytes,
                     void (*kernel)(const Params&, void* scratch, void* stream)) {
    const Current current(like);
    Tensor memory = scratch(like, bytes);
    kernel(params, memory.data_ptr(), current.stream());
  }
};

}  // namespace flashsoftmax
