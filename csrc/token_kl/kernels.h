// CUDA kernels: one elementwise pass.
#pragma once

#include "common/device.h"
#include "token_kl/math.h"

namespace fusedrl {

// Both log-probs of every token. A dropped token (masked, or NaN treated as missing) has KL 0 and
// gradient 0 and keeps its reward; the values under a mask are not read.
template <typename T>
struct TokenPairs {
  using A = typename Accumulate<T>::type;

  const T* log_probs;
  const T* ref_log_probs;
  const bool* mask;  // null keeps all
  bool nan_missing;

  __device__ bool dropped(int64_t n) const {
    if (mask != nullptr && !mask[n]) return true;
    if (!nan_missing) return false;
    const A p = static_cast<A>(log_probs[n]), q = static_cast<A>(ref_log_probs[n]);
    return p != p || q != q;
  }

  __device__ A difference(int64_t n) const {
    return static_cast<A>(ref_log_probs[n]) - static_cast<A>(log_probs[n]);
  }
};

// `reward` and `penalised` are null where there are no rewards.
template <typename T>
__global__ void forward_tokens(TokenPairs<T> pairs, int64_t tokens, const T* reward, Scalar coeff,
                               Estimator estimator, T* kl, T* penalised) {
  using A = typename Accumulate<T>::type;
  const A weight = static_cast<A>(coeff.get());
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < tokens; n += stride) {
    const bool dropped = pairs.dropped(n);
    const A value = dropped ? A(0) : kl_of(pairs.difference(n), estimator);
    kl[n] = static_cast<T>(value);
    if (reward == nullptr) continue;
    penalised[n] = dropped ? reward[n] : static_cast<T>(static_cast<A>(reward[n]) - weight * value);
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
