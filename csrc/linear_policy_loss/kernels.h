// CUDA kernel: rows of a head's matrix products become log-probs, terms of a loss and gradients,
// one block a row.
#pragma once

#include "linear_policy_loss/math.h"
#include "linear_token_log_probs/kernels.h"

namespace fusedrl {

// What the gradients of a row's products depend on.
struct RowSlopes {
  RowGradient gradient;
  float log_prob;
};

// The tile holds whole rows.
template <bool kEntropy, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    policy_rows(Tile<T> tile, Selection kept, KeptRows rows, const int64_t* tokens,
                PolicyTokens policy, PolicyRow* results, GradTile<T> grads) {
  const float inv_temperature = rows.inverse_temperature();
  const auto merge_parts = [=](const SoftmaxPart<float>& x, const SoftmaxPart<float>& y) {
    return merge(x, y, inv_temperature);
  };
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const float* row = tile.row(r);
    const int64_t n = kept.token(tile.first_row + r), target = tokens[n];
    FUSEDRL_DEVICE_CHECK(target >= 0 && target < tile.classes,
                         "tokens: expected values in [0, V); leave it out with mask");
    const SoftmaxPart<float> mine =
        thread_part<kEntropy, true>(row, tile.classes, inv_temperature, tile.shape);
    const SoftmaxPart<float> part = reduce_block(mine, merge_parts);
    RowSlopes slopes{};
    if (threadIdx.x == 0) {
      const RowResult row_result = finish(part, tile.shape(row[target], target), inv_temperature);
      const float entropy = kEntropy ? row_result.entropy : 0.0f;
      const PolicyRow result = policy.row(n, row_result.log_prob, entropy);
      results[n] = result;
      slopes = {{policy.slope(n, result), policy.weights[n].entropy, entropy, row_result.normalizer,
                 inv_temperature},
                result.log_prob};
    }
    if (grads.first == nullptr) continue;
    slopes = from_first_thread(slopes);
    differentiate_row(tile, row, grads.row(r), target, slopes.gradient, slopes.log_prob);
  }
}

}  // namespace fusedrl
