// The softcap of some models' logits.
#pragma once

#include "common/host_device.h"

namespace fusedrl {

// cap tanh(x / cap), by its series where the quotient of exponentials cancels. `exp` need not be
// valid beyond +-80.
template <typename V, typename Exp>
FUSEDRL_HD V softcapped(V x, float cap, Exp&& exp) {
  const V u = x / cap;
  const V square = u * u;
  const V near = u * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
  const V far = 1.0f - 2.0f / (exp(u + u) + 1.0f);
  return cap * (square < 0.015625f ? near : far);
}

// The derivative of softcapped with respect to x, from the capped value y.
template <typename V>
FUSEDRL_HD V softcap_slope(V y, float cap) {
  return 1.0f - (y / cap) * (y / cap);
}

}  // namespace fusedrl
