// The kernels of two rows for each CPU level: logits in, statistics or gradients out. They work on
// any part of a row, so that a row may come in tiles.
#pragma once

#include "common/cpu_level.h"
#include "exact_kl/math.h"

namespace fusedrl {

template <typename T>
struct PairKernels {
  PairPart<double> (*part)(const T* logits, const T* ref_logits, int64_t count,
                           float inv_temperature);
  // The sums of Jensen-Shannon; the normalizers are those of the whole rows.
  Pair<double> (*jensen_shannon_part)(const T* logits, const T* ref_logits, int64_t count,
                                      Pair<Normalizer> normalizers, float inv_temperature);
  // Either gradient may be null, `grad` may be `logits`, `grad_ref` may be `ref_logits`.
  void (*backward)(const T* logits, const T* ref_logits, T* grad, T* grad_ref, int64_t count,
                   PairGradient gradient);
  void (*jensen_shannon_backward)(const T* logits, const T* ref_logits, T* grad, T* grad_ref,
                                  int64_t count, PairGradient gradient);
};

namespace portable {
template <typename T>
PairKernels<T> pair_kernels();
}
namespace avx2 {
template <typename T>
PairKernels<T> pair_kernels();
}
namespace avx512 {
template <typename T>
PairKernels<T> pair_kernels();
}

template <typename T>
PairKernels<T> pair_kernels(CpuLevel level) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::pair_kernels<T>();
  if (level == CpuLevel::avx2) return avx2::pair_kernels<T>();
#endif
  return portable::pair_kernels<T>();
}

}  // namespace fusedrl
