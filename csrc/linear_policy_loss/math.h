// What a token adds to the loss of a policy, and the derivative of that by its log-prob.
#pragma once

#include <cmath>
#include <cstdint>

#include "token_kl/math.h"

namespace fusedrl {

enum class Surrogate : int64_t { clip, clipped_ratio, cispo, reinforce };  // as in SURROGATES

struct PolicyLossOptions {
  Surrogate surrogate;
  float low, high;  // bounds of the ratio e^{log_prob - old}
  float most;       // dual clip: no larger ratio counts, whatever the sign of the advantage
  Estimator estimator;
};

struct Term {
  float value = 0;
  float slope = 0;
};

FUSEDRL_HD Term surrogate_term(float log_prob, float old, float advantage,
                               const PolicyLossOptions& options) {
  if (options.surrogate == Surrogate::reinforce) return {-advantage * log_prob, -advantage};
  const float ratio = std::exp(log_prob - old);
  const float raised = ratio < options.low ? options.low : ratio;
  const float bounded = raised > options.high ? options.high : raised;
  const float held = bounded * advantage;
  if (options.surrogate == Surrogate::cispo) return {-held * log_prob, -held};
  const bool inside = !(ratio < options.low) && !(ratio > options.high);  // true of NaN
  if (options.surrogate == Surrogate::clipped_ratio) {
    return {-held, inside ? -ratio * advantage : 0.0f};
  }
  const bool too_large = ratio > options.most;
  const float free = (too_large ? options.most : ratio) * advantage;
  if (held < free) return {-held, 0.0f};
  return {-free, too_large ? 0.0f : -ratio * advantage};
}

FUSEDRL_HD Term kl_term(float log_prob, float ref_log_prob, Estimator estimator) {
  const float d = ref_log_prob - log_prob;
  return {kl_of(d, estimator), -kl_slope_of(d, estimator)};
}

// How much of each term of a token the loss takes.
struct TermWeights {
  float objective, kl, old_kl, entropy;
};

struct PolicyRow {
  float log_prob = 0;
  float entropy = 0;
  float objective = 0;
  float kl = 0;      // to the reference policy
  float old_kl = 0;  // to the policy that generated
  float objective_slope = 0;
  float kl_slope = 0;
  float old_kl_slope = 0;
};

// The tokens of a batch beside their hidden states.
struct PolicyTokens {
  const float* advantages;
  const float* old_log_probs;  // null: those of the policy itself, so that every ratio is 1
  const float* ref_log_probs;  // null: no KL to a reference
  const TermWeights* weights;
  PolicyLossOptions options;

  FUSEDRL_HD PolicyRow row(int64_t n, float log_prob, float entropy) const {
    const float old = old_log_probs == nullptr ? log_prob : old_log_probs[n];
    const Term objective = surrogate_term(log_prob, old, advantages[n], options);
    const Term old_kl = kl_term(log_prob, old, options.estimator);
    Term kl;
    if (ref_log_probs != nullptr) kl = kl_term(log_prob, ref_log_probs[n], options.estimator);
    return {log_prob,     entropy,         objective.value, kl.value,
            old_kl.value, objective.slope, kl.slope,        old_kl.slope};
  }

  // The derivative of the loss by the token's log-prob. What weighs nothing may be NaN.
  FUSEDRL_HD float slope(int64_t n, const PolicyRow& row) const {
    const TermWeights& w = weights[n];
    return weighted(w.objective, row.objective_slope) + weighted(w.kl, row.kl_slope) +
           weighted(w.old_kl, row.old_kl_slope);
  }

 private:
  FUSEDRL_HD static float weighted(float weight, float slope) {
    return weight == 0.0f ? 0.0f : weight * slope;
  }
};

}  // namespace fusedrl
