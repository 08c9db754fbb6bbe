// The row kernels of each CPU level: logits in, softmax statistics or gradients out.
#pragma once

#include "common/cpu_level.h"
#include "token_log_probs/math.h"

namespace fusedrl {

template <typename T>
struct RowKernels {
  // The statistics of a row's logits, or of a part of them; the second with those of the entropy.
  SoftmaxPart<double> (*part)(const T* logits, int64_t count, float inv_temperature);
  SoftmaxPart<double> (*part_entropy)(const T* logits, int64_t count, float inv_temperature);
  // The gradients of logits that are not the target's. `grad` may be `logits`.
  void (*backward)(const T* logits, T* grad, int64_t count, RowGradient gradient);
};

namespace portable {
template <typename T>
RowKernels<T> row_kernels();
}
namespace avx2 {
template <typename T>
RowKernels<T> row_kernels();
}
namespace avx512 {
template <typename T>
RowKernels<T> row_kernels();
}

template <typename T>
RowKernels<T> row_kernels(CpuLevel level) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::row_kernels<T>();
  if (level == CpuLevel::avx2) return avx2::row_kernels<T>();
#endif
  return portable::row_kernels<T>();
}

}  // namespace fusedrl
