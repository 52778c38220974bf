// The operators with the interpreter as their device: flashsoftmax_interpreted, on CPU tensors.
#include <cstdlib>

#include "../../csrc/ops.h"

namespace flashsoftmax {
namespace {

template <class Params>
void launch_on(const Tensor& like, const Params& params, int64_t bytes,
               void (*launch)(const Params&, void* scratch, void* stream)) {
  Tensor memory = scratch(like, bytes);
  launch(params, memory.data_ptr(), nullptr);
}

struct Interpreted {
  // As on CUDA: only on request.
  static bool reads_lengths(const Tensor&) {
    const char* wanted = std::getenv("FLASHSOFTMAX_CHECK");
    return wanted && std::string(wanted) == "1";
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

STABLE_TORCH_LIBRARY(flashsoftmax_interpreted, m) { define_operators(m); }
STABLE_TORCH_LIBRARY_IMPL(flashsoftmax_interpreted, CPU, m) { Operators<Interpreted>::implement(m); }

}  // namespace flashsoftmax
