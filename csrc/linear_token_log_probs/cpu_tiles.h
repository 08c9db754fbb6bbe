// Operations of CPU ops on a tile of a head's logits, for each kept token: add it to the row's
// softmax, or overwrite it with its gradients.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "common/cpu_head_rows.h"
#include "common/cpu_ops.h"
#include "common/outside.h"
#include "common/rows.h"
#include "linear_token_log_probs/math.h"
#include "token_log_probs/cpu_rows.h"

namespace fusedrl {

// The tokens that are computed, and their targets, which may be outside this shard.
struct KeptTokens {
  RowMap map;
  std::vector<int64_t> tokens, targets;
  int64_t columns;  // of padded tokens; 0 if packed

  KeptTokens(const Tensor& hidden, const Tensor& all_tokens, const std::optional<Tensor>& mask,
             const std::optional<Tensor>& offsets, bool shift, std::optional<int64_t> vocab_offset)
      : map(row_map(hidden, offsets, shift)),
        columns(all_tokens.dim() == 2 ? all_tokens.size(1) : 0) {
    check_offsets(offsets, map.tokens);
    tokens = kept_tokens(map, data<bool>(mask));
    for (const int64_t n : tokens) {
      targets.push_back(data<int64_t>(all_tokens)[n] - vocab_offset.value_or(0));
    }
  }

  void check_targets(int64_t classes) const {
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i] >= 0 && targets[i] < classes) continue;
      refuse_class(targets[i], classes, tokens[i], columns);
    }
  }
};

// A row's softmax over the classes so far.
struct RowSoftmax {
  SoftmaxPart<double> part;
  float target_logit = -INFINITY;
};

// The rows of tiles.
class TileRows {
 public:
  TileRows(const CpuHead& head, float inv_temperature)
      : head_(head), inv_temperature_(inv_temperature) {}

  // Adds a row's logits to its softmax.
  void add(const float* x, Span tile, int64_t target, bool entropy, RowSoftmax& row) const {
    const auto part_of = entropy ? kernels_.part_entropy : kernels_.part;
    const SoftmaxPart<double> part = part_of(x, tile.count, inv_temperature_);
    row = merged(row, {part, tile.has(target) ? x[target - tile.first] : -INFINITY});
  }

  // The union of two parts of a row.
  RowSoftmax merged(const RowSoftmax& x, const RowSoftmax& y) const {
    return {merge(x.part, y.part, inv_temperature_),
            y.target_logit <= x.target_logit ? x.target_logit : y.target_logit};
  }

  // Converts a row's logits to the factors of each class in the sum of weights, in place.
  void weigh(float* x, Span tile, int64_t target, float max) const {
    differentiate(x, x, tile, target, exponentials(max, inv_temperature_), 0.0f);
  }

  // Announces the target's gradient of a row to the head's gradient, also for a target in another
  // shard. A softcap may reduce it to 0.
  void expect(CpuHeadGradient& head, int64_t row, int64_t target, float of_target) const {
    if (!head_.is_capped()) head.expect(row, target, of_target);
  }

  // The gradients of a row's products from its logits, which may be overwritten.
  void differentiate(const float* x, float* grads, Span tile, int64_t target,
                     const RowGradient& gradient, float target_log_prob) const {
    const LogitsOfTile capped(x, grads, tile.count, head_.is_capped());
    kernels_.backward(x, grads, tile.count, gradient);
    if (tile.has(target)) grads[target - tile.first] = gradient.target(target_log_prob);
    head_.chain(capped.data(), grads, tile.count);
  }

 private:
  const CpuHead& head_;
  float inv_temperature_;
  RowKernels<float> kernels_ = row_kernels<float>(cpu_level());
};

}  // namespace fusedrl
