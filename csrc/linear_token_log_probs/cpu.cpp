// CPU ops: the head's logits of the kept rows, a tile at a time, through the row kernels of
// token_log_probs. A tile of weights is read once for all rows.
#include <algorithm>
#include <tuple>

#include "common/cpu_head_gradient.h"
#include "common/cpu_ops.h"
#include "common/rows.h"
#include "linear_token_log_probs/cpu_rows.h"
#include "linear_token_log_probs/math.h"
#include "token_log_probs/cpu_rows.h"

namespace fusedrl {
namespace {

// The tokens that are computed, and each one's target: in this shard of the vocabulary, or outside.
struct KeptTokens {
  RowMap map;
  std::vector<int64_t> tokens, targets;

  KeptTokens(const Tensor& hidden, const Tensor& all_tokens, const std::optional<Tensor>& mask,
             const std::optional<Tensor>& offsets, bool shift, std::optional<int64_t> vocab_offset)
      : map(row_map(hidden, offsets, shift)) {
    check_offsets(offsets, map.tokens);
    tokens = kept_tokens(map, data<bool>(mask));
    for (const int64_t n : tokens) {
      targets.push_back(data<int64_t>(all_tokens)[n] - vocab_offset.value_or(0));
    }
  }

  void check_targets(int64_t classes) const {
    for (size_t i = 0; i < targets.size(); ++i) {
      check(targets[i] >= 0 && targets[i] < classes, "tokens: expected values in [0, ", classes,
            "), got ", targets[i], " at token ", tokens[i], "; mask it or clamp it");
    }
  }
};

Tensor forward(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor tokens,
               std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift,
               Tensor temperature, double scale, double softcap, bool entropy,
               std::optional<int64_t> vocab_offset, bool batch_invariant) {
  Tensor parts = empty_per_token(hidden, 4);
  const KeptTokens kept(hidden, tokens, mask, offsets, shift, vocab_offset);
  if (!vocab_offset.has_value()) kept.check_targets(weight.size(0));
  const float inv_temperature = inverse_temperature(temperature);
  const HeadKernels head_of = head_kernels(cpu_level());
  const RowKernels<float> kernels = row_kernels<float>(cpu_level());
  const auto part_of = entropy ? kernels.part_entropy : kernels.part;
  const float cap = static_cast<float>(softcap);

  std::vector<SoftmaxPart<double>> rows(kept.tokens.size());
  std::vector<float> target_logits(kept.tokens.size(), -INFINITY);
  const std::vector<int64_t> elements = elements_of(kept.map, kept.tokens);
  CpuHead head(hidden, elements, weight, bias, static_cast<float>(scale), batch_invariant,
               tile_classes(weight, block_rows(elements.size(), batch_invariant)));
  head.for_each_tile([&](int64_t first, int64_t count) {
    head.for_each_block([&](int64_t first_row, int64_t block) {
      float* logits = mutable_data<float>(head.logits(first_row));
      torch::stable::parallel_for(0, block, grain_rows(count), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          float* x = logits + r * count;
          if (head.bias() != nullptr || cap > 0) head_of.shape(x, head.bias(), count, cap);
          const int64_t i = first_row + r, target = kept.targets[i] - first;
          rows[i] = merge(rows[i], part_of(x, count, inv_temperature), inv_temperature);
          if (target >= 0 && target < count) target_logits[i] = x[target];
        }
      });
    });
  });

  VocabPart* out = mutable_data<VocabPart>(parts);
  std::fill_n(out, tokens.numel(), dropped_part(vocab_offset.value_or(0) == 0));
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [max, sum, dot] = rows[i];
    out[kept.tokens[i]] = {max, static_cast<float>(sum), static_cast<float>(dot), target_logits[i]};
  }
  return parts;
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
    Tensor log_probs, Tensor entropy, Tensor normalizers, std::optional<int64_t> vocab_offset,
    bool batch_invariant, bool of_hidden, bool of_weight, bool of_bias) {
  const KeptTokens kept(hidden, tokens, mask, offsets, shift, vocab_offset);
  const float inv_temperature = inverse_temperature(temperature);
  const HeadKernels head_of = head_kernels(cpu_level());
  const auto run = row_kernels<float>(cpu_level()).backward;
  const float cap = static_cast<float>(softcap), factor = static_cast<float>(scale);
  const float* up = data<float>(grad_log_probs);
  const float* up_entropy = data<float>(grad_entropy);

  const std::vector<int64_t> elements = elements_of(kept.map, kept.tokens);
  CpuHead head(hidden, elements, weight, bias, factor, batch_invariant,
               tile_classes(weight, block_rows(elements.size(), batch_invariant)));
  CpuHeadGradient gradient(head, hidden, weight, bias, of_hidden, of_weight, of_bias);
  const auto differentiate = [&](float* x, int64_t count, int64_t i, int64_t target) {
    const int64_t n = kept.tokens[i];
    const RowGradient of_row{up[n], up_entropy == nullptr ? 0.0f : up_entropy[n],
                             up_entropy == nullptr ? 0.0f : data<float>(entropy)[n],
                             data<Normalizer>(normalizers)[n], inv_temperature};
    float capped[kTileClasses];
    if (cap > 0) std::copy_n(x, count, capped);
    run(x, x, count, of_row);
    if (target >= 0 && target < count) x[target] = of_row.target(data<float>(log_probs)[n]);
    if (cap > 0) head_of.chain(capped, x, count, cap);
  };
  head.for_each_tile([&](int64_t first, int64_t count) {
    head.for_each_block([&](int64_t first_row, int64_t block) {
      const Tensor logits = head.logits(first_row);
      float* x = mutable_data<float>(logits);
      torch::stable::parallel_for(0, block, grain_rows(count), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          float* row = x + r * count;
          if (head.bias() != nullptr || cap > 0) head_of.shape(row, head.bias(), count, cap);
          differentiate(row, count, first_row + r, kept.targets[first_row + r] - first);
        }
      });
      gradient.add(first_row, logits);
    });
    gradient.finish_tile();
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
