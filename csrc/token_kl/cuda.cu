// CUDA ops: launches and registration. Nothing here waits for the device.
#include <algorithm>
#include <tuple>

#include "common/cuda.h"
#include "token_kl/list_kernels.h"
#include "token_kl/samples.h"

namespace fusedrl {
namespace {

constexpr int kThreads = 256;

int64_t blocks_for(int64_t tokens) { return (tokens + kThreads - 1) / kThreads; }

std::tuple<Tensor, Tensor> forward(Tensor log_probs, Tensor ref_log_probs,
                                   std::optional<Tensor> mask, std::optional<Tensor> offsets,
                                   std::optional<Tensor> reward, Tensor coeff, int64_t estimator,
                                   bool nan_missing) {
  const OnDeviceOf device(log_probs);
  const ScalarType dtype = log_probs.scalar_type();
  const int64_t tokens = log_probs.numel();
  Tensor kl = empty_like_sizes(log_probs, log_probs, dtype);
  Tensor penalised = reward.has_value() ? empty_like_sizes(log_probs, log_probs, dtype)
                                        : empty_vector(log_probs, dtype);
  const Scalar weight = scalar_argument("coeff", coeff, log_probs);
  if (tokens == 0) return {kl, penalised};
  const bool broadcast = reward.has_value() && reward->numel() != tokens;
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask),
                              nan_missing};
    const KLReward<T> rewards{data<T>(reward), broadcast ? data<int64_t>(offsets) : nullptr,
                              broadcast ? offsets->numel() - 1 : 0,
                              reward.has_value() ? mutable_data<T>(penalised) : nullptr};
    device.launch(forward_tokens<T>, blocks_for(tokens), kThreads, pairs, tokens, rewards, weight,
                  static_cast<Estimator>(estimator), mutable_data<T>(kl));
  });
  return {kl, penalised};
}

// The arguments of a launch over as many samples from `first` on as it takes.
template <typename T>
SampleList<T> sample_list(const Samples& samples, const std::vector<int64_t>& starts, size_t first,
                          bool nan_missing) {
  SampleList<T> list{};
  const size_t past = std::min<size_t>(first + SampleList<T>::kCapacity, samples.count());
  list.count = static_cast<int64_t>(past - first);
  list.nan_missing = nan_missing;
  std::copy(starts.begin() + first, starts.begin() + past + 1, list.starts);
  for (size_t s = first; s < past; ++s) {
    list.log_probs[s - first] = data<T>(samples.log_probs[s]);
    list.ref_log_probs[s - first] = data<T>(samples.ref_log_probs[s]);
    list.mask[s - first] = samples.mask_of(s);
    list.reward[s - first] = samples.reward_of<T>(s);
    list.one_reward[s - first] = samples.one_reward(s);
  }
  return list;
}

std::tuple<Tensor, Tensor> forward_list(std::vector<Tensor> log_probs,
                                        std::vector<Tensor> ref_log_probs, std::vector<Tensor> mask,
                                        std::vector<Tensor> reward, Tensor coeff, int64_t estimator,
                                        bool nan_missing) {
  const Samples samples{log_probs, ref_log_probs, mask, reward};
  const std::vector<int64_t> starts = checked_starts(samples);
  const OnDeviceOf device(log_probs[0]);
  Tensor kl = samples.empty_packed(starts.back());
  Tensor penalised = samples.empty_packed(reward.empty() ? 0 : starts.back());
  const Scalar weight = scalar_argument("coeff", coeff, log_probs[0]);
  dispatch_floating(log_probs[0], "log_probs", [&]<typename T>() {
    for (size_t first = 0; first < samples.count(); first += SampleList<T>::kCapacity) {
      const SampleList<T> list = sample_list<T>(samples, starts, first, nan_missing);
      if (list.begin() == list.end()) continue;
      const int64_t threads = (list.end() - list.begin() + kTokensOfThread - 1) / kTokensOfThread;
      device.launch(forward_samples<T>, blocks_for(threads), kThreads, list, weight,
                    static_cast<Estimator>(estimator), mutable_data<T>(kl),
                    reward.empty() ? nullptr : mutable_data<T>(penalised));
    }
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
  m.impl("token_kl_list", TORCH_BOX(&forward_list));
  m.impl("token_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
