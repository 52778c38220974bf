// The operators on the CUDA kernels. Current selects the device and its stream; the tests pass their own, to run on the
// interpreter.
#pragma once

#include <cstdlib>

#include "operators.h"

namespace flashsoftmax {

// While a Current(like) lives the device of the tensor is the current one, and stream() that device's stream.
template <class Current> struct CudaDevice {
  static constexpr bool kSumsGradBias = false;
  // Only if FLASHSOFTMAX_CHECK is 1: reading lengths waits for the GPU, which is impossible during graph capture.
  static bool reads_lengths(const Tensor& like) {
    const char* wanted = std::getenv("FLASHSOFTMAX_CHECK");
    return wanted && std::string(wanted) == "1" && !cuda::is_capturing(Current(like).stream());
  }
  static void attention(const AttentionParams& p, const Tensor& like) {
    launch(like, p, cuda::attention_scratch(p), cuda::attention);
  }
  static void attention_backward(const AttentionBackwardParams& p, const Tensor& like) {
    launch(like, p, cuda::attention_backward_scratch(p), cuda::attention_backward);
  }
  static void merge(const MergeParams& p, const Tensor& like) { launch(like, p, cuda::merge_scratch(p), cuda::merge); }
  static void merge_backward(const MergeBackwardParams& p, const Tensor& like) {
    launch(like, p, cuda::merge_backward_scratch(p), cuda::merge_backward);
  }
  static void copy_rows(const CopyRowsParams& p, const Tensor& like) {
    launch(like, p, cuda::copy_rows_scratch(p), cuda::copy_rows);
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
