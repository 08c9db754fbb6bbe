// KL(p || q) = sum_v p_v (log p_v - log q_v) and the Jensen-Shannon divergence of two softmaxes,
// p of logits / temperature and q of reference logits / temperature.
#pragma once

#include <cmath>

#include "common/softmax.h"

namespace fusedrl {

// A value of each side.
template <typename V>
struct Pair {
  V p, q;
};

// Statistics of a part of two rows x and y, relative to one logit of each:
// dp_v = (x_v - max_p) / temperature, dq_v = (y_v - max_q) / temperature. The maxima are the
// largest logits of the part, or so near them that no exponential overflows.
template <typename Acc>
struct PairPart {
  float max_p = -INFINITY;
  float max_q = -INFINITY;
  Acc sum_p = 0;  // sum_v e^{dp_v}
  Acc sum_q = 0;  // sum_v e^{dq_v}
  Acc cross = 0;  // sum_v e^{dp_v} (dp_v - dq_v); a class with e^{dp_v} = 0 adds 0, dq_v = -inf
                  // elsewhere makes it +inf

  // The same part relative to logits no smaller than its own.
  FUSEDRL_HD PairPart relative_to(float new_max_p, float new_max_q, float inv_temperature) const {
    const auto shift_of = [=](float from, float to) {
      return from == to ? Acc(0) : (Acc(from) - Acc(to)) * Acc(inv_temperature);
    };
    const Acc shift_p = shift_of(max_p, new_max_p), shift_q = shift_of(max_q, new_max_q);
    const Acc scale = std::exp(shift_p), mass = scale * sum_p;
    // Without mass in p nothing counts, neither shift_q = -inf nor an infinite cross.
    return {new_max_p, new_max_q, mass, std::exp(shift_q) * sum_q,
            mass == Acc(0) ? Acc(0) : scale * (cross + sum_p * (shift_p - shift_q))};
  }
};

// The union of two parts.
template <typename Acc>
FUSEDRL_HD PairPart<Acc> merge(PairPart<Acc> x, PairPart<Acc> y, float inv_temperature) {
  const float max_p = x.max_p >= y.max_p ? x.max_p : y.max_p;
  const float max_q = x.max_q >= y.max_q ? x.max_q : y.max_q;
  x = x.relative_to(max_p, max_q, inv_temperature);
  y = y.relative_to(max_p, max_q, inv_temperature);
  return {max_p, max_q, x.sum_p + y.sum_p, x.sum_q + y.sum_q, x.cross + y.cross};
}

// What the backward pass needs of two rows, six floats: their normalizers, and the means of what
// their classes are scored by, which add up to the divergence. For KL the score of p is
// log(p_v / q_v), and q has none; for Jensen-Shannon they are log(p_v / m_v) / 2 and
// log(q_v / m_v) / 2, m = (p + q) / 2.
struct PairStatistics {
  Pair<Normalizer> normalizers;
  Pair<float> mean;

  FUSEDRL_HD float divergence() const { return mean.p + mean.q; }
};

template <typename Acc>
FUSEDRL_HD Pair<Normalizer> normalizers_of(PairPart<Acc> row) {
  return {{row.max_p, float(std::log(row.sum_p))}, {row.max_q, float(std::log(row.sum_q))}};
}

// A divergence outside its bounds is rounding; NaN stays.
template <typename Acc>
FUSEDRL_HD float within(Acc x, float bound) {
  return x < Acc(0) ? 0.0f : x > Acc(bound) ? bound : float(x);
}

template <typename Acc>
FUSEDRL_HD PairStatistics finish(PairPart<Acc> row) {
  const Acc kl = row.cross / row.sum_p + std::log(row.sum_q / row.sum_p);
  return {normalizers_of(row), {within(kl, INFINITY), 0.0f}};
}

// Sums of p_v log(p_v / m_v) / 2 and q_v log(q_v / m_v) / 2 over a part of two rows.
template <typename Acc>
FUSEDRL_HD PairStatistics finish(Pair<Normalizer> normalizers, Pair<Acc> sums) {
  constexpr float kHalfLn2 = 0.346573590f;
  return {normalizers, {within(sums.p, kHalfLn2), within(sums.q, kHalfLn2)}};
}

// log(p / m) / 2 and log(q / m) / 2 with m = (p + q) / 2. `log` takes 0 to any finite number, and
// so does this function where p or q is 0.
template <typename V, typename Log>
FUSEDRL_HD Pair<V> half_logs(V p, V q, Log log) {
  constexpr float kTiny = 1e-37f;  // 0 / 0 where both are 0; lost in any m that counts
  const V m = (p + q) * 0.5f + kTiny;
  return {log(p / m) * 0.5f, log(q / m) * 0.5f};
}

// The gradients of the two logits of a class, times the row's upstream gradient.
struct PairGradient {
  PairStatistics row;
  float upstream;
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

  // Of the Jensen-Shannon divergence: p_v (log(p_v / m_v) / 2 - its mean), and the same of q.
  template <typename V, typename Log>
  FUSEDRL_HD Pair<V> of_jensen_shannon(V p, V q, Log log) const {
    const float factor = upstream * inv_temperature;
    const Pair<V> score = half_logs(p, q, log);
    return {p * (score.p - row.mean.p) * factor, q * (score.q - row.mean.q) * factor};
  }
};

}  // namespace fusedrl
