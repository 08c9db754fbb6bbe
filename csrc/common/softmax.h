// Softmax statistics that can be merged over chunks of a row, threads, or vocabulary shards.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace fusedrl {

// Softmax statistics of a part of a row, relative to one logit: d_v = (x_v - max) / temperature.
// `max` is the largest logit of the part, or one that rises_too_far() leaves.
template <typename Acc>
struct SoftmaxPart {
  float max = -INFINITY;
  Acc sum = 0;  // sum_v e^{d_v}
  Acc dot = 0;  // sum_v d_v e^{d_v}, for the entropy
};

// The merged statistics of two parts. A part of only -inf has sum 0 and contributes nothing.
template <typename Acc>
FUSEDRL_HD SoftmaxPart<Acc> merge(SoftmaxPart<Acc> x, SoftmaxPart<Acc> y, float inv_temperature) {
  const bool ordered = x.max >= y.max;
  const SoftmaxPart<Acc> high = ordered ? x : y, low = ordered ? y : x;
  if (low.sum == Acc(0)) return high;
  if (low.max == high.max) return {high.max, high.sum + low.sum, high.dot + low.dot};
  // Bounded where the scale is 0 in any float type, as logits may be masked with -3e38.
  const float distance = (low.max - high.max) * inv_temperature;
  const float shift = distance < -200.0f ? -200.0f : distance;
  const Acc scale = std::exp(Acc(shift));
  return {high.max, high.sum + scale * low.sum,
          high.dot + scale * (low.dot + low.sum * Acc(shift))};
}

// Whether the largest logit, 2^rise times as likely as the one that `sum` is relative to, has to
// replace it. Log-probs and entropies lose digits to a large distance, so it has to be small; it
// has to be 0 if the largest logit has most of the probability, where results are close to 0.
FUSEDRL_HD bool rises_too_far(float rise, double sum) {
  return rise > 4 || (rise > 0 && 8 * std::exp2(rise) > sum);
}

// log sum_v e^{z_v} = max / temperature + log_sum. Kept separate, as log_sum would lose its digits
// in a sum with large logits.
struct Normalizer {
  float max;
  float log_sum;

  template <typename V>
  FUSEDRL_HD V log_p(V logit, float inv_temperature) const {
    return (logit - max) * inv_temperature - log_sum;
  }
};

}  // namespace fusedrl
