// The kernels of two rows for each CPU level: logits in, statistics or gradients out. They accept
// any part of a row, so that a row may be processed in tiles.
#pragma once

#include "common/cpu_level.h"
#include "exact_kl/math.h"

namespace fusedrl {

template <typename T>
struct PairKernels {
  PairPart<double> (*part)(const T* logits, const T* ref_logits, int64_t count,
                           float inv_temperature);
  // The sums of a mixture; the normalizers are those of the whole rows.
  Pair<double> (*mixture_part)(const T* logits, const T* ref_logits, int64_t count,
                               Pair<Normalizer> normalizers, Pair<float> shares,
                               float inv_temperature);
  // Either gradient may be null, `grad` may be `logits`, `grad_ref` may be `ref_logits`.
  void (*backward)(const T* logits, const T* ref_logits, T* grad, T* grad_ref, int64_t count,
                   PairGradient gradient);
};

namespace portable {
template <typename T>
PairKernels<T> pair_kernels(bool mixture, bool entropies);
}
namespace avx2 {
template <typename T>
PairKernels<T> pair_kernels(bool mixture, bool entropies);
}
namespace avx512 {
template <typename T>
PairKernels<T> pair_kernels(bool mixture, bool entropies);
}

// The kernels of KL or of a mixture, with or without the entropies of both rows.
template <typename T>
PairKernels<T> pair_kernels(CpuLevel level, bool mixture, bool entropies) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::pair_kernels<T>(mixture, entropies);
  if (level == CpuLevel::avx2) return avx2::pair_kernels<T>(mixture, entropies);
#endif
  return portable::pair_kernels<T>(mixture, entropies);
}

}  // namespace fusedrl
