// The tensors of linear_policy_loss as kernels see them.
#pragma once

#include <optional>

#include "common/tensor.h"
#include "linear_policy_loss/math.h"

namespace fusedrl {

constexpr int64_t kPolicyRowFloats = sizeof(PolicyRow) / sizeof(float);

inline PolicyTokens policy_tokens(const Tensor& advantages, const std::optional<Tensor>& old,
                                  const std::optional<Tensor>& ref, const Tensor& weights,
                                  int64_t surrogate, double low, double high, double most,
                                  int64_t estimator) {
  return {data<float>(advantages),
          data<float>(old),
          data<float>(ref),
          data<TermWeights>(weights),
          {static_cast<Surrogate>(surrogate), static_cast<float>(low), static_cast<float>(high),
           static_cast<float>(most), static_cast<Estimator>(estimator)}};
}

}  // namespace fusedrl
