// Where samples lie, as the torch-free bindings tell the kernels of the CPU, and these kernels.
#pragma once

#include <cstdint>

namespace fusedrl {

enum class SampleDtype : int64_t { float32, bfloat16, float16, float64 };

// One sample, contiguous on the CPU. A reward has one value a token, or one for all of them.
struct SampleMemory {
  const void* log_probs;
  const void* ref_log_probs;
  const void* mask;    // null keeps all
  const void* reward;  // null for none
  int64_t tokens;
  int64_t rewards;
};

// The upstream gradients of a sample's tokens: of the KL and of the penalised reward; null for one
// there is not.
struct TokenKLUpstream {
  const void* kl;
  const void* reward;
};

// `dtype` is a SampleDtype, `estimator` an Estimator. `penalised` is null where there is no reward.
// False, and nothing is written, where no CPU level can be chosen.
using TokenKLKernel = bool(const SampleMemory* samples, int64_t count, int64_t dtype, double coeff,
                           int64_t estimator, bool nan_missing, void* kl, void* penalised);
using TokenKLGradientKernel = bool(const SampleMemory* sample, TokenKLUpstream upstream,
                                   int64_t dtype, double coeff, int64_t estimator, bool nan_missing,
                                   void* grad_log_probs);

}  // namespace fusedrl
