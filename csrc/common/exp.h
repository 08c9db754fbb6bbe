// e^x without branches, so that loops over it vectorise, for host and device.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace fusedrl {

// x as n ln2 + r with |r| <= ln2 / 2, which makes e^x = 2^n (1 + r + series).
struct ExpParts {
  float n, r;
  float series;         // e^r - 1 - r
  uint32_t power_bits;  // of 2^n, a normal number where x is between -86 and 88

  FUSEDRL_HD float power() const { return std::bit_cast<float>(power_bits); }

  // e^x for x between -86 and 89, where 2^n may overflow before e^x does.
  FUSEDRL_HD float whole() const {
    return std::bit_cast<float>(power_bits - (1u << 23)) * (1 + r + series) * 2;
  }
};

constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860682e-6f;

FUSEDRL_HD ExpParts exp_parts(float x) {
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves n, biased, in the low bits.
  constexpr float kRound = 12582912.0f + 127.0f;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = x - n * kLn2High - n * kLn2Low;
  float series = 1.0f / 720 + r * (1.0f / 5040);
  series = 1.0f / 24 + r * (1.0f / 120 + r * series);
  series = r * r * (1.0f / 2 + r * (1.0f / 6 + r * series));
  return {n, r, series, std::bit_cast<uint32_t>(shifted) << 23};
}

// e^x within 2 ulp; 0 below -86, infinity above 89, NaN for NaN.
FUSEDRL_HD float exp_of(float x) {
  const float whole = exp_parts(x).whole();
  return x > 89 ? INFINITY : x < -86 ? 0 : whole;
}

}  // namespace fusedrl
