// Divergences of two softmaxes, p of logits / temperature and q of reference logits / temperature:
// KL(p || q) = sum_v p_v (log p_v - log q_v), and the generalised Jensen-Shannon divergence (1 -
// beta) KL(p || m) + beta KL(q || m) from their mixture m = (1 - beta) p + beta q. Also the
// entropies -sum_v p_v log p_v of both.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/softmax.h"

namespace fusedrl {

// A value of each side.
template <typename V>
struct Pair {
  V p, q;
};

// Statistics of a part of two rows x and y, relative to one logit of each:
// dp_v = (x_v - max_p) / temperature, dq_v = (y_v - max_q) / temperature. The maxima are the
// largest logits of the part, or ones that rises_too_far() leaves.
template <typename Acc>
struct PairPart {
  float max_p = -INFINITY;
  float max_q = -INFINITY;
  Acc sum_p = 0;  // sum_v e^{dp_v}
  Acc sum_q = 0;  // sum_v e^{dq_v}
  Acc cross = 0;  // sum_v e^{dp_v} (dp_v - dq_v); a class with e^{dp_v} = 0 adds 0, dq_v = -inf
                  // elsewhere makes it +inf
  Acc dot_p = 0;  // sum_v e^{dp_v} dp_v, where entropies are asked for
  Acc dot_q = 0;  // sum_v e^{dq_v} dq_v, likewise

  // The same part relative to logits no smaller than its own.
  FUSEDRL_HD PairPart relative_to(float new_max_p, float new_max_q, float inv_temperature) const {
    const auto shift_of = [=](float from, float to) {
      return from == to ? Acc(0) : (Acc(from) - Acc(to)) * Acc(inv_temperature);
    };
    const Acc shift_p = shift_of(max_p, new_max_p), shift_q = shift_of(max_q, new_max_q);
    const Acc scale_p = std::exp(shift_p), scale_q = std::exp(shift_q);
    const Acc mass_p = scale_p * sum_p, mass_q = scale_q * sum_q;
    // A part with sum 0 contributes nothing, even if its shift or its cross is infinite.
    const auto where = [](Acc mass, Acc value) { return mass == Acc(0) ? Acc(0) : value; };
    return {new_max_p,
            new_max_q,
            mass_p,
            mass_q,
            where(mass_p, scale_p * (cross + sum_p * (shift_p - shift_q))),
            where(mass_p, scale_p * (dot_p + sum_p * shift_p)),
            where(mass_q, scale_q * (dot_q + sum_q * shift_q))};
  }
};

// The union of two parts.
template <typename Acc>
FUSEDRL_HD PairPart<Acc> merge(PairPart<Acc> x, PairPart<Acc> y, float inv_temperature) {
  const float max_p = x.max_p >= y.max_p ? x.max_p : y.max_p;
  const float max_q = x.max_q >= y.max_q ? x.max_q : y.max_q;
  x = x.relative_to(max_p, max_q, inv_temperature);
  y = y.relative_to(max_p, max_q, inv_temperature);
  return {max_p,
          max_q,
          x.sum_p + y.sum_p,
          x.sum_q + y.sum_q,
          x.cross + y.cross,
          x.dot_p + y.dot_p,
          x.dot_q + y.dot_q};
}

// The weights of p and q in their mixture, 1 - beta and beta. Each is rounded separately, so that a
// small one keeps its digits.
inline Pair<float> shares_of(double beta) {
  return {static_cast<float>(1.0 - beta), static_cast<float>(beta)};
}

// beta = 1 stands for KL(p || q), without a mixture.
inline bool is_mixture(double beta) { return beta != 1.0; }

// The statistics of two rows for the backward pass, six floats: their normalizers, and the mean of
// a score over each distribution; the means add up to the divergence. For KL the score of p is
// log(p_v / q_v), and that of q is 0; with a mixture they are (1 - beta) log(p_v / m_v) and beta
// log(q_v / m_v).
struct PairStatistics {
  Pair<Normalizer> normalizers;
  Pair<float> mean;
};

struct PairResult {
  float divergence;
  Pair<float> entropies;  // undefined unless requested
  PairStatistics statistics;
};

// The destinations of the results of every token.
struct PairOutputs {
  float* divergence;
  Pair<float>* entropies;  // null unless requested
  PairStatistics* statistics;

  FUSEDRL_HD void write(int64_t n, const PairResult& result) const {
    divergence[n] = result.divergence;
    if (entropies != nullptr) entropies[n] = result.entropies;
    statistics[n] = result.statistics;
  }
};

template <typename Acc>
FUSEDRL_HD Pair<Normalizer> normalizers_of(PairPart<Acc> row) {
  return {{row.max_p, float(std::log(row.sum_p))}, {row.max_q, float(std::log(row.sum_q))}};
}

template <typename Acc>
FUSEDRL_HD Pair<float> entropies_of(PairPart<Acc> row) {
  return {float(std::log(row.sum_p) - row.dot_p / row.sum_p),
          float(std::log(row.sum_q) - row.dot_q / row.sum_q)};
}

// Clamps a divergence to its bounds, which only rounding exceeds; NaN stays.
template <typename Acc>
FUSEDRL_HD float within(Acc x, Acc bound) {
  return float(x < Acc(0) ? Acc(0) : x > bound ? bound : x);
}

// KL from the statistics of both whole rows.
template <typename Acc>
FUSEDRL_HD PairResult finish(PairPart<Acc> row) {
  const Acc kl = row.cross / row.sum_p + std::log(row.sum_q / row.sum_p);
  const float divergence = within(kl, Acc(INFINITY));
  return {divergence, entropies_of(row), {normalizers_of(row), {divergence, 0.0f}}};
}

// log of a share that is 1 - other.
template <typename Acc>
FUSEDRL_HD Acc log_of_share(Acc share, Acc other) {
  return share < other ? std::log(share) : std::log1p(-other);
}

// The divergence from the mixture, from the sums of p_v log(p_v / m_v) and q_v log(q_v / m_v).
// Errors of the normalizers cancel between the two sums, so only the total is clamped.
template <typename Acc>
FUSEDRL_HD PairResult finish(Pair<Normalizer> normalizers, Pair<float> entropies, Pair<Acc> sums,
                             Pair<float> shares) {
  const Acc p = shares.p, q = shares.q, of_p = p * sums.p, of_q = q * sums.q;
  const Acc bound = -(p * log_of_share(p, q) + q * log_of_share(q, p));
  return {within(of_p + of_q, bound), entropies, {normalizers, {float(of_p), float(of_q)}}};
}

// log(p / m) and log(q / m). `math` has an inverse, and a log of a ratio that is also given the
// ratio less 1, which is accurate if p and m are nearly equal. For 0, its log may return any finite
// number, and so may this function if p or q is 0.
template <typename V, typename Math>
FUSEDRL_HD Pair<V> log_ratios(V p, V q, Pair<float> shares, Math math) {
  constexpr float kTiny = 1e-37f;  // avoids 0 / 0 if both are 0; negligible in any relevant m
  const V inverse = math.inverse(p * shares.p + (q * shares.q + kTiny)), apart = (p - q) * inverse;
  return {math.log(p * inverse, apart * shares.q), math.log(q * inverse, apart * -shares.p)};
}

// The gradients of the two logits of a class, times the row's upstream gradients.
struct PairGradient {
  PairStatistics row;
  Pair<float> shares;
  Pair<float> entropies;
  float upstream;
  Pair<float> upstream_entropies;
  float inv_temperature;

  template <typename V>
  FUSEDRL_HD Pair<V> log_probs(V logit, V ref_logit) const {
    return {row.normalizers.p.log_p(logit, inv_temperature),
            row.normalizers.q.log_p(ref_logit, inv_temperature)};
  }

  // Of KL(p || q): p_v (log(p_v / q_v) - KL) and q_v - p_v; 0 for a logit of -inf.
  template <typename V>
  FUSEDRL_HD Pair<V> of_kl(V p, V q, Pair<V> log) const {
    const float factor = upstream * inv_temperature;
    const V of_p = p * (log.p - log.q - row.mean.p) * factor, of_q = (q - p) * factor;
    return {p == V{} ? V{} : of_p, log.q == V{} - INFINITY ? V{} : of_q};
  }

  // Of the divergence from the mixture: each probability times its score less the scores' mean.
  template <typename V, typename Math>
  FUSEDRL_HD Pair<V> of_mixture(V p, V q, Math math) const {
    const float factor = upstream * inv_temperature;
    const Pair<V> log = log_ratios(p, q, shares, math);
    return {p * (log.p * shares.p - row.mean.p) * factor,
            q * (log.q * shares.q - row.mean.q) * factor};
  }

  // Of the entropies: -p_v (log p_v + entropy), 0 where p_v is.
  template <typename V>
  FUSEDRL_HD Pair<V> of_entropies(V p, V q, Pair<V> log) const {
    const V of_p = p * (log.p + entropies.p) * (-upstream_entropies.p * inv_temperature);
    const V of_q = q * (log.q + entropies.q) * (-upstream_entropies.q * inv_temperature);
    return {p == V{} ? V{} : of_p, q == V{} ? V{} : of_q};
  }
};

// The inputs of the backward pass for every token.
struct PairUpstream {
  const float* divergence;                // upstream gradient
  const Pair<float>* upstream_entropies;  // null without entropies
  const Pair<float>* entropies;
  const PairStatistics* statistics;
  Pair<float> shares;

  FUSEDRL_HD PairGradient of_token(int64_t n, float inv_temperature) const {
    const bool given = upstream_entropies != nullptr;
    return {statistics[n],
            shares,
            given ? entropies[n] : Pair<float>{},
            divergence[n],
            given ? upstream_entropies[n] : Pair<float>{},
            inv_temperature};
  }
};

}  // namespace fusedrl
