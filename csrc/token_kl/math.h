// Estimates of KL(policy || reference) from one sampled token, with d = ref_log_prob - log_prob.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/check.h"
#include "common/exp.h"
#include "common/host_device.h"

namespace fusedrl {

enum class Estimator : int64_t { k1, k2, k3, abs };  // in the order of ESTIMATORS in Python

// e^d - 1 - d, by its series where expm1 and d cancel.
FUSEDRL_HD double k3_of(double d) {
  if (d > 700) return std::exp(d);  // inf - inf would be NaN
  if (!(std::abs(d) < 0.25)) return std::expm1(d) - d;
  double tail = 1;
  for (int k = 14; k >= 3; --k) tail = 1 + tail * d / k;
  return d * d / 2 * tail;
}

// The same without branches, so that loops vectorise: with d = n ln2 + r it is
// (2^n - 1 - n ln2) + (2^n - 1) r + 2^n (e^r - 1 - r), whose last factor has a short series.
FUSEDRL_HD float k3_of(float d) {
  const ExpParts e = exp_parts(d);
  const float constant = e.power() - 1 - e.n * kLn2High - e.n * kLn2Low;
  const float middle = constant + (e.power() - 1) * e.r + e.power() * e.series;
  // Above 80 only e^d matters; below -80 it is negligible.
  const float high = d > 89 ? INFINITY : e.whole();
  return d > 80 ? high : d < -80 ? -1 - d : middle;
}

// e^d - 1.
FUSEDRL_HD double k3_slope_of(double d) { return std::expm1(d); }
FUSEDRL_HD float k3_slope_of(float d) { return d < -20 ? -1 : k3_of(d) + d; }

template <typename A>
FUSEDRL_HD A kl_of(A d, Estimator estimator) {
  switch (estimator) {
    case Estimator::k1:
      return A(0) - d;  // -d would be -0 for equal log-probs
    case Estimator::k2:
      return d * d / 2;
    case Estimator::k3:
      return k3_of(d);
    default:
      return std::abs(d);
  }
}

// The derivative of kl_of; 0 at the kink of abs.
template <typename A>
FUSEDRL_HD A kl_slope_of(A d, Estimator estimator) {
  switch (estimator) {
    case Estimator::k1:
      return -1;
    case Estimator::k2:
      return d;
    case Estimator::k3:
      return k3_slope_of(d);
    default:
      return A(d > 0) - A(d < 0);
  }
}

// The type that a kernel computes in.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};

inline void check_upstream(bool of_kl, bool of_reward) {
  check(of_kl || of_reward,
        "grad_kl: expected the upstream gradient of the KL, of the reward or of both, got neither; "
        "pass one of them");
}

}  // namespace fusedrl
