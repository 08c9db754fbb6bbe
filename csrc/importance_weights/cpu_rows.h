// The kernel of one sequence for each CPU level.
#pragma once

#include "common/cpu_level.h"
#include "importance_weights/math.h"

namespace fusedrl {

// The log-probs of a sequence's tokens.
template <typename T>
struct TokenSequence {
  const T* log_probs;
  const T* rollout_log_probs;
  const bool* mask;  // null keeps all
  int64_t tokens;
};

// Writes the weights of a sequence.
template <typename T>
using SequenceKernel = Mismatch (*)(const TokenSequence<T>& sequence, const Weighting& weighting,
                                    float* weights);

namespace portable {
template <typename T>
SequenceKernel<T> weigh_sequence();
}
namespace avx2 {
template <typename T>
SequenceKernel<T> weigh_sequence();
}
namespace avx512 {
template <typename T>
SequenceKernel<T> weigh_sequence();
}

template <typename T>
SequenceKernel<T> weigh_sequence(CpuLevel level) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::weigh_sequence<T>();
  if (level == CpuLevel::avx2) return avx2::weigh_sequence<T>();
#endif
  return portable::weigh_sequence<T>();
}

}  // namespace fusedrl
