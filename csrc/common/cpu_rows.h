// Bias and softcap of a head, in place after the matrix product, for each CPU level.
#pragma once

#include <cstdint>

#include "common/cpu_level.h"

namespace fusedrl {

struct HeadKernels {
  // Adds the bias unless it is null, then caps unless `cap` is 0.
  void (*shape)(float* logits, const float* bias, int64_t count, float cap);
  // Converts gradients of capped logits to those of the logits, in place.
  void (*chain)(const float* capped, float* grads, int64_t count, float cap);
};

namespace portable {
HeadKernels head_kernels();
}
namespace avx2 {
HeadKernels head_kernels();
}
namespace avx512 {
HeadKernels head_kernels();
}

inline HeadKernels head_kernels(CpuLevel level) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::head_kernels();
  if (level == CpuLevel::avx2) return avx2::head_kernels();
#endif
  return portable::head_kernels();
}

}  // namespace fusedrl
