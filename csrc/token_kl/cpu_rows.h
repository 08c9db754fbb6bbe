// The kernels of a piece of tokens for each CPU level.
#pragma once

#include "common/cpu_level.h"
#include "token_kl/math.h"

namespace fusedrl {

constexpr int64_t kTokenPiece = 1024;  // the working set stays in L1

// Columns from the first token of a piece on, null if absent. In a backward pass, the rewards are
// the upstream gradients of the penalised rewards, and `out` is the gradient of the log-probs.
template <typename T>
struct TokenPiece {
  const T *log_probs, *ref_log_probs;
  const bool* mask;  // null keeps all
  const T *reward, *grad_kl;
  T *out, *penalised;
  bool nan_missing;

  FUSEDRL_HD TokenPiece from(int64_t token) const {
    const auto at = [=](auto* column) { return column == nullptr ? column : column + token; };
    return {at(log_probs), at(ref_log_probs), at(mask),      at(reward),
            at(grad_kl),   at(out),           at(penalised), nan_missing};
  }
};

// Computes up to kTokenPiece tokens with the weight of the KL in the reward.
template <typename T>
using TokenKernel = void (*)(const TokenPiece<T>& piece, int64_t tokens,
                             typename Accumulate<T>::type weight);

namespace portable {
template <typename T>
TokenKernel<T> token_kernel(Estimator estimator, bool is_backward);
}
namespace avx2 {
template <typename T>
TokenKernel<T> token_kernel(Estimator estimator, bool is_backward);
}
namespace avx512 {
template <typename T>
TokenKernel<T> token_kernel(Estimator estimator, bool is_backward);
}

template <typename T>
TokenKernel<T> token_kernel(CpuLevel level, Estimator estimator, bool is_backward) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::token_kernel<T>(estimator, is_backward);
  if (level == CpuLevel::avx2) return avx2::token_kernel<T>(estimator, is_backward);
#endif
  return portable::token_kernel<T>(estimator, is_backward);
}

}  // namespace fusedrl
