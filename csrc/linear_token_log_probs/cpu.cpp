// CPU ops: tiles of the head's logits of the kept rows, as inputs of the row kernels of
// token_log_probs.
#include <algorithm>
#include <tuple>

#include "linear_token_log_probs/cpu_tiles.h"
#include "linear_token_log_probs/math.h"

namespace fusedrl {
namespace {

// The softmax of each row, and the sum of the head's weights over all classes except the target. If
// only the hidden states have a gradient, these suffice for any loss. Classes are weighted by
// exponentials relative to the largest logit so far.
std::vector<RowSoftmax> softmax_and_sums(const CpuHead& head, const TileRows& tiles,
                                         const std::vector<int64_t>& targets, float inv_temperature,
                                         CpuHeadGradient& sums) {
  const auto merged = [&](const RowSoftmax& x, const RowSoftmax& y) { return tiles.merged(x, y); };
  const Segments segments = head.segments();
  std::vector<RowSoftmax> of_segments(segments.count() * head.rows()), so_far(head.rows()), of_part;
  const GradientParts parts(head);
  const Tensor floats = new_floats(head.weight(), parts.floats(head));
  parts.for_each([&](Span rows, Span classes) {
    const FloatMatrix part{mutable_data<float>(floats), classes.count};
    const auto at = [&](int64_t row, Span tile) {
      return part.at(row - rows.first, tile.first - classes.first);
    };
    const Spans in_part = head.tiles(classes);
    of_part.assign(in_part.count() * rows.count, RowSoftmax());
    const auto of_tile = [&](Span tile) {
      return of_part.data() + (tile.first - classes.first) / in_part.length * rows.count;
    };
    const auto make_room = [&] { return CpuHead::Room(head); };
    for_each_tile(head, rows, classes, make_room, [&](auto& room, Span block, Span tile) {
      head.logits(room, block, tile, {at(block.first, tile), part.row});
      for (int64_t row = block.first; row < block.end(); ++row) {
        tiles.add(at(row, tile), tile, targets[row], false, of_tile(tile)[row - rows.first]);
      }
    });
    for (int64_t row = rows.first; row < rows.end(); ++row) {
      const float before = so_far[row].part.max;
      for (int64_t t = 0; t < in_part.count(); ++t) {
        const RowSoftmax& of_row = of_tile(in_part[t])[row - rows.first];
        RowSoftmax& of_segment = of_segments[segments.of_tile(in_part[t]) * head.rows() + row];
        of_segment = merged(of_segment, of_row);
        so_far[row] = merged(so_far[row], of_row);
      }
      const auto& [softmax, target_logit] = so_far[row];
      if (softmax.max > before) {
        sums.rescale(row, std::exp((before - softmax.max) * inv_temperature));
      }
      // The target's contribution is as large as that of all other classes.
      const double of_target = std::exp((target_logit - softmax.max) * inv_temperature);
      tiles.expect(sums, row, targets[row],
                   static_cast<float>(std::fmax(softmax.sum - of_target, 0.0)));
    }
    const auto no_room = [] { return nullptr; };
    for_each_tile(head, rows, classes, no_room, [&](auto&, Span block, Span tile) {
      for (int64_t row = block.first; row < block.end(); ++row) {
        tiles.weigh(at(row, tile), tile, targets[row], so_far[row].part.max);
      }
    });
    sums.add(rows, classes, part);
  });
  merge_segments(of_segments, head.rows(), merged);
  return of_segments;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight, std::optional<Tensor> bias,
                                           Tensor tokens, std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, double scale, double softcap,
                                           bool entropy, std::optional<int64_t> vocab_offset,
                                           bool batch_invariant, int64_t stored_bytes,
                                           bool sums_weights, std::optional<Tensor> rounds_grads) {
  Tensor parts = empty_per_token(hidden, 4);
  const KeptTokens kept(hidden, tokens, mask, offsets, shift, vocab_offset);
  if (!vocab_offset.has_value()) kept.check_targets(weight.size(0));
  const float inv_temperature = inverse_temperature(temperature);
  const CpuHead head(hidden, elements_of(kept.map, kept.tokens), weight, bias, scale, softcap,
                     batch_invariant);
  const TileRows tiles(head, inv_temperature);
  std::vector<RowSoftmax> rows;
  Tensor stored;
  if (sums_weights) {
    CpuHeadGradient sums(head, hidden, weight, bias, true, false, false, is_set(rounds_grads));
    rows = softmax_and_sums(head, tiles, kept.targets, inv_temperature, sums);
    stored = sums.hidden(kept.map, kept.tokens, ScalarType::Float);
  } else {
    const std::array<HeadOfRows, 1> heads{{{head, StoredLogits(head, stored_bytes)}}};
    rows = reduced<RowSoftmax>(
        heads, true,
        [&](const auto& x, Span tile, int64_t i, RowSoftmax& row) {
          tiles.add(x[0], tile, kept.targets[i], entropy, row);
        },
        [&](const RowSoftmax& x, const RowSoftmax& y) { return tiles.merged(x, y); });
    stored = heads[0].stored.tensor();
  }

  VocabPart* out = mutable_data<VocabPart>(parts);
  std::fill_n(out, tokens.numel(), dropped_part(vocab_offset.value_or(0) == 0));
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [max, sum, dot] = rows[i].part;
    out[kept.tokens[i]] = {max, static_cast<float>(sum), static_cast<float>(dot),
                           rows[i].target_logit};
  }
  return {parts, stored, empty_vector(hidden, ScalarType::Long)};
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
  const float* up = data<float>(grad_log_probs);
  const float* up_entropy = data<float>(grad_entropy);

  const CpuHead head(hidden, elements_of(kept.map, kept.tokens), weight, bias, scale, softcap,
                     batch_invariant);
  CpuHeadGradient gradient(head, hidden, weight, bias, of_hidden, of_weight, of_bias,
                           is_set(rounds_grads));
  const TileRows tiles(head, inv_temperature);
  const auto of_row = [&](int64_t n) {
    return RowGradient{up[n], up_entropy == nullptr ? 0.0f : up_entropy[n],
                       up_entropy == nullptr ? 0.0f : data<float>(entropy)[n],
                       data<Normalizer>(normalizers)[n], inv_temperature};
  };
  for (size_t i = 0; i < kept.tokens.size(); ++i) {
    const int64_t n = kept.tokens[i];
    const float log_prob = data<float>(log_probs)[n];
    if (log_prob == -INFINITY) continue;  // the target is in no shard
    tiles.expect(gradient, i, kept.targets[i], of_row(n).target(log_prob));
  }
  const std::array<HeadOfRows, 1> heads{{{head, StoredLogits(head, logits), &gradient}}};
  add_gradients(heads, [&](const auto& x, const auto& grads, Span tile, int64_t i) {
    const int64_t n = kept.tokens[i];
    tiles.differentiate(x[0], grads[0], tile, kept.targets[i], of_row(n),
                        data<float>(log_probs)[n]);
  });
  // The ranks of a sharded vocabulary sum their gradients before rounding.
  const ScalarType of_hidden_states =
      vocab_offset.has_value() ? ScalarType::Float : hidden.scalar_type();
  return {gradient.hidden(kept.map, kept.tokens, of_hidden_states), gradient.weight(),
          gradient.bias()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("linear_token_log_probs", TORCH_BOX(&forward));
  m.impl("linear_token_log_probs_finish", TORCH_BOX(&combine));
  m.impl("linear_token_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
