// CUDA kernel over samples that lie apart: their addresses travel in the arguments of the launch.
#pragma once

#include "token_kl/kernels.h"

namespace fusedrl {

// The samples of one launch, sample s in the tokens [starts[s], starts[s + 1]) of the results.
// Arguments may take 32764 bytes, which this nearly does. *Not yet verified* on a GPU: whether
// fewer bytes would start sooner.
template <typename T>
struct SampleList {
  static constexpr int kCapacity = 768;

  int64_t count;
  int64_t starts[kCapacity + 1];
  const T* log_probs[kCapacity];
  const T* ref_log_probs[kCapacity];
  const bool* mask[kCapacity];  // null keeps all
  const T* reward[kCapacity];   // null for none
  bool one_reward[kCapacity];   // one value for all tokens of the sample
  bool nan_missing;

  FUSEDRL_HD int64_t begin() const { return starts[0]; }
  FUSEDRL_HD int64_t end() const { return starts[count]; }

  __device__ int64_t sample_of(int64_t n) const { return sequence_of(n, starts, count); }

  // Token n, which lies in one of the samples from `first` to `last`.
  __device__ Token<T> read(int64_t n, int64_t first, int64_t last) const {
    const int64_t s = first + sequence_of(n, starts + first, last - first + 1);
    const int64_t i = n - starts[s];
    const T* before = reward[s];
    if (before != nullptr && !one_reward[s]) before += i;
    return Token<T>::read({log_probs[s], ref_log_probs[s], mask[s], nan_missing}, i, before);
  }
};

constexpr int64_t kMaxArgumentBytes = 32764;
static_assert(sizeof(SampleList<double>) + 64 <= kMaxArgumentBytes);

constexpr int kTokensOfThread = 4;  // reads under way at a time

// A block takes spans of blockDim.x * kTokensOfThread tokens. All of its threads find the span's
// first and last sample, which as a rule are one, and each looks its tokens up between them.
template <typename T>
__global__ void forward_samples(const __grid_constant__ SampleList<T> list, Scalar coeff,
                                Estimator estimator, T* kl, T* penalised) {
  using A = typename Accumulate<T>::type;
  const A weight = static_cast<A>(coeff.get());
  const int64_t end = list.end(), span = int64_t(blockDim.x) * kTokensOfThread;
  for (int64_t begin = list.begin() + blockIdx.x * span; begin < end; begin += gridDim.x * span) {
    const int64_t past = begin + span < end ? begin + span : end;
    const int64_t first = list.sample_of(begin), last = list.sample_of(past - 1);
    Token<T> tokens[kTokensOfThread];
#pragma unroll
    for (int u = 0; u < kTokensOfThread; ++u) {
      const int64_t n = begin + u * blockDim.x + threadIdx.x;
      if (n < past) tokens[u] = list.read(n, first, last);
    }
#pragma unroll
    for (int u = 0; u < kTokensOfThread; ++u) {
      const int64_t n = begin + u * blockDim.x + threadIdx.x;
      if (n < past) tokens[u].write(weight, estimator, n, kl, penalised);
    }
  }
}

}  // namespace fusedrl
