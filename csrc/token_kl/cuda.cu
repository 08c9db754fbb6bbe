// CUDA ops: launches and registration. Nothing here waits for the device.
#include <tuple>

#include "common/cuda.h"
#include "token_kl/kernels.h"

namespace fusedrl {
namespace {

constexpr int kThreads = 256;

int64_t blocks_for(int64_t tokens) { return (tokens + kThreads - 1) / kThreads; }

std::tuple<Tensor, Tensor> forward(Tensor log_probs, Tensor ref_log_probs,
                                   std::optional<Tensor> mask, std::optional<Tensor> reward,
                                   Tensor coeff, int64_t estimator, bool nan_missing) {
  const OnDeviceOf device(log_probs);
  const ScalarType dtype = log_probs.scalar_type();
  const int64_t tokens = log_probs.numel();
  Tensor kl = empty_like_sizes(log_probs, log_probs, dtype);
  Tensor penalised = reward.has_value() ? empty_like_sizes(log_probs, log_probs, dtype)
                                        : empty_vector(log_probs, dtype);
  const Scalar weight = scalar_argument("coeff", coeff, log_probs);
  if (tokens == 0) return {kl, penalised};
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask),
                              nan_missing};
    device.launch(forward_tokens<T>, blocks_for(tokens), kThreads, pairs, tokens, data<T>(reward),
                  weight, static_cast<Estimator>(estimator), mutable_data<T>(kl),
                  mutable_data<T>(penalised));
  });
  return {kl, penalised};
}

Tensor backward(std::optional<Tensor> grad_kl, std::optional<Tensor> grad_reward, Tensor log_probs,
                Tensor ref_log_probs, std::optional<Tensor> mask, Tensor coeff, int64_t estimator,
                bool nan_missing) {
  check_upstream(grad_kl.has_value(), grad_reward.has_value());
  const OnDeviceOf device(log_probs);
  const int64_t tokens = log_probs.numel();
  Tensor grad_log_probs = empty_like_sizes(log_probs, log_probs, log_probs.scalar_type());
  const Scalar weight = scalar_argument("coeff", coeff, log_probs);
  if (tokens == 0) return grad_log_probs;
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask),
                              nan_missing};
    device.launch(backward_tokens<T>, blocks_for(tokens), kThreads, pairs, tokens, data<T>(grad_kl),
                  data<T>(grad_reward), weight, static_cast<Estimator>(estimator),
                  mutable_data<T>(grad_log_probs));
  });
  return grad_log_probs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("token_kl", TORCH_BOX(&forward));
  m.impl("token_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
