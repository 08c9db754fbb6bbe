// CPU ops: tiles of both heads' logits, the same rows and classes at a time, through the row
// kernels of exact_kl.
#include <tuple>
#include <utility>

#include "common/cpu_head_gradient.h"
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

// A thread's tile of both sides' logits.
struct PairRoom {
  PairRoom(const Side& p, const Side& q)
      : of_p(p.head),
        of_q(q.head),
        p(new_floats(p.head.weight(), p.head.tile_floats())),
        q(new_floats(q.head.weight(), q.head.tile_floats())) {}

  CpuHead::Room of_p, of_q;
  Tensor p, q;
};

// The logits of both sides that are stored, or none.
struct StoredPair {
  StoredLogits p, q;

  StoredPair(const Side& p, const Side& q, int64_t most_bytes)
      : p(p.head, most_bytes, 2), q(q.head, most_bytes, 2) {}
};

// Calls f(p_row, q_row, count, i, part) for the logits of the i-th row in every tile of classes,
// and returns what `merge` makes of each row's parts. Stored logits are made the first time alone.
template <typename Part, typename F, typename Merge>
std::vector<Part> reduced(const Side& p, const Side& q, const StoredPair& stored, bool first_time,
                          F&& f, Merge&& merge) {
  return reduced<Part>(
      p.head, {0, p.head.rows()}, [&] { return PairRoom(p, q); },
      [&](PairRoom& room, Span block, Span tile, Part* parts) {
        const FloatMatrix x = stored.p.of(block, tile, {mutable_data<float>(room.p), tile.count});
        const FloatMatrix y = stored.q.of(block, tile, {mutable_data<float>(room.q), tile.count});
        if (first_time || stored.p.empty()) {
          p.head.logits(room.of_p, block, tile, x);
          q.head.logits(room.of_q, block, tile, y);
        }
        for (int64_t r = 0; r < block.count; ++r) {
          f(x.at(r, 0), y.at(r, 0), tile.count, block.first + r, parts[r]);
        }
      },
      merge);
}

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
  const StoredPair stored(p, q, stored_bytes);

  const std::vector<PairPart<double>> parts = reduced<PairPart<double>>(
      p, q, stored, true,
      [&](float* x, float* y, int64_t count, int64_t, PairPart<double>& part) {
        part = merge(part, kernels.part(x, y, count, inv_temperature), inv_temperature);
      },
      [&](const auto& x, const auto& y) { return merge(x, y, inv_temperature); });

  // A mixture needs both normalizers first, hence all logits a second time.
  const auto plus = [](const Pair<double>& x, const Pair<double>& y) {
    return Pair<double>{x.p + y.p, x.q + y.q};
  };
  const bool mixture = is_mixture(beta);
  const Pair<float> shares = shares_of(beta);
  std::vector<Pair<double>> sums;
  if (mixture) {
    sums = reduced<Pair<double>>(
        p, q, stored, false,
        [&](float* x, float* y, int64_t count, int64_t i, Pair<double>& sum) {
          const Pair<Normalizer> normalizers = normalizers_of(parts[i]);
          sum = plus(sum, kernels.mixture_part(x, y, count, normalizers, shares, inv_temperature));
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
  return std::tuple_cat(results.tensors(), std::tuple(stored.p.tensor(), stored.q.tensor(),
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

  const auto differentiate = [&](const float* x, const float* y, float* of_x, float* of_y,
                                 int64_t count, int64_t i) {
    const LogitsOfTile capped_x(x, of_x, count, of_p && p.head.is_capped());
    const LogitsOfTile capped_y(y, of_y, count, of_q && q.head.is_capped());
    run(x, y, of_p ? of_x : nullptr, of_q ? of_y : nullptr, count,
        upstream.of_token(kept[i], inv_temperature));
    if (of_p) p.head.chain(capped_x.data(), of_x, count);
    if (of_q) q.head.chain(capped_y.data(), of_y, count);
  };
  if (of_p || of_q) {
    const StoredLogits stored_p(p.head, logits), stored_q(q.head, ref_logits);
    const bool again = stored_p.empty();
    const GradientParts parts(p.head);
    const Tensor floats = new_floats(hidden, again || of_p ? parts.floats(p.head) : 0);
    const Tensor ref_floats = new_floats(hidden, again || of_q ? parts.floats(q.head) : 0);
    const auto make_room = [&] { return std::pair(CpuHead::Room(p.head), CpuHead::Room(q.head)); };
    parts.for_each([&](Span rows, Span classes) {
      const FloatMatrix part{mutable_data<float>(floats), classes.count};
      const FloatMatrix ref_part{mutable_data<float>(ref_floats), classes.count};
      for_each_tile(p.head, rows, classes, make_room, [&](auto& room, Span block, Span tile) {
        const int64_t row = block.first - rows.first, column = tile.first - classes.first;
        const FloatMatrix of_x{part.at(row, column), part.row};
        const FloatMatrix of_y{ref_part.at(row, column), ref_part.row};
        const FloatMatrix x = stored_p.of(block, tile, of_x), y = stored_q.of(block, tile, of_y);
        if (again) {
          p.head.logits(room.first, block, tile, x);
          q.head.logits(room.second, block, tile, y);
        }
        for (int64_t r = 0; r < block.count; ++r) {
          differentiate(x.at(r, 0), y.at(r, 0), of_x.at(r, 0), of_y.at(r, 0), tile.count,
                        block.first + r);
        }
      });
      if (of_p) grad_p.add(rows, classes, part);
      if (of_q) grad_q.add(rows, classes, ref_part);
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
