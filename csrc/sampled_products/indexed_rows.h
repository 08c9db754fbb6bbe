// The rows of a matrix that entries name; their elements lie side by side.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fusedrl {

template <typename T>
struct IndexedRows {
  const T* data;
  int64_t stride, width;

  // Of a tensor, whose header no kernel of a CPU level may include.
  template <typename Matrix>
  static IndexedRows of(const Matrix& matrix) {
    return {static_cast<const T*>(matrix.const_data_ptr()), matrix.stride(0), matrix.size(1)};
  }

  FUSEDRL_HD const T* row(int64_t index) const { return data + index * stride; }
};

}  // namespace fusedrl
