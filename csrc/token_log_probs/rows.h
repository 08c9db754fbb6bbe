// The rows of a logits tensor as kernels see them.
#pragma once

#include <algorithm>

#include "common/tensor.h"
#include "token_log_probs/math.h"

namespace fusedrl {

inline RowMap row_map(const Tensor& logits, const Tensor& tokens,
                      const std::optional<Tensor>& offsets, bool shift) {
  const bool padded = logits.dim() == 3;
  return {tokens.numel(),
          std::max<int64_t>(padded ? logits.size(1) : logits.size(0), 1),
          padded ? logits.stride(0) : 0,
          logits.stride(logits.dim() - 2),
          data<int64_t>(offsets),
          offsets.has_value() ? offsets->numel() - 1 : 0,
          shift};
}

// A Normalizer a token.
inline Tensor empty_normalizers(const Tensor& logits, const Tensor& tokens) {
  std::vector<int64_t> sizes(tokens.sizes().begin(), tokens.sizes().end());
  sizes.push_back(2);
  return torch::stable::new_empty(logits, sizes, ScalarType::Float);
}

}  // namespace fusedrl
