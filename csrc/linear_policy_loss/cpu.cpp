// CPU op: a block of rows is multiplied by the head once, reduced to log-probs, weighed,
// overwritten by its gradients and multiplied into those of the hidden states and the weight.
#include <algorithm>
#include <tuple>
#include <vector>

#include "common/cpu_head_gradient.h"
#include "linear_policy_loss/tokens.h"
#include "linear_token_log_probs/cpu_tiles.h"

namespace fusedrl {
namespace {

constexpr int64_t kBlockLogits = int64_t(64) << 20;  // of a block of rows: 256 MiB

// Rows of a block, so that blocks are about equal. Gradients of half weights are summed in float32
// over blocks, in as much memory as H rows of logits take: one larger block may take less.
int64_t rows_of_block(int64_t rows, const Tensor& weight, bool sums_in_half) {
  const int64_t most = std::max<int64_t>(kBlockLogits / weight.size(0), 1);
  if (rows <= most || (sums_in_half && rows <= most + weight.size(1))) {
    return std::max<int64_t>(rows, 1);
  }
  const int64_t blocks = (rows + most - 1) / most;
  return (rows + blocks - 1) / blocks;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss(
    Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor tokens,
    std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift, Tensor temperature,
    double scale, double softcap, Tensor advantages, std::optional<Tensor> old_log_probs,
    std::optional<Tensor> ref_log_probs, Tensor weights, int64_t surrogate, double low, double high,
    double most, int64_t estimator, bool entropy, bool of_hidden, bool of_weight, bool of_bias,
    std::optional<Tensor> rounds_grads) {
  Tensor out = empty_per_token(hidden, kPolicyRowFloats);
  PolicyRow* results = mutable_data<PolicyRow>(out);
  std::fill_n(results, tokens.numel(), PolicyRow());
  const KeptTokens kept(hidden, tokens, mask, offsets, shift, std::nullopt);
  kept.check_targets(weight.size(0));
  const float inv_temperature = inverse_temperature(temperature);
  const float factor = static_cast<float>(scale);
  const PolicyTokens policy = policy_tokens(advantages, old_log_probs, ref_log_probs, weights,
                                            surrogate, low, high, most, estimator);

  const int64_t rows = kept.tokens.size();
  // Float16 holds no gradients of tokens that count as one among many: the caller scales them.
  const bool in_half = weight.scalar_type() == ScalarType::BFloat16;
  const int64_t block_of_rows = rows_of_block(rows, weight, of_weight && in_half);
  const bool one_block = rows <= block_of_rows;
  const ScalarType sums = in_half && one_block ? weight.scalar_type() : ScalarType::Float;
  const CpuHead head(hidden, elements_of(kept.map, kept.tokens), weight, bias, factor, false);
  CpuHeadGradient gradient(head, hidden, weight, bias, of_hidden, of_weight, of_bias,
                           is_set(rounds_grads), sums);
  const TileRows tiles(head, inv_temperature, softcap);
  const Spans blocks{{0, rows}, block_of_rows};
  const Span classes{0, head.classes()};
  const Tensor floats = new_floats(hidden, std::min(rows, block_of_rows) * classes.count);
  const FloatMatrix logits{mutable_data<float>(floats), classes.count};
  const auto make_room = [&] { return CpuHead::Room(head); };

  for (int64_t b = 0; b < blocks.count(); ++b) {
    const Span block = blocks[b];
    const std::vector<RowSoftmax> softmax = reduced<RowSoftmax>(
        head, block, make_room,
        [&](CpuHead::Room& room, Span part, Span tile, RowSoftmax* of_part) {
          float* x = logits.at(part.first - block.first, tile.first);
          head.logits(room, part, tile, {x, logits.row});
          for (int64_t r = 0; r < part.count; ++r, x += logits.row) {
            tiles.add(x, tile, kept.targets[part.first + r], entropy, of_part[r]);
          }
        },
        [&](const RowSoftmax& x, const RowSoftmax& y) { return tiles.merged(x, y); });
    std::vector<RowGradient> gradients(block.count);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t n = kept.tokens[block.first + i];
      const RowResult row = finish(softmax[i].part, softmax[i].target_logit, inv_temperature);
      results[n] = policy.row(n, row.log_prob, entropy ? row.entropy : 0.0f);
      gradients[i] = {policy.slope(n, results[n]), policy.weights[n].entropy, row.entropy,
                      row.normalizer, inv_temperature};
      const int64_t target = kept.targets[block.first + i];
      tiles.expect(gradient, block.first + i, target, gradients[i], row.log_prob);
    }
    if (!of_hidden && !of_weight && !of_bias) continue;
    const auto no_room = [] { return nullptr; };
    for_each_tile(head, block, classes, no_room, [&](auto&, Span part, Span tile) {
      for (int64_t i = part.first; i < part.end(); ++i) {
        float* x = logits.at(i - block.first, tile.first);
        tiles.differentiate(x, x, tile, kept.targets[i], gradients[i - block.first],
                            results[kept.tokens[i]].log_prob);
      }
    });
    gradient.add(block, classes, logits);
  }
  Tensor of_weights = gradient.weight();
  if (of_weight && in_half && !one_block) {
    of_weights = torch::stable::to(of_weights, weight.scalar_type());
  }
  // A backward pass scales them, and rounds them then.
  return {out, gradient.hidden(kept.map, kept.tokens, factor, ScalarType::Float), of_weights,
          gradient.bias(factor, ScalarType::Float)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("linear_policy_loss", TORCH_BOX(&policy_loss));
}

}  // namespace fusedrl
