// log p(y) = z_y - log sum_v e^{z_v} and H = -sum_v p_v log p_v, with z = x / temperature.
#pragma once

#include <cmath>

#include "common/softmax.h"

namespace fusedrl {

struct RowResult {
  float log_prob;
  float entropy;
  Normalizer normalizer;
};

template <typename Acc>
FUSEDRL_HD RowResult finish(SoftmaxPart<Acc> row, float target_logit, float inv_temperature) {
  const Acc log_sum = std::log(row.sum);
  return {float(Acc(target_logit - row.max) * Acc(inv_temperature) - log_sum),
          float(log_sum - row.dot / row.sum),
          {row.max, float(log_sum)}};
}

// d log p(y) / dz_v = [v = y] - p_v, dH / dz_v = -p_v (log p_v + H), times upstream gradients.
struct RowGradient {
  float grad_log_prob;
  float grad_entropy;
  float entropy;
  Normalizer normalizer;
  float inv_temperature;

  template <typename V>
  FUSEDRL_HD V log_p(V logit) const {
    return normalizer.log_p(logit, inv_temperature);
  }

  // For v != y. `log_p` must be finite where p is 0.
  template <typename V>
  FUSEDRL_HD V other(V p, V log_p) const {
    return -p * (grad_log_prob + grad_entropy * (log_p + entropy)) * inv_temperature;
  }

  // For v = y: 1 - p_y as -expm1(log p_y), accurate if p_y is close to 1.
  FUSEDRL_HD float target(float log_p) const {
    const float p = std::exp(log_p);
    const float of_entropy = p == 0.0f ? 0.0f : p * (log_p + entropy);
    return (-grad_log_prob * std::expm1(log_p) - grad_entropy * of_entropy) * inv_temperature;
  }
};

}  // namespace fusedrl
