// What CPU ops over rows share: the vector level, the rows that are computed, their share of a
// thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/cpu_level.h"
#include "common/row_map.h"
#include "common/tensor.h"

namespace fusedrl {

// Chosen by the first call: an unusable FUSEDRL_CPU_LEVEL is that call's error.
inline CpuLevel cpu_level() {
  static const CpuLevel chosen = chosen_cpu_level();
  return chosen;
}

inline float inverse_temperature(const Tensor& temperature) {
  const double value = *data<double>(temperature);
  STD_TORCH_CHECK(value > 0 && std::isfinite(value),
                  "temperature: expected a finite number > 0, got ", value);
  return static_cast<float>(1.0 / value);
}

// Rows that a thread takes at a time: about 32768 elements.
inline int64_t grain_rows(int64_t row_elements) {
  return std::max<int64_t>(32768 / row_elements, 1);
}

inline std::vector<int64_t> kept_tokens(const RowMap& map, const bool* mask) {
  std::vector<int64_t> kept;
  kept.reserve(map.tokens);
  for (int64_t n = 0; n < map.tokens; ++n) {
    if ((mask == nullptr || mask[n]) && map.has_row(n)) kept.push_back(n);
  }
  return kept;
}

}  // namespace fusedrl
