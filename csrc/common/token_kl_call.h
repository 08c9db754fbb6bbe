// The entry point of the CPU kernels of token_kl for the torch-free bindings, without dispatcher.
#pragma once

#include <cstdint>

namespace fusedrl {

enum class TokenDtype : int64_t { float32, bfloat16, float16, float64 };

// Contiguous columns with one value per token, null if absent. With `is_backward`, the rewards are
// the upstream gradients of the penalised rewards, and `out` is the gradient of the log-probs.
struct TokenKLCall {
  const void *log_probs, *ref_log_probs;
  const void* mask;  // null keeps all
  const void *reward, *grad_kl;
  void *out, *penalised;
  int64_t tokens;
  TokenDtype dtype;
  double coeff;
  int64_t estimator;
  bool nan_missing, is_backward;
};

// Symbol fusedrl_token_kl of the library _C; the columns have been checked.
using TokenKLFunction = void(const TokenKLCall& call);

}  // namespace fusedrl
