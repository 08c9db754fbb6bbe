// CPU ops: one elementwise pass; a [B] reward is broadcast by walking the sequence boundaries.
#include <algorithm>
#include <tuple>

#include "common/tensor.h"
#include "token_kl/math.h"

namespace fusedrl {
namespace {

constexpr int64_t kGrain = 32768;

std::tuple<Tensor, Tensor> forward(Tensor log_probs, Tensor ref_log_probs, std::optional<Tensor> mask,
                                   std::optional<Tensor> offsets, std::optional<Tensor> reward,
                                   Tensor coeff, int64_t estimator, bool nan_missing) {
  const int64_t tokens = log_probs.numel();
  Tensor kl = empty_like_sizes(log_probs, log_probs, log_probs.scalar_type());
  Tensor penalised = reward.has_value()
                         ? empty_like_sizes(log_probs, log_probs, log_probs.scalar_type())
                         : empty_vector(log_probs, log_probs.scalar_type());
  const bool broadcast = reward.has_value() && reward->numel() != tokens;
  const int64_t* bounds = data<int64_t>(offsets);
  const Estimator kind = static_cast<Estimator>(estimator);
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    using A = typename Accumulate<T>::type;
    const A weight = static_cast<A>(*data<double>(coeff));
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask), nan_missing};
    const T* before = data<T>(reward);
    T *out = mutable_data<T>(kl), *out_reward = mutable_data<T>(penalised);
    torch::stable::parallel_for(0, tokens, kGrain, [&](int64_t begin, int64_t end) {
      int64_t sequence = 0;
      if (broadcast) {
        const int64_t* past = std::upper_bound(bounds, bounds + offsets->numel(), begin);
        sequence = past - bounds - 1;
      }
      for (int64_t n = begin; n < end; ++n) {
        const bool dropped = pairs.dropped(n);
        const A value = dropped ? A(0) : kl_of(pairs.difference(n), kind);
        out[n] = static_cast<T>(value);
        if (before == nullptr) continue;
        while (broadcast && bounds[sequence + 1] <= n) ++sequence;
        const T kept = before[broadcast ? sequence : n];
        out_reward[n] = dropped ? kept : static_cast<T>(static_cast<A>(kept) - weight * value);
      }
    });
  });
  return {kl, penalised};
}

Tensor backward(Tensor grad_kl, std::optional<Tensor> grad_reward, Tensor log_probs,
                Tensor ref_log_probs, std::optional<Tensor> mask, Tensor coeff, int64_t estimator,
                bool nan_missing) {
  Tensor grad_log_probs = empty_like_sizes(log_probs, log_probs, log_probs.scalar_type());
  const Estimator kind = static_cast<Estimator>(estimator);
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    using A = typename Accumulate<T>::type;
    const A weight = static_cast<A>(*data<double>(coeff));
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask), nan_missing};
    const T *up = data<T>(grad_kl), *up_reward = data<T>(grad_reward);
    T* out = mutable_data<T>(grad_log_probs);
    torch::stable::parallel_for(0, log_probs.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        if (pairs.dropped(n)) {
          out[n] = static_cast<T>(A(0));
          continue;
        }
        const A of_reward = up_reward == nullptr ? A(0) : weight * static_cast<A>(up_reward[n]);
        const A g = static_cast<A>(up[n]) - of_reward;
        out[n] = static_cast<T>(-g * kl_slope_of(pairs.difference(n), kind));
      }
    });
  });
  return grad_log_probs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("token_kl", TORCH_BOX(&forward));
  m.impl("token_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
