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
  T* after;  // null for none

  __device__ const T* of(int64_t token) const {
    if (before == nullptr) return nullptr;
    return before + (offsets == nullptr ? token : sequence_of(token, offsets, sequences));
  }
};

// What the forward pass reads of a token, apart from what it writes, so that a thread can read
// several before it writes one.
template <typename T>
struct Token {
  using A = typename Accumulate<T>::type;

  bool dropped;
  A difference;
  T reward;

  // Token i of `pairs`; `reward` points to its reward, or is null for none.
  __device__ static Token read(const TokenPairs<T>& pairs, int64_t i, const T* reward) {
    const bool dropped = pairs.dropped(i);
    return {dropped, dropped ? A(0) : pairs.difference(i), reward == nullptr ? T(0) : *reward};
  }

  // Element n of the results; `after` is null without rewards.
  __device__ void write(A weight, Estimator estimator, int64_t n, T* kl, T* after) const {
    const A value = dropped ? A(0) : kl_of(difference, estimator);
    kl[n] = static_cast<T>(value);
    if (after == nullptr) return;
    after[n] = dropped ? reward : static_cast<T>(static_cast<A>(reward) - weight * value);
  }
};

template <typename T>
__global__ void forward_tokens(TokenPairs<T> pairs, int64_t tokens, KLReward<T> reward,
                               Scalar coeff, Estimator estimator, T* kl) {
  using A = typename Accumulate<T>::type;
  const A weight = static_cast<A>(coeff.get());
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < tokens; n += stride) {
    Token<T>::read(pairs, n, reward.of(n)).write(weight, estimator, n, kl, reward.after);
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
      const A of_kl = grad_kl == nullptr ? A(0) : static_cast<A>(grad_kl[n]);
      const A of_reward = grad_reward == nullptr ? A(0) : weight * static_cast<A>(grad_reward[n]);
      const A up = of_kl - of_reward;
      result = -up * kl_slope_of(pairs.difference(n), estimator);
    }
    grad_log_probs[n] = static_cast<T>(result);
  }
}

}  // namespace fusedrl
