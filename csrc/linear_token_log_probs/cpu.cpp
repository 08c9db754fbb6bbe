// CPU ops: the head's logits of the kept rows, a tile at a time, through the row kernels of
// token_log_probs.
#include <algorithm>
#include <tuple>

#include "common/cpu_head_gradient.h"
#include "linear_token_log_probs/cpu_tiles.h"
#include "linear_token_log_probs/math.h"

namespace fusedrl {
namespace {

std::vector<RowSoftmax> softmax_of(const CpuHead& head, const TileRows& tiles,
                                   const std::vector<int64_t>& targets, bool entropy,
                                   const StoredLogits& stored) {
  return reduced<RowSoftmax>(
      head, {0, head.rows()}, [&] { return TileRoom(head); },
      [&](TileRoom& room, Span block, Span tile, RowSoftmax* rows) {
        const FloatMatrix x =
            stored.of(block, tile, {mutable_data<float>(room.floats), tile.count});
        head.logits(room.of_head, block, tile, x);
        for (int64_t r = 0; r < block.count; ++r) {
          tiles.add(x.at(r, 0), tile, targets[block.first + r], entropy, rows[r]);
        }
      },
      [&](const RowSoftmax& x, const RowSoftmax& y) { return tiles.merged(x, y); });
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight, std::optional<Tensor> bias,
                                           Tensor tokens, std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, double scale, double softcap,
                                           bool entropy, std::optional<int64_t> vocab_offset,
                                           bool batch_invariant, int64_t stored_bytes) {
  Tensor parts = empty_per_token(hidden, 4);
  const KeptTokens kept(hidden, tokens, mask, offsets, shift, vocab_offset);
  if (!vocab_offset.has_value()) kept.check_targets(weight.size(0));
  const float inv_temperature = inverse_temperature(temperature);
  const CpuHead head(hidden, elements_of(kept.map, kept.tokens), weight, bias,
                     static_cast<float>(scale), batch_invariant);
  const TileRows tiles(head, inv_temperature, softcap);
  const StoredLogits stored(head, stored_bytes);
  const std::vector<RowSoftmax> rows = softmax_of(head, tiles, kept.targets, entropy, stored);

  VocabPart* out = mutable_data<VocabPart>(parts);
  std::fill_n(out, tokens.numel(), dropped_part(vocab_offset.value_or(0) == 0));
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [max, sum, dot] = rows[i].part;
    out[kept.tokens[i]] = {max, static_cast<float>(sum), static_cast<float>(dot),
                           rows[i].target_logit};
  }
  return {parts, stored.tensor(), empty_vector(hidden, ScalarType::Long)};
}

std::tuple<Tensor, Tensor, Tensor> combine(Tensor parts, Tensor temperature, bool entropy) {
  const int64_t shards = parts.size(0);
  const Tensor one = torch::stable::select(parts, 0, 0);
  Tensor log_probs = empty_per_token(one);
  Tensor entropies = entropy ? empty_per_token(one) : empty_vector(one, ScalarType::Float);
  Tensor normalizers = empty_per_token(one, 2);
  const float inv_temperature = inverse_temperature(temperature);
  const int64_t tokens = log_probs.numel();
  const VocabPart* from = data<VocabPart>(parts);
  for (int64_t n = 0; n < tokens; ++n) {
    const RowResult result = finish(from + n, shards, tokens, inv_temperature);
    mutable_data<float>(log_probs)[n] = result.log_prob;
    mutable_data<Normalizer>(normalizers)[n] = result.normalizer;
    if (entropy) mutable_data<float>(entropies)[n] = result.entropy;
  }
  return {log_probs, entropies, normalizers};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor grad_log_probs, std::optional<Tensor> grad_entropy, Tensor hidden, Tensor weight,
    std::optional<Tensor> bias, Tensor tokens, std::optional<Tensor> mask,
    std::optional<Tensor> offsets, bool shift, Tensor temperature, double scale, double softcap,
    Tensor log_probs, Tensor entropy, Tensor normalizers, Tensor logits, Tensor /*kept*/,
    std::optional<int64_t> vocab_offset, bool batch_invariant, bool of_hidden, bool of_weight,
    bool of_bias, std::optional<Tensor> rounds_grads) {
  const KeptTokens kept(hidden, tokens, mask, offsets, shift, vocab_offset);
  const float inv_temperature = inverse_temperature(temperature);
  const float factor = static_cast<float>(scale);
  const float* up = data<float>(grad_log_probs);
  const float* up_entropy = data<float>(grad_entropy);

  const CpuHead head(hidden, elements_of(kept.map, kept.tokens), weight, bias, factor,
                     batch_invariant);
  CpuHeadGradient gradient(head, hidden, weight, bias, of_hidden, of_weight, of_bias,
                           is_set(rounds_grads));
  const TileRows tiles(head, inv_temperature, softcap);
  const auto of_row = [&](int64_t n) {
    return RowGradient{up[n], up_entropy == nullptr ? 0.0f : up_entropy[n],
                       up_entropy == nullptr ? 0.0f : data<float>(entropy)[n],
                       data<Normalizer>(normalizers)[n], inv_temperature};
  };
  for (size_t i = 0; i < kept.tokens.size(); ++i) {
    const int64_t n = kept.tokens[i];
    tiles.expect(gradient, i, kept.targets[i], of_row(n), data<float>(log_probs)[n]);
  }
  add_gradients(
      head, gradient, StoredLogits(head, logits),
      [&](float* x, Span tile) { tiles.shape(x, tile); },
      [&](const float* x, float* grads, Span tile, int64_t i) {
        const int64_t n = kept.tokens[i];
        tiles.differentiate(x, grads, tile, kept.targets[i], of_row(n), data<float>(log_probs)[n]);
      });
  // The ranks of a sharded vocabulary add theirs up before it is rounded.
  const ScalarType of_hidden_states =
      vocab_offset.has_value() ? ScalarType::Float : hidden.scalar_type();
  return {gradient.hidden(kept.map, kept.tokens, factor, of_hidden_states), gradient.weight(),
          gradient.bias(factor)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("linear_token_log_probs", TORCH_BOX(&forward));
  m.impl("linear_token_log_probs_finish", TORCH_BOX(&combine));
  m.impl("linear_token_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
