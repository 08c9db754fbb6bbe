// The output tensors of the ops of two rows, and the inputs of their backward passes.
#pragma once

#include <tuple>

#include "common/rows.h"
#include "exact_kl/math.h"

namespace fusedrl {

struct PairResults {
  bool with_entropies;
  Tensor divergence, entropies, statistics;

  // For the tokens of a batch; the tensor of entropies is empty unless requested.
  PairResults(const Tensor& batch, bool with_entropies)
      : with_entropies(with_entropies),
        divergence(empty_per_token(batch)),
        entropies(with_entropies ? empty_per_token(batch, 2)
                                 : empty_vector(batch, ScalarType::Float)),
        statistics(empty_per_token(batch, sizeof(PairStatistics) / sizeof(float))) {}

  PairOutputs outputs() const {
    return {mutable_data<float>(divergence),
            with_entropies ? mutable_data<Pair<float>>(entropies) : nullptr,
            mutable_data<PairStatistics>(statistics)};
  }

  std::tuple<Tensor, Tensor, Tensor> tensors() const { return {divergence, entropies, statistics}; }
};

inline PairUpstream pair_upstream(const Tensor& grad_divergence,
                                  const std::optional<Tensor>& grad_entropies,
                                  const Tensor& entropies, const Tensor& statistics, double beta) {
  return {data<float>(grad_divergence), data<Pair<float>>(grad_entropies),
          data<Pair<float>>(entropies), data<PairStatistics>(statistics), shares_of(beta)};
}

}  // namespace fusedrl
