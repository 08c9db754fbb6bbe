// CUDA kernel: a block a sequence. Its sums are split among the threads by the sequence's length
// alone; weights of a whole sequence are written once its sums are known.
#pragma once

#include "common/device.h"
#include "importance_weights/math.h"
#include "importance_weights/sequences.h"

namespace fusedrl {

template <typename T>
struct TokenRatios {
  const T* log_probs;
  const T* rollout_log_probs;
  const bool* mask;  // null keeps all

  __device__ bool keeps(int64_t n) const { return mask == nullptr || mask[n]; }

  __device__ float log_ratio(int64_t n) const {
    return static_cast<float>(log_probs[n]) - static_cast<float>(rollout_log_probs[n]);
  }
};

// The part of a mismatch that is one kept token's. Writes its weight where it has one of its own.
template <typename T>
__device__ Mismatch weigh_token(const TokenRatios<T>& ratios, int64_t n, const Weighting& weighting,
                                float* weights) {
  const float d = ratios.log_ratio(n);
  const bool of_token = weighting.level == WeightLevel::token;
  const float ratio = ratio_of(d);
  const RatioBounds& bounds = weighting.bounds;
  if (weighting.nan_missing && d != d) {
    if (of_token) weights[n] = bounds.weight_of(1);
    return {};
  }
  const float weight = bounds.weight_of(ratio);
  if (of_token) weights[n] = weight;
  return {0.0 - d, k3_of(d), weight, double(weight) * weight, 1, bounds.outside(ratio), ratio};
}

template <typename T>
__global__ void weigh_sequences(TokenRatios<T> ratios, SequenceBounds bounds, WeightLevel level,
                                bool nan_missing, Scalar low, Scalar high, bool masks,
                                float* weights, MismatchRows rows) {
  const Weighting weighting{
      level, nan_missing, {static_cast<float>(low.get()), static_cast<float>(high.get()), masks}};
  for (int64_t b = blockIdx.x; b < bounds.sequences; b += gridDim.x) {
    FUSEDRL_DEVICE_CHECK(bounds.in_order(b),
                         "offsets: expected non-decreasing values from 0 to the tokens; pass 0 and "
                         "the running sum of the sequence lengths");
    const int64_t begin = bounds.begin(b), end = bounds.end(b);
    Mismatch part;
    for (int64_t n = begin + threadIdx.x; n < end; n += blockDim.x) {
      if (ratios.keeps(n)) {
        part = merge(part, weigh_token(ratios, n, weighting, weights));
      } else {
        weights[n] = 0;
      }
    }
    const auto merged = [](const Mismatch& x, const Mismatch& y) { return merge(x, y); };
    Mismatch sums = from_first_thread(reduce_block(part, merged));
    if (level != WeightLevel::token) {
      const float ratio = ratio_of_sequence(-sums.k1, sums.tokens, level);
      const float weight = weighting.bounds.weight_of(ratio);
      sums.give_all(ratio, weighting.bounds);
      for (int64_t n = begin + threadIdx.x; n < end; n += blockDim.x) {
        if (ratios.keeps(n)) weights[n] = weight;
      }
    }
    if (threadIdx.x == 0) rows.write(b, sums);
  }
}

}  // namespace fusedrl
