// The kernels of a piece of tokens for each CPU level.
#pragma once

#include "common/cpu_level.h"
#include "token_kl/math.h"

namespace fusedrl {

constexpr int64_t kTokenPiece = 1024;  // what kernels compute on stays in L1

// The rewards of a piece's tokens before and after the penalty; null for none.
template <typename T>
struct PieceRewards {
  const T* before;
  T* after;
};

// The upstream gradients of a piece's tokens: of the KL, of the penalised reward, or of both; null
// for one there is not.
template <typename T>
struct PieceGradients {
  const T* kl;
  const T* reward;
};

// Both take the log-probs of up to kTokenPiece tokens, and the weight of the KL in the reward.
template <typename T>
struct TokenKernels {
  using A = typename Accumulate<T>::type;

  void (*forward)(const TokenPairs<T>& pairs, int64_t tokens, A weight,
                  const PieceRewards<T>& rewards, T* kl);
  void (*backward)(const TokenPairs<T>& pairs, int64_t tokens, A weight,
                   const PieceGradients<T>& upstream, T* grad_log_probs);
};

namespace portable {
template <typename T>
TokenKernels<T> token_kernels(Estimator estimator);
}
namespace avx2 {
template <typename T>
TokenKernels<T> token_kernels(Estimator estimator);
}
namespace avx512 {
template <typename T>
TokenKernels<T> token_kernels(Estimator estimator);
}

template <typename T>
TokenKernels<T> token_kernels(CpuLevel level, Estimator estimator) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::token_kernels<T>(estimator);
  if (level == CpuLevel::avx2) return avx2::token_kernels<T>(estimator);
#endif
  return portable::token_kernels<T>(estimator);
}

}  // namespace fusedrl
