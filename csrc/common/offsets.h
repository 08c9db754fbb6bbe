// Boundaries of packed sequences: sequence b holds the tokens [offsets[b], offsets[b + 1]).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fusedrl {

// The sequence that contains `token`: the last one that starts at or before it, which skips empty
// sequences.
FUSEDRL_HD int64_t sequence_of(int64_t token, const int64_t* offsets, int64_t sequences) {
  int64_t low = 0, high = sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (offsets[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace fusedrl
