// Softmax statistics of a row over one shard of the vocabulary, with the logit of its target: the
// inputs for log-prob and entropy.
#pragma once

#include "token_log_probs/math.h"

namespace fusedrl {

struct VocabPart {
  float max = -INFINITY;     // largest logit, or one that rises_too_far() leaves
  float sum = 0;             // sum_v e^{d_v}, d_v = (x_v - max) / temperature
  float dot = 0;             // sum_v d_v e^{d_v}
  float target = -INFINITY;  // the target's logit, where it is in this part
};

// For a token without a row: gives log-prob and entropy 0 when merged with other shards.
FUSEDRL_HD VocabPart dropped_part(bool first_shard) {
  VocabPart part;
  if (first_shard) part = {0.0f, 1.0f, 0.0f, 0.0f};
  return part;
}

// Gradient parameters for which the gradient of each logit is the factor of its class in the sum of
// weights over all classes except the target: the exponential relative to the logit `max`. With a
// log-prob of 0, the gradient of the target is 0.
FUSEDRL_HD RowGradient exponentials(float max, float inv_temperature) {
  return {
      -1.0f / inv_temperature, 0.0f, 0.0f, {max == -INFINITY ? 0.0f : max, 0.0f}, inv_temperature};
}

FUSEDRL_HD RowResult finish(const VocabPart* parts, int64_t shards, int64_t stride,
                            float inv_temperature) {
  SoftmaxPart<double> all;
  float target = -INFINITY;
  for (int64_t s = 0; s < shards; ++s) {
    const VocabPart& part = parts[s * stride];
    all = merge(all, {part.max, part.sum, part.dot}, inv_temperature);
    if (!(part.target <= target)) target = part.target;
  }
  return finish(all, target, inv_temperature);
}

}  // namespace fusedrl
