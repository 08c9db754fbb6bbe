// CPU ops: one elementwise pass, in pieces that stay in L1, shared out among torch's threads.
#include <algorithm>
#include <exception>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/cpu_ops.h"
#include "token_kl/cpu_rows.h"
#include "token_kl/sample_memory.h"
#include "token_kl/samples.h"

namespace fusedrl {
namespace {

// How many tokens a thread takes at least. Columns are shared out as finely as torch's elementwise
// ops share them, of which a program runs several around this one: its threads are awake. A list of
// samples comes alone, and waking a thread takes about 50 us: its grain is about 100 us of work.
constexpr int64_t kColumnGrain = 32768, kSampleGrain = 262144;

// Calls f(begin, end) for ranges of all tokens, on torch's threads where there are enough of them.
template <typename F>
void share_out(int64_t tokens, int64_t grain, const F& f) {
  if (tokens <= grain) return f(0, tokens);
  torch::stable::parallel_for(0, tokens, grain, f);
}

// Calls f(begin, count) for pieces of columns.
template <typename F>
void for_each_piece(int64_t tokens, const F& f) {
  share_out(tokens, kColumnGrain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kTokenPiece) f(begin, std::min(kTokenPiece, end - begin));
  });
}

// The rewards of a piece's tokens. One value a sequence is spread over its tokens.
template <typename T>
void spread_rewards(const T* reward, const int64_t* bounds, int64_t sequences, int64_t begin,
                    int64_t count, T* out) {
  int64_t sequence = std::upper_bound(bounds, bounds + sequences + 1, begin) - bounds - 1;
  for (int64_t i = 0; i < count; ++sequence) {
    const int64_t end = std::min(bounds[sequence + 1] - begin, count);
    std::fill(out + i, out + end, reward[sequence]);
    i = end;
  }
}

// A piece of the pairs, from a token on.
template <typename T>
TokenPairs<T> from(const TokenPairs<T>& pairs, int64_t begin) {
  return {pairs.log_probs + begin, pairs.ref_log_probs + begin,
          pairs.mask == nullptr ? nullptr : pairs.mask + begin, pairs.nan_missing};
}

template <typename T>
T* from(T* column, int64_t begin) {
  return column == nullptr ? nullptr : column + begin;
}

std::tuple<Tensor, Tensor> forward(Tensor log_probs, Tensor ref_log_probs,
                                   std::optional<Tensor> mask, std::optional<Tensor> offsets,
                                   std::optional<Tensor> reward, Tensor coeff, int64_t estimator,
                                   bool nan_missing) {
  const int64_t tokens = log_probs.numel();
  check_offsets(offsets, tokens);
  Tensor kl = empty_like_sizes(log_probs, log_probs, log_probs.scalar_type());
  Tensor penalised = reward.has_value()
                         ? empty_like_sizes(log_probs, log_probs, log_probs.scalar_type())
                         : empty_vector(log_probs, log_probs.scalar_type());
  const bool broadcast = reward.has_value() && reward->numel() != tokens;
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    using A = typename Accumulate<T>::type;
    const A weight = static_cast<A>(*data<double>(coeff));
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask),
                              nan_missing};
    const T* before = data<T>(reward);
    T *out = mutable_data<T>(kl),
      *after = reward.has_value() ? mutable_data<T>(penalised) : nullptr;
    const auto run = token_kernels<T>(cpu_level(), static_cast<Estimator>(estimator)).forward;
    for_each_piece(tokens, [=, &offsets](int64_t begin, int64_t count) {
      T spread[kTokenPiece];
      PieceRewards<T> rewards{from(before, begin), from(after, begin)};
      if (broadcast) {
        spread_rewards(before, data<int64_t>(offsets), offsets->numel() - 1, begin, count, spread);
        rewards.before = spread;
      }
      run(from(pairs, begin), count, weight, rewards, out + begin);
    });
  });
  return {kl, penalised};
}

// Packed results of samples.
template <typename T>
void forward_samples(const SampleMemory* samples, int64_t count, int64_t grain, double coeff,
                     Estimator estimator, bool nan_missing, T* kl, T* penalised) {
  using A = typename Accumulate<T>::type;
  std::vector<int64_t> starts{0};
  starts.reserve(count + 1);
  for (int64_t s = 0; s < count; ++s) starts.push_back(starts.back() + samples[s].tokens);
  const A weight = static_cast<A>(coeff);
  const auto run = token_kernels<T>(cpu_level(), estimator).forward;
  const auto piece = [&](const SampleMemory& sample, int64_t begin, int64_t tokens, T* out,
                         T* after) {
    const TokenPairs<T> pairs{static_cast<const T*>(sample.log_probs),
                              static_cast<const T*>(sample.ref_log_probs),
                              static_cast<const bool*>(sample.mask), nan_missing};
    const T* reward = static_cast<const T*>(sample.reward);
    T spread[kTokenPiece];
    PieceRewards<T> rewards{from(reward, begin), after};
    if (reward != nullptr && sample.rewards != sample.tokens) {
      std::fill(spread, spread + tokens, *reward);
      rewards.before = spread;
    }
    run(from(pairs, begin), tokens, weight, rewards, out);
  };
  share_out(starts.back(), grain, [&](int64_t begin, int64_t end) {
    int64_t s = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    while (begin < end) {
      while (begin == starts[s + 1]) ++s;
      const int64_t tokens = std::min({kTokenPiece, end - begin, starts[s + 1] - begin});
      piece(samples[s], begin - starts[s], tokens, kl + begin, from(penalised, begin));
      begin += tokens;
    }
  });
}

std::tuple<Tensor, Tensor> forward_list(std::vector<Tensor> log_probs,
                                        std::vector<Tensor> ref_log_probs, std::vector<Tensor> mask,
                                        std::vector<Tensor> reward, Tensor coeff, int64_t estimator,
                                        bool nan_missing) {
  const Samples samples{log_probs, ref_log_probs, mask, reward};
  const int64_t tokens = checked_starts(samples).back();
  Tensor kl = samples.empty_packed(tokens);
  Tensor penalised = samples.empty_packed(reward.empty() ? 0 : tokens);
  std::vector<SampleMemory> memory;
  for (size_t s = 0; s < samples.count(); ++s) {
    memory.push_back({log_probs[s].const_data_ptr(), ref_log_probs[s].const_data_ptr(),
                      samples.mask_of(s), reward.empty() ? nullptr : reward[s].const_data_ptr(),
                      log_probs[s].numel(), reward.empty() ? 0 : reward[s].numel()});
  }
  dispatch_floating(log_probs[0], "log_probs", [&]<typename T>() {
    forward_samples(memory.data(), static_cast<int64_t>(memory.size()), kSampleGrain,
                    *data<double>(coeff), static_cast<Estimator>(estimator), nan_missing,
                    mutable_data<T>(kl), reward.empty() ? nullptr : mutable_data<T>(penalised));
  });
  return {kl, penalised};
}

template <typename T>
void backward_tokens(const TokenPairs<T>& pairs, int64_t tokens, double coeff, Estimator estimator,
                     const PieceGradients<T>& upstream, T* grad_log_probs) {
  using A = typename Accumulate<T>::type;
  const A weight = static_cast<A>(coeff);
  const auto run = token_kernels<T>(cpu_level(), estimator).backward;
  for_each_piece(tokens, [=](int64_t begin, int64_t count) {
    run(from(pairs, begin), count, weight, {from(upstream.kl, begin), from(upstream.reward, begin)},
        grad_log_probs + begin);
  });
}

Tensor backward(std::optional<Tensor> grad_kl, std::optional<Tensor> grad_reward, Tensor log_probs,
                Tensor ref_log_probs, std::optional<Tensor> mask, Tensor coeff, int64_t estimator,
                bool nan_missing) {
  check_upstream(grad_kl.has_value(), grad_reward.has_value());
  Tensor grad_log_probs = empty_like_sizes(log_probs, log_probs, log_probs.scalar_type());
  dispatch_floating(log_probs, "log_probs", [&]<typename T>() {
    const TokenPairs<T> pairs{data<T>(log_probs), data<T>(ref_log_probs), data<bool>(mask),
                              nan_missing};
    backward_tokens<T>(pairs, log_probs.numel(), *data<double>(coeff),
                       static_cast<Estimator>(estimator), {data<T>(grad_kl), data<T>(grad_reward)},
                       mutable_data<T>(grad_log_probs));
  });
  return grad_log_probs;
}

// Whether a CPU level can be chosen: if not, the ops raise the error.
bool has_cpu_level() {
  try {
    cpu_level();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Calls run.operator()<T>() with the element type of samples.
template <typename F>
void dispatch_samples(int64_t dtype, const F& run) {
  switch (static_cast<SampleDtype>(dtype)) {
    case SampleDtype::float32:
      return run.template operator()<float>();
    case SampleDtype::bfloat16:
      return run.template operator()<BFloat16>();
    case SampleDtype::float16:
      return run.template operator()<Half>();
    case SampleDtype::float64:
      return run.template operator()<double>();
  }
}

bool forward_memory(const SampleMemory* samples, int64_t count, int64_t grain, int64_t dtype,
                    double coeff, int64_t estimator, bool nan_missing, void* kl, void* penalised) {
  if (!has_cpu_level()) return false;
  dispatch_samples(dtype, [&]<typename T>() {
    forward_samples(samples, count, grain, coeff, static_cast<Estimator>(estimator), nan_missing,
                    static_cast<T*>(kl), static_cast<T*>(penalised));
  });
  return true;
}

}  // namespace

// The ops without a handle of torch for each tensor: hundreds of them take longer than their
// tokens. All are called with memory that has been checked, and with memory for the results.
extern "C" __attribute__((visibility("default"))) bool fusedrl_token_kl_samples(
    const SampleMemory* samples, int64_t count, int64_t dtype, double coeff, int64_t estimator,
    bool nan_missing, void* kl, void* penalised) {
  return forward_memory(samples, count, kSampleGrain, dtype, coeff, estimator, nan_missing, kl,
                        penalised);
}

// The samples are the sequences of columns, or columns as one.
extern "C" __attribute__((visibility("default"))) bool fusedrl_token_kl_columns(
    const SampleMemory* samples, int64_t count, int64_t dtype, double coeff, int64_t estimator,
    bool nan_missing, void* kl, void* penalised) {
  return forward_memory(samples, count, kColumnGrain, dtype, coeff, estimator, nan_missing, kl,
                        penalised);
}

extern "C" __attribute__((visibility("default"))) bool fusedrl_token_kl_gradient(
    const SampleMemory* sample, TokenKLUpstream upstream, int64_t dtype, double coeff,
    int64_t estimator, bool nan_missing, void* grad_log_probs) {
  if (!has_cpu_level()) return false;
  dispatch_samples(dtype, [&]<typename T>() {
    const TokenPairs<T> pairs{static_cast<const T*>(sample->log_probs),
                              static_cast<const T*>(sample->ref_log_probs),
                              static_cast<const bool*>(sample->mask), nan_missing};
    backward_tokens<T>(pairs, sample->tokens, coeff, static_cast<Estimator>(estimator),
                       {static_cast<const T*>(upstream.kl), static_cast<const T*>(upstream.reward)},
                       static_cast<T*>(grad_log_probs));
  });
  return true;
}

static_assert(std::is_same_v<decltype(fusedrl_token_kl_columns), TokenKLKernel>);
static_assert(std::is_same_v<decltype(fusedrl_token_kl_gradient), TokenKLGradientKernel>);

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("token_kl", TORCH_BOX(&forward));
  m.impl("token_kl_list", TORCH_BOX(&forward_list));
  m.impl("token_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
