// Shared by CPU ops over rows: the vector level, the rows to compute, and the rows per thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cpu_level.h"
#include "common/row_map.h"
#include "common/tensor.h"

namespace fusedrl {

// The first call chooses the level, and raises if FUSEDRL_CPU_LEVEL is unusable.
inline CpuLevel cpu_level() {
  static const CpuLevel chosen = chosen_cpu_level();
  return chosen;
}

inline float inverse_temperature(const Tensor& temperature) {
  const double value = *data<double>(temperature);
  check(value > 0 && std::isfinite(value), "temperature: expected a finite number > 0, got ", value,
        "; 1.0 leaves the logits as they are");
  return static_cast<float>(1.0 / value);
}

// Rows per task of a thread: about 32768 elements.
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

// Zeros for the rows of a gradient [tokens, classes] that no kept token reads.
template <typename T>
void zero_unread_rows(T* grad, const RowMap& map, const std::vector<int64_t>& kept,
                      int64_t classes) {
  std::vector<char> read(map.tokens, 0);
  for (const int64_t n : kept) read[map.row_of(n)] = 1;
  torch::stable::parallel_for(0, map.tokens, grain_rows(classes), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (!read[r]) std::memset(static_cast<void*>(grad + r * classes), 0, classes * sizeof(T));
    }
  });
}

}  // namespace fusedrl
