// The operators' schemas, and their CPU registration.
#include <atomic>

#include "operators.h"

namespace flashsoftmax {
namespace {

// torch's own threads, each taking the next task as it gets free.
Runner torch_runner() {
  const int64_t workers = torch::stable::get_num_threads();
  auto run = [workers](int64_t count, const std::function<void(int64_t, int64_t)>& task) {
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min(workers, count), 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; worker++)
        for (int64_t index; (index = next.fetch_add(1)) < count;) task(worker, index);
    });
  };
  return {workers, run};
}

struct Cpu {
  static constexpr bool kSumsGradBias = true;
  static bool reads_lengths(const Tensor&) { return true; }
  static void attention(const AttentionParams& p, const Tensor& like) {
    const Runner runner = torch_runner();
    Tensor memory = scratch(like, cpu_kernels().attention_scratch(p, runner.workers));
    cpu_kernels().attention(p, memory.data_ptr(), runner);
  }
  static void attention_backward(const AttentionBackwardParams& p, const Tensor& like) {
    const Runner runner = torch_runner();
    Tensor memory = scratch(like, cpu_kernels().attention_backward_scratch(p, runner.workers));
    cpu_kernels().attention_backward(p, memory.data_ptr(), runner);
  }
  static void merge(const MergeParams& p, const Tensor&) { cpu_kernels().merge(p, torch_runner()); }
  static void merge_backward(const MergeBackwardParams& p, const Tensor&) {
    cpu_kernels().merge_backward(p, torch_runner());
  }
  static void copy_rows(const CopyRowsParams& p, const Tensor&) { cpu_kernels().copy_rows(p, torch_runner()); }
};

std::string cpu_isa() { return cpu_kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY(flashsoftmax, m) {
  define_operators(m);
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CPU, m) { Operators<Cpu>::implement(m); }

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&cpu_isa)); }

}  // namespace flashsoftmax
