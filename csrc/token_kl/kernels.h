// CUDA kernels: one elementwise pass; a [B] reward is broadcast by looking each token's sequence
// up.
#pragma once

#include "common/device.h"
#include "common/offsets.h"
#include "token_kl/math.h"

namespace fusedrl {

template <typename T>
struct KLReward {
  const T* before;         // null for none
  const int64_t* offsets;  // null where `before` has one value a token
  int64_t sequences;
  T* after;

  __device__ T of(int64_t token) const {
    return before[offsets == nullptr ? token : sequence_of(token, offsets, sequences)];
  }
};

template <typename T>
__global__ void forward_tokens(TokenPairs<T> pairs, int64_t tokens, KLReward<T> reward,
                               Scalar coeff, Estimator estimator, T* kl) {
  using A = typename Accumulate<T>::type;
  const A weight = static_cast<A>(coeff.get());
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < tokens; n += stride) {
    const bool dropped = pairs.dropped(n);
    const A value = dropped ? A(0) : kl_of(pairs.difference(n), estimator);
    kl[n] = static_cast<T>(value);
    if (reward.before == nullptr) continue;
    const T before = reward.of(n);
    reward.after[n] = dropped ? before : static_cast<T>(static_cast<A>(before) - weight * value);
  }
}

template <typename T>
__global__ void backward_tokens(TokenPairs<T> pairs, int64_t tokens, const T* grad_kl,
                                const T* grad_reward, Scalar coeff, Estimator estimator,
                                T* grad_log_probs) {
  using A = typename Accumulate<T>::type;
  const A weight = static_cast<A>(coeff.get());
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < tokens; n += stride) {
    A result = 0;
    if (!pairs.dropped(n)) {
      const A of_reward = grad_reward == nullptr ? A(0) : weight * static_cast<A>(grad_reward[n]);
      const A up = static_cast<A>(grad_kl[n]) - of_reward;
      result = -up * kl_slope_of(pairs.difference(n), estimator);
    }
    grad_log_probs[n] = static_cast<T>(result);
  }
}

}  // namespace fusedrl
