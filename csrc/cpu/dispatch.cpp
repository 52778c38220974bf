// Chooses the kernels: the best instruction set of this processor, or the one that FLASHSOFTMAX_CPU_ISA names.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../kernels.h"

namespace flashsoftmax {

namespace portable {
extern const CpuKernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const CpuKernels kernels;
}
namespace avx512 {
extern const CpuKernels kernels;
}
namespace avx512_bf16 {
extern const CpuKernels kernels;
}
#endif

static const CpuKernels& choose() {
  const CpuKernels* best_first[] = {
#if defined(__x86_64__)
      &avx512_bf16::kernels, &avx512::kernels, &avx2::kernels,
#endif
      &portable::kernels};
  const char* wanted = std::getenv("FLASHSOFTMAX_CPU_ISA");
  std::string found;
  for (const CpuKernels* kernels : best_first) {
    if (!kernels->supported()) continue;
    if (!wanted || std::string(wanted) == kernels->name) return *kernels;
    found += std::string(found.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument("FLASHSOFTMAX_CPU_ISA is '" + std::string(wanted) + "', this processor has: " + found);
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace flashsoftmax
