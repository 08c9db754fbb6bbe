// Importance weights between the policy that trains and the one that generated, and how far apart
// the two are, with the log ratio d = log_prob - rollout_log_prob of a token.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/exp.h"
#include "common/host_device.h"
#include "token_kl/math.h"

namespace fusedrl {

// What has one ratio, in the order of LEVELS in Python.
enum class WeightLevel : int64_t { token, sequence, geometric };

// Ratios end at e^20, so that neither a weight nor its square overflows where there is no bound.
constexpr float kMaxRatio = 485165195.0f;

// The ratio of two probabilities, from its logarithm; NaN stays NaN.
FUSEDRL_HD float ratio_of(float log_ratio) {
  const float ratio = exp_of(log_ratio);
  return ratio > kMaxRatio ? kMaxRatio : ratio;
}

// Of a sequence whose known tokens' log ratios add up to `sum`: their product is the sequence's
// ratio, or their geometric mean.
FUSEDRL_HD float ratio_of_sequence(double sum, int64_t tokens, WeightLevel level) {
  const double of_token = sum / static_cast<double>(tokens > 0 ? tokens : 1);
  return ratio_of(static_cast<float>(level == WeightLevel::geometric ? of_token : sum));
}

// The ratios that are kept; `low` is 0 and `high` infinite where there is no bound.
struct RatioBounds {
  float low, high;
  bool masks;  // what lies outside becomes 0, or else the bound

  // False of NaN, which has its way into the weight.
  FUSEDRL_HD bool outside(float ratio) const { return (ratio < low) | (ratio > high); }

  FUSEDRL_HD float weight_of(float ratio) const {
    const float below = masks ? 0 : low, above = masks ? 0 : high;
    return ratio < low ? below : ratio > high ? above : ratio;
  }
};

// How the tokens of a sequence are weighted.
struct Weighting {
  WeightLevel level;
  bool nan_missing;
  RatioBounds bounds;
};

// What the known tokens of a sequence add up to. KL(rollout || policy) is estimated by k1 = -d and
// k3 = e^d - 1 - d, as the rollout policy drew the tokens.
struct Mismatch {
  double k1 = 0, k3 = 0;
  double weights = 0, squares = 0;
  int64_t tokens = 0, clipped = 0;
  float largest = 0;  // of the ratios, before the bounds

  // What follows where all tokens have the same ratio.
  FUSEDRL_HD void give_all(float ratio, const RatioBounds& bounds) {
    const double weight = bounds.weight_of(ratio);
    weights = tokens == 0 ? 0 : static_cast<double>(tokens) * weight;
    squares = tokens == 0 ? 0 : weights * weight;
    clipped = bounds.outside(ratio) ? tokens : 0;
    largest = tokens == 0 ? 0 : ratio;
  }

  // NaN where a ratio is: it is larger than none.
  FUSEDRL_HD float largest_ratio() const {
    return weights != weights ? static_cast<float>(weights) : largest;
  }
};

// Two parts of a sequence.
FUSEDRL_HD Mismatch merge(const Mismatch& x, const Mismatch& y) {
  return {x.k1 + y.k1,
          x.k3 + y.k3,
          x.weights + y.weights,
          x.squares + y.squares,
          x.tokens + y.tokens,
          x.clipped + y.clipped,
          x.largest > y.largest ? x.largest : y.largest};
}

}  // namespace fusedrl
