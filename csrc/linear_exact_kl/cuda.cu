// CUDA ops: one tile of both heads' matrix products at a time, consumed immediately.
#include <tuple>

#include "common/cuda_head.h"
#include "exact_kl/results.h"
#include "linear_exact_kl/kernels.h"

namespace fusedrl {
namespace {

// The two models over the same rows.
template <typename T>
struct Heads {
  const OnDeviceOf& device;
  CudaHead<T> p, q;

  // A tile of logits of each.
  Pair<Tile<T>> tiles(int64_t first_class, int64_t first_row) {
    return {logits(p, first_class, first_row), logits(q, first_class, first_row)};
  }

 private:
  Tile<T> logits(CudaHead<T>& head, int64_t first_class, int64_t first_row) {
    const bool are_logits = head.holds_all();
    const Tile<T> tile = head.tile(first_class, first_row);
    if (!are_logits && !tile.shape.is_identity()) {
      device.launch(shape_tile<T>, tile.rows, kElementThreads, tile, head.products());
    }
    return tile;
  }
};

template <typename T>
int threads_of(const Tile<T>& tile) {
  return threads_for(2 * tile.classes * sizeof(float));
}

template <typename T>
auto gradient_kernel(bool mixture, bool entropies) {
  return mixture ? (entropies ? differentiate_pair_tile<true, true, T>
                              : differentiate_pair_tile<true, false, T>)
                 : (entropies ? differentiate_pair_tile<false, true, T>
                              : differentiate_pair_tile<false, false, T>);
}

// backward() recomputes the logits, unless those of a head are one tile, which is stored.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor hidden, Tensor weight, std::optional<Tensor> bias, double scale, double softcap,
    Tensor ref_hidden, Tensor ref_weight, std::optional<Tensor> ref_bias, double ref_scale,
    double ref_softcap, std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift,
    Tensor temperature, double beta, bool entropies, bool batch_invariant, int64_t stored_bytes) {
  const OnDeviceOf device(hidden);
  const PairResults results(hidden, entropies);
  Tensor logits = empty_vector(hidden, ScalarType::Float);
  Tensor ref_logits = empty_vector(hidden, ScalarType::Float);
  Tensor stored_rows = empty_vector(hidden, ScalarType::Long);
  const auto outputs = [&] {
    return std::tuple_cat(results.tensors(), std::tuple(logits, ref_logits, stored_rows));
  };
  Tensor divergence = results.divergence, of_both = results.entropies;
  Tensor statistics = results.statistics;
  for (Tensor* tensor : {&divergence, &of_both, &statistics}) torch::stable::zero_(*tensor);
  if (divergence.numel() == 0) return outputs();
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.batch_invariant = batch_invariant});
  stored_rows = rows.stored(stored_bytes);
  const int64_t count = rows.kept.count;
  if (count == 0) return outputs();
  const bool mixture = is_mixture(beta);
  const Pair<float> shares = shares_of(beta);
  const Tensor parts =
      new_matrix(hidden, count, sizeof(PairPart<float>) / sizeof(float), ScalarType::Float);
  const Tensor sums = new_matrix(hidden, mixture ? count : 0, 2, ScalarType::Float);
  auto* of_parts = mutable_data<PairPart<float>>(parts);
  auto* of_sums = mixture ? mutable_data<Pair<float>>(sums) : nullptr;
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    Heads<T> heads{device,
                   {device, rows, hidden, weight, bias, scale, softcap},
                   {device, rows, ref_hidden, ref_weight, ref_bias, ref_scale, ref_softcap,
                    row_map(ref_hidden, offsets, shift)}};
    const auto add = entropies ? add_pair_tile<true, T> : add_pair_tile<false, T>;
    for_each_tile(rows.tiles, [&](int64_t first_class, int64_t first_row) {
      const auto [p, q] = heads.tiles(first_class, first_row);
      device.launch(add, p.rows, threads_of(p), p, q, rows.rows, first_class == 0, of_parts);
    });
    if (mixture) {  // needs both normalizers first, so products that are not held are recomputed
      for_each_tile(rows.tiles, [&](int64_t first_class, int64_t first_row) {
        const auto [p, q] = heads.tiles(first_class, first_row);
        device.launch(add_mixture_tile<T>, p.rows, threads_of(p), p, q, rows.rows, first_class == 0,
                      shares, of_parts, of_sums);
      });
    }
    logits = heads.p.stored(stored_bytes / 2);
    ref_logits = heads.q.stored(stored_bytes / 2);
  });
  device.launch(finish_pairs, element_blocks(count), kElementThreads, rows.kept, of_parts, of_sums,
                shares, results.outputs());
  return outputs();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_divergence, std::optional<Tensor> grad_entropies, Tensor hidden, Tensor weight,
    std::optional<Tensor> bias, double scale, double softcap, Tensor ref_hidden, Tensor ref_weight,
    std::optional<Tensor> ref_bias, double ref_scale, double ref_softcap,
    std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift, Tensor temperature,
    double beta, bool batch_invariant, Tensor entropies, Tensor statistics, Tensor logits,
    Tensor ref_logits, Tensor kept, bool of_hidden, bool of_weight, bool of_bias,
    bool of_ref_hidden, bool of_ref_weight, bool of_ref_bias,
    std::optional<Tensor> /*rounds_grads*/) {
  const OnDeviceOf device(hidden);
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.batch_invariant = batch_invariant}, kept);
  const RowMap ref_map = row_map(ref_hidden, offsets, shift);
  const bool of_p = of_hidden || of_weight || of_bias;
  const bool of_q = of_ref_hidden || of_ref_weight || of_ref_bias;
  std::tuple<Tensor, Tensor, Tensor> grads{hidden, hidden, hidden}, ref_grads = grads;
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    Heads<T> heads{device,
                   {device, rows, hidden, weight, bias, scale, softcap, std::nullopt, 0, logits},
                   {device, rows, ref_hidden, ref_weight, ref_bias, ref_scale, ref_softcap, ref_map,
                    0, ref_logits}};
    CudaHeadGradient<T> grad_p(device, rows, heads.p, hidden, weight, of_hidden, of_weight,
                               of_bias);
    CudaHeadGradient<T> grad_q(device, rows, heads.q, ref_hidden, ref_weight, of_ref_hidden,
                               of_ref_weight, of_ref_bias);
    const auto kernel = gradient_kernel<T>(is_mixture(beta), grad_entropies.has_value());
    const PairUpstream upstream =
        pair_upstream(grad_divergence, grad_entropies, entropies, statistics, beta);
    for_each_tile(
        rows.tiles,
        [&](int64_t first_class, int64_t first_row) {
          const auto [p, q] = heads.tiles(first_class, first_row);
          device.launch(kernel, p.rows, threads_of(p), p, q, rows.kept, rows.rows, upstream,
                        of_p ? grad_p.grads(first_class, first_row) : GradTile<T>{},
                        of_q ? grad_q.grads(first_class, first_row) : GradTile<T>{});
        },
        [&](int64_t first_class, int64_t first_row) {
          if (of_p) grad_p.add(first_class, first_row);
          if (of_q) grad_q.add(first_class, first_row);
        });
    grads = grad_p.result();
    ref_grads = grad_q.result();
  });
  return std::tuple_cat(grads, ref_grads);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("linear_exact_kl", TORCH_BOX(&forward));
  m.impl("linear_exact_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
