// CPU ops: one elementwise pass, in pieces that stay in L1, divided among torch's threads.
#include <algorithm>
#include <tuple>
#include <type_traits>

#include "common/cpu_ops.h"
#include "common/token_kl_call.h"
#include "token_kl/cpu_rows.h"

namespace fusedrl {
namespace {

// The least number of tokens per thread: the same as in torch's elementwise ops, which usually run
// around this op.
constexpr int64_t kGrain = 32768;

template <typename T>
void run(const TokenKLCall& call) {
  const TokenPiece<T> columns{
      static_cast<const T*>(call.log_probs), static_cast<const T*>(call.ref_log_probs),
      static_cast<const bool*>(call.mask),   static_cast<const T*>(call.reward),
      static_cast<const T*>(call.grad_kl),   static_cast<T*>(call.out),
      static_cast<T*>(call.penalised),       call.nan_missing};
  const auto weight = static_cast<typename Accumulate<T>::type>(call.coeff);
  const auto kernel =
      token_kernel<T>(cpu_level(), static_cast<Estimator>(call.estimator), call.is_backward);
  const auto range = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kTokenPiece) {
      kernel(columns.from(begin), std::min(kTokenPiece, end - begin), weight);
    }
  };
  if (call.tokens <= kGrain) return range(0, call.tokens);
  torch::stable::parallel_for(0, call.tokens, kGrain, range);
}

const void* address(const std::optional<Tensor>& column) {
  return column.has_value() ? column->const_data_ptr() : nullptr;
}

// A call with the columns and options of both passes.
TokenKLCall call_of(const Tensor& log_probs, const Tensor& ref_log_probs,
                    const std::optional<Tensor>& mask, const Tensor& coeff, int64_t estimator,
                    bool nan_missing) {
  TokenKLCall call{};
  call.log_probs = log_probs.const_data_ptr();
  call.ref_log_probs = ref_log_probs.const_data_ptr();
  call.mask = address(mask);
  call.tokens = log_probs.numel();
  call.coeff = *data<double>(coeff);
  call.estimator = estimator;
  call.nan_missing = nan_missing;
  return call;
}

std::tuple<Tensor, Tensor> forward(Tensor log_probs, Tensor ref_log_probs,
                                   std::optional<Tensor> mask, std::optional<Tensor> reward,
                                   Tensor coeff, int64_t estimator, bool nan_missing) {
  const ScalarType dtype = log_probs.scalar_type();
  Tensor kl = empty_like_sizes(log_probs, log_probs, dtype);
  Tensor penalised = reward.has_value() ? empty_like_sizes(log_probs, log_probs, dtype)
                                        : empty_vector(log_probs, dtype);
  TokenKLCall call = call_of(log_probs, ref_log_probs, mask, coeff, estimator, nan_missing);
  call.reward = address(reward);
  call.out = kl.mutable_data_ptr();
  call.penalised = reward.has_value() ? penalised.mutable_data_ptr() : nullptr;
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() { run<T>(call); });
  return {kl, penalised};
}

Tensor backward(std::optional<Tensor> grad_kl, std::optional<Tensor> grad_reward, Tensor log_probs,
                Tensor ref_log_probs, std::optional<Tensor> mask, Tensor coeff, int64_t estimator,
                bool nan_missing) {
  check_upstream(grad_kl.has_value(), grad_reward.has_value());
  Tensor grad_log_probs = empty_like_sizes(log_probs, log_probs, log_probs.scalar_type());
  TokenKLCall call = call_of(log_probs, ref_log_probs, mask, coeff, estimator, nan_missing);
  call.reward = address(grad_reward);
  call.grad_kl = address(grad_kl);
  call.out = grad_log_probs.mutable_data_ptr();
  call.is_backward = true;
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() { run<T>(call); });
  return grad_log_probs;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void fusedrl_token_kl(const TokenKLCall& call) {
  switch (call.dtype) {
    case TokenDtype::float32:
      return run<float>(call);
    case TokenDtype::bfloat16:
      return run<BFloat16>(call);
    case TokenDtype::float16:
      return run<Half>(call);
    case TokenDtype::float64:
      return run<double>(call);
  }
}

static_assert(std::is_same_v<decltype(fusedrl_token_kl), TokenKLFunction>);

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("token_kl", TORCH_BOX(&forward));
  m.impl("token_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
