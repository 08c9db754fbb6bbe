// log p(y) = z_y - log sum_v e^{z_v} and H = -sum_v p_v log p_v, with z = x / temperature.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"
#include "common/offsets.h"

namespace fusedrl {

// Softmax statistics of a part of a row, relative to one logit: d_v = (x_v - max) / temperature.
// `max` is the largest logit of the part, or one so near that no e^{d_v} overflows.
template <typename Acc>
struct SoftmaxPart {
  float max = -INFINITY;
  Acc sum = 0;  // sum_v e^{d_v}
  Acc dot = 0;  // sum_v d_v e^{d_v}, for the entropy
};

// The union of two parts. A part of -inf only has sum 0, and contributes nothing.
template <typename Acc>
FUSEDRL_HD SoftmaxPart<Acc> merge(SoftmaxPart<Acc> x, SoftmaxPart<Acc> y, float inv_temperature) {
  const bool ordered = x.max >= y.max;
  const SoftmaxPart<Acc> high = ordered ? x : y, low = ordered ? y : x;
  if (low.sum == Acc(0)) return high;
  if (low.max == high.max) return {high.max, high.sum + low.sum, high.dot + low.dot};
  // No further down than where the scale is 0 in any float: logits may be masked with -3e38.
  const float distance = (low.max - high.max) * inv_temperature;
  const float shift = distance < -200.0f ? -200.0f : distance;
  const Acc scale = std::exp(Acc(shift));
  return {high.max, high.sum + scale * low.sum,
          high.dot + scale * (low.dot + low.sum * Acc(shift))};
}

// log sum_v e^{z_v} = max / temperature + log_sum. Added up, large logits would take log_sum's
// digits.
struct Normalizer {
  float max;
  float log_sum;
};

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
    return (logit - normalizer.max) * inv_temperature - normalizer.log_sum;
  }

  // For v != y. `log_p` must be finite where p is 0.
  template <typename V>
  FUSEDRL_HD V other(V p, V log_p) const {
    return -p * (grad_log_prob + grad_entropy * (log_p + entropy)) * inv_temperature;
  }

  // For v = y: 1 - p_y as -expm1(log p_y), exact where the model is sure.
  FUSEDRL_HD float target(float log_p) const {
    const float p = std::exp(log_p);
    const float of_entropy = p == 0.0f ? 0.0f : p * (log_p + entropy);
    return (-grad_log_prob * std::expm1(log_p) - grad_entropy * of_entropy) * inv_temperature;
  }
};

// Which row of the logits predicts which token; both are numbered through the whole batch.
struct RowMap {
  int64_t tokens;           // in the batch
  int64_t period;           // tokens in a padded row; `tokens` when packed
  int64_t stride_sequence;  // elements between padded rows
  int64_t stride_row;       // elements between logits rows
  const int64_t* offsets;   // boundaries of packed sequences, or null
  int64_t sequences;        // offsets holds one more
  bool shift;               // token n reads row n - 1

  // Whether a token starts its sequence: with shift, no row predicts it.
  FUSEDRL_HD bool starts_sequence(int64_t token) const {
    if (offsets == nullptr) return token % period == 0;
    return offsets[sequence_of(token, offsets, sequences)] == token;
  }

  FUSEDRL_HD bool has_row(int64_t token) const {
    return !shift || (token > 0 && !starts_sequence(token));
  }

  FUSEDRL_HD int64_t row_of(int64_t token) const { return token - (shift ? 1 : 0); }

  FUSEDRL_HD int64_t token_of(int64_t row) const { return row + (shift ? 1 : 0); }

  FUSEDRL_HD int64_t element_of_row(int64_t row) const {
    return row / period * stride_sequence + row % period * stride_row;
  }
};

}  // namespace fusedrl
