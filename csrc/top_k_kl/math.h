// log p_j = z_j - log sum_v e^{z_v} of some classes of a row, its ids, and the log-prob of the
// rest, all other classes together. The rest is summed by itself: 1 less the ids' probabilities
// would have no digits left where these have nearly all.
#pragma once

#include "token_log_probs/math.h"

namespace fusedrl {

// `row` holds the logits of the ids, and gets their log-probs, followed by that of the rest. An id
// below 0 is no class, and gets 0. A row of -inf has no log-probs: all are NaN. The normalizer of
// the rest makes its logits shares of it.
template <typename Acc>
FUSEDRL_HD Normalizer finish_top_k(SoftmaxPart<Acc> rest, const int64_t* ids, int64_t k,
                                   float inv_temperature, float* row) {
  float top = rest.max;
  for (int64_t j = 0; j < k; ++j) {
    if (ids[j] >= 0 && row[j] > top) top = row[j];
  }
  const auto distance = [=](float logit) { return Acc(logit - top) * Acc(inv_temperature); };
  const Acc of_rest = rest.sum == Acc(0) ? Acc(0) : rest.sum * std::exp(distance(rest.max));
  Acc sum = of_rest;
  for (int64_t j = 0; j < k; ++j) {
    if (ids[j] >= 0 && row[j] != -INFINITY) sum += std::exp(distance(row[j]));
  }
  const Acc log_sum = std::log(sum);
  for (int64_t j = 0; j < k; ++j) row[j] = ids[j] < 0 ? 0.0f : float(distance(row[j]) - log_sum);
  if (rest.sum == Acc(0)) {
    row[k] = sum == Acc(0) ? NAN : -INFINITY;
    return {0.0f, 0.0f};
  }
  const Acc log_rest = std::log(rest.sum);
  row[k] = float(distance(rest.max) + log_rest - log_sum);
  return {rest.max, float(log_rest)};
}

// d log p_j / dz_v = [v = j] - p_v, and of the rest's log-prob r [v in rest] e^{-r} p_v - p_v,
// times upstream gradients.
struct TopKGradient {
  float total;  // the sum of a row's upstream gradients
  float rest;   // what the rest's share e^{-r} p_v is multiplied by

  FUSEDRL_HD TopKGradient(const float* upstream, const float* log_probs, const int64_t* ids,
                          int64_t k)
      : total(upstream[k]) {
    for (int64_t j = 0; j < k; ++j) {
      if (ids[j] >= 0) total += upstream[j];
    }
    const float log_rest = log_probs[k];
    rest = log_rest == -INFINITY ? 0.0f : upstream[k] - std::exp(log_rest) * total;
  }

  // Of the logits that belong to no id.
  FUSEDRL_HD RowGradient of_rest(Normalizer normalizer, float inv_temperature) const {
    return {-rest, 0.0f, 0.0f, normalizer, inv_temperature};
  }

  // Of the logit of an id; 0 where it is -inf.
  FUSEDRL_HD float of_id(float upstream, float log_prob, float inv_temperature) const {
    if (log_prob == -INFINITY) return 0.0f;
    return (upstream - std::exp(log_prob) * total) * inv_temperature;
  }
};

}  // namespace fusedrl
