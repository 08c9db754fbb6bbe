// The tensors that the op takes and answers with, as both devices do.
#pragma once

#include "common/tensor.h"
#include "importance_weights/sequences.h"

namespace fusedrl {

inline SequenceBounds sequence_bounds(const Tensor& log_probs,
                                      const std::optional<Tensor>& offsets) {
  const int64_t tokens = log_probs.numel();
  if (offsets.has_value()) return {data<int64_t>(offsets), offsets->numel() - 1, 0, tokens};
  if (log_probs.dim() == 2) return {nullptr, log_probs.size(0), log_probs.size(1), tokens};
  return {nullptr, 1, tokens, tokens};
}

struct Results {
  Tensor weights;  // float32, shaped like the log-probs
  Tensor counts;   // int64 [B, 2]
  Tensor sums;     // float32 [B, 5]

  Results(const Tensor& log_probs, int64_t sequences)
      : weights(empty_like_sizes(log_probs, log_probs, ScalarType::Float)),
        counts(torch::stable::new_empty(log_probs, std::vector<int64_t>{sequences, kCounts},
                                        ScalarType::Long)),
        sums(torch::stable::new_empty(log_probs, std::vector<int64_t>{sequences, kSums},
                                      ScalarType::Float)) {}

  MismatchRows rows() const { return {mutable_data<int64_t>(counts), mutable_data<float>(sums)}; }
};

}  // namespace fusedrl
