// The row kernels of each CPU level: one logits row in, one result or one gradient row out.
#pragma once

#include "common/cpu_level.h"
#include "token_log_probs/math.h"

namespace fusedrl {

template <typename T>
struct RowKernels {
  RowResult (*forward)(const T* row, int64_t classes, int64_t target, float inv_temperature);
  RowResult (*forward_entropy)(const T* row, int64_t classes, int64_t target,
                               float inv_temperature);
  void (*backward)(const T* row, T* grad, int64_t classes, int64_t target, float log_prob,
                   RowGradient gradient);
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
  if (level == CpuLevel::avx512) return avx512::row_kernels<T>();
  if (level == CpuLevel::avx2) return avx2::row_kernels<T>();
#endif
  return portable::row_kernels<T>();
}

}  // namespace fusedrl
