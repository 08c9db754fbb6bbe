// The rows of a batch, [N, V] packed or [B, T, V] padded, as kernels see them.
#pragma once

#include <algorithm>

#include "common/row_map.h"
#include "common/tensor.h"

namespace fusedrl {

inline RowMap row_map(const Tensor& batch, const std::optional<Tensor>& offsets, bool shift) {
  const bool padded = batch.dim() == 3;
  const int64_t period = padded ? batch.size(1) : batch.size(0);
  return {padded ? batch.size(0) * period : period,
          std::max<int64_t>(period, 1),
          padded ? batch.stride(0) : 0,
          batch.stride(batch.dim() - 2),
          data<int64_t>(offsets),
          offsets.has_value() ? offsets->numel() - 1 : 0,
          shift};
}

// An uninitialised float32 tensor with `width` elements per token of the batch, or one element.
inline Tensor empty_per_token(const Tensor& batch, int64_t width = 0) {
  std::vector<int64_t> sizes(batch.sizes().begin(), batch.sizes().end() - 1);
  if (width > 0) sizes.push_back(width);
  return torch::stable::new_empty(batch, sizes, ScalarType::Float);
}

}  // namespace fusedrl
