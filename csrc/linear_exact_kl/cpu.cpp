// CPU ops: tiles of both heads' logits, with the same rows and classes, as inputs of the row
// kernels of exact_kl.
#include <tuple>
#include <utility>

#include "common/cpu_head_rows.h"
#include "common/cpu_ops.h"
#include "common/rows.h"
#include "exact_kl/cpu_rows.h"
#include "exact_kl/results.h"

namespace fusedrl {
namespace {

// One of the two models.
struct Side {
  Side(const Tensor& hidden, const std::vector<int64_t>& tokens,
       const std::optional<Tensor>& offsets, bool shift, const Tensor& weight,
       const std::optional<Tensor>& bias, double scale, double softcap, bool batch_invariant)
      : map(row_map(hidden, offsets, shift)),
        head(hidden, elements_of(map, tokens), weight, bias, scale, softcap, batch_invariant) {}

  RowMap map;
  CpuHead head;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor hidden, Tensor weight, std::optional<Tensor> bias, double scale, double softcap,
    Tensor ref_hidden, Tensor ref_weight, std::optional<Tensor> ref_bias, double ref_scale,
    double ref_softcap, std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift,
    Tensor temperature, double beta, bool entropies, bool batch_invariant, int64_t stored_bytes) {
  const PairResults results(hidden, entropies);
  const int64_t tokens = results.divergence.numel();
  check_offsets(offsets, tokens);
  const std::vector<int64_t> kept = kept_tokens(row_map(hidden, offsets, shift), data<bool>(mask));
  const float inv_temperature = inverse_temperature(temperature);
  const PairKernels<float> kernels = pair_kernels<float>(cpu_level(), is_mixture(beta), entropies);
  const Side p(hidden, kept, offsets, shift, weight, bias, scale, softcap, batch_invariant);
  const Side q(ref_hidden, kept, offsets, shift, ref_weight, ref_bias, ref_scale, ref_softcap,
               batch_invariant);
  const std::array<HeadOfRows, 2> heads{{{p.head, StoredLogits(p.head, stored_bytes, 2)},
                                         {q.head, StoredLogits(q.head, stored_bytes, 2)}}};

  const std::vector<PairPart<double>> parts = reduced<PairPart<double>>(
      heads, true,
      [&](const auto& x, Span tile, int64_t, PairPart<double>& part) {
        part = merge(part, kernels.part(x[0], x[1], tile.count, inv_temperature), inv_temperature);
      },
      [&](const auto& x, const auto& y) { return merge(x, y, inv_temperature); });

  // A mixture needs both normalizers first, so all logits are computed twice.
  const auto plus = [](const Pair<double>& x, const Pair<double>& y) {
    return Pair<double>{x.p + y.p, x.q + y.q};
  };
  const bool mixture = is_mixture(beta);
  const Pair<float> shares = shares_of(beta);
  std::vector<Pair<double>> sums;
  if (mixture) {
    sums = reduced<Pair<double>>(
        heads, false,
        [&](const auto& x, Span tile, int64_t i, Pair<double>& sum) {
          sum = plus(sum, kernels.mixture_part(x[0], x[1], tile.count, normalizers_of(parts[i]),
                                               shares, inv_temperature));
        },
        plus);
  }

  const PairOutputs out = results.outputs();
  for (int64_t n = 0; n < tokens; ++n) out.write(n, PairResult{});
  for (size_t i = 0; i < kept.size(); ++i) {
    const PairPart<double>& part = parts[i];
    out.write(kept[i], mixture ? finish(normalizers_of(part), entropies_of(part), sums[i], shares)
                               : finish(part));
  }
  return std::tuple_cat(results.tensors(),
                        std::tuple(heads[0].stored.tensor(), heads[1].stored.tensor(),
                                   empty_vector(hidden, ScalarType::Long)));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_divergence, std::optional<Tensor> grad_entropies, Tensor hidden, Tensor weight,
    std::optional<Tensor> bias, double scale, double softcap, Tensor ref_hidden, Tensor ref_weight,
    std::optional<Tensor> ref_bias, double ref_scale, double ref_softcap,
    std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift, Tensor temperature,
    double beta, bool batch_invariant, Tensor entropies, Tensor statistics, Tensor logits,
    Tensor ref_logits, Tensor /*kept*/, bool of_hidden, bool of_weight, bool of_bias,
    bool of_ref_hidden, bool of_ref_weight, bool of_ref_bias, std::optional<Tensor> rounds_grads) {
  check_offsets(offsets, grad_divergence.numel());
  const std::vector<int64_t> kept = kept_tokens(row_map(hidden, offsets, shift), data<bool>(mask));
  const float inv_temperature = inverse_temperature(temperature);
  const PairUpstream upstream =
      pair_upstream(grad_divergence, grad_entropies, entropies, statistics, beta);
  const auto run =
      pair_kernels<float>(cpu_level(), is_mixture(beta), grad_entropies.has_value()).backward;
  const Side p(hidden, kept, offsets, shift, weight, bias, scale, softcap, batch_invariant);
  const Side q(ref_hidden, kept, offsets, shift, ref_weight, ref_bias, ref_scale, ref_softcap,
               batch_invariant);
  const bool of_p = of_hidden || of_weight || of_bias;
  const bool of_q = of_ref_hidden || of_ref_weight || of_ref_bias;
  CpuHeadGradient grad_p(p.head, hidden, weight, bias, of_hidden, of_weight, of_bias,
                         is_set(rounds_grads));
  CpuHeadGradient grad_q(q.head, ref_hidden, ref_weight, ref_bias, of_ref_hidden, of_ref_weight,
                         of_ref_bias, is_set(rounds_grads));

  const std::array<HeadOfRows, 2> heads{
      {{p.head, StoredLogits(p.head, logits), of_p ? &grad_p : nullptr},
       {q.head, StoredLogits(q.head, ref_logits), of_q ? &grad_q : nullptr}}};
  if (of_p || of_q) {
    add_gradients(heads, [&](const auto& x, const auto& grads, Span tile, int64_t i) {
      const LogitsOfTile capped_p(x[0], grads[0], tile.count, of_p && p.head.is_capped());
      const LogitsOfTile capped_q(x[1], grads[1], tile.count, of_q && q.head.is_capped());
      run(x[0], x[1], of_p ? grads[0] : nullptr, of_q ? grads[1] : nullptr, tile.count,
          upstream.of_token(kept[i], inv_temperature));
      if (of_p) p.head.chain(capped_p.data(), grads[0], tile.count);
      if (of_q) q.head.chain(capped_q.data(), grads[1], tile.count);
    });
  }
  return {grad_p.hidden(p.map, kept), grad_p.weight(), grad_p.bias(),
          grad_q.hidden(q.map, kept), grad_q.weight(), grad_q.bias()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("linear_exact_kl", TORCH_BOX(&forward));
  m.impl("linear_exact_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
