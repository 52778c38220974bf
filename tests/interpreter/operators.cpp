// The operators with the interpreter as their device: flashsoftmax_interpreted, on CPU tensors.
#include "../../csrc/ops/cuda.h"

namespace flashsoftmax {
namespace {

// The interpreter has one device and one stream.
struct Interpreter {
  explicit Interpreter(const Tensor&) {}
  void* stream() const { return nullptr; }
};

}  // namespace

STABLE_TORCH_LIBRARY(flashsoftmax_interpreted, m) { define_operators(m); }
STABLE_TORCH_LIBRARY_IMPL(flashsoftmax_interpreted, CPU, m) { Operators<CudaDevice<Interpreter>>::implement(m); }

}  // namespace flashsoftmax
