// CPU ops: tiles of both heads' logits, the same rows and classes at a time, through the row
// kernels of exact_kl.
#include <algorithm>
#include <tuple>

#include "common/cpu_head_gradient.h"
#include "common/cpu_ops.h"
#include "common/rows.h"
#include "exact_kl/cpu_rows.h"
#include "linear_token_log_probs/cpu_rows.h"

namespace fusedrl {
namespace {

// One of the two models.
struct Side {
  Side(const Tensor& hidden, const std::vector<int64_t>& tokens,
       const std::optional<Tensor>& offsets, bool shift, const Tensor& weight,
       const std::optional<Tensor>& bias, double scale, double softcap, bool batch_invariant,
       int64_t classes)
      : map(row_map(hidden, offsets, shift)),
        scale(static_cast<float>(scale)),
        cap(static_cast<float>(softcap)),
        head(hidden, elements_of(map, tokens), weight, bias, this->scale, batch_invariant,
             classes) {}

  // Logits of one row of a tile from its matrix product, in place.
  void shape(float* row, int64_t count) const {
    if (head.bias() == nullptr && cap == 0) return;
    head_kernels(cpu_level()).shape(row, head.bias(), count, cap);
  }

  RowMap map;
  float scale, cap;
  CpuHead head;
};

// Calls f(p_row, q_row, count, i) for the logits of the i-th kept row in every tile of classes, on
// torch's threads, and after(first_row, p_tile, q_tile) for each block of rows.
template <typename F, typename G, typename H>
void for_each_tile(Side& p, Side& q, F&& f, G&& after_block, H&& after_tile) {
  p.head.for_each_tile([&](int64_t first, int64_t count) {
    q.head.load(first, count);
    p.head.for_each_block([&](int64_t first_row, int64_t block) {
      const Tensor of_p = p.head.logits(first_row), of_q = q.head.logits(first_row);
      float *x = mutable_data<float>(of_p), *y = mutable_data<float>(of_q);
      torch::stable::parallel_for(0, block, grain_rows(count), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          p.shape(x + r * count, count);
          q.shape(y + r * count, count);
          f(x + r * count, y + r * count, count, first_row + r);
        }
      });
      after_block(first_row, of_p, of_q);
    });
    after_tile();
  });
}

const auto nothing = [](auto&&...) {};

std::tuple<Tensor, Tensor> forward(Tensor hidden, Tensor weight, std::optional<Tensor> bias,
                                   double scale, double softcap, Tensor ref_hidden,
                                   Tensor ref_weight, std::optional<Tensor> ref_bias,
                                   double ref_scale, double ref_softcap, std::optional<Tensor> mask,
                                   std::optional<Tensor> offsets, bool shift, Tensor temperature,
                                   bool jensen_shannon, bool batch_invariant) {
  Tensor kl = empty_per_token(hidden);
  Tensor statistics = empty_per_token(hidden, 6);
  check_offsets(offsets, kl.numel());
  const std::vector<int64_t> kept = kept_tokens(row_map(hidden, offsets, shift), data<bool>(mask));
  const float inv_temperature = inverse_temperature(temperature);
  const PairKernels<float> kernels = pair_kernels<float>(cpu_level());
  const int64_t block = block_rows(kept.size(), batch_invariant);
  const int64_t classes = std::min(tile_classes(weight, block), tile_classes(ref_weight, block));
  Side p(hidden, kept, offsets, shift, weight, bias, scale, softcap, batch_invariant, classes);
  Side q(ref_hidden, kept, offsets, shift, ref_weight, ref_bias, ref_scale, ref_softcap,
         batch_invariant, classes);

  std::vector<PairPart<double>> parts(kept.size());
  const auto add = [&](float* x, float* y, int64_t count, int64_t i) {
    parts[i] = merge(parts[i], kernels.part(x, y, count, inv_temperature), inv_temperature);
  };
  for_each_tile(p, q, add, nothing, nothing);

  // Its mixture needs both normalizers first, hence every product a second time.
  std::vector<Pair<double>> sums(jensen_shannon ? kept.size() : 0);
  if (jensen_shannon) {
    const auto add_sums = [&](float* x, float* y, int64_t count, int64_t i) {
      const Pair<double> sum =
          kernels.jensen_shannon_part(x, y, count, normalizers_of(parts[i]), inv_temperature);
      sums[i] = {sums[i].p + sum.p, sums[i].q + sum.q};
    };
    for_each_tile(p, q, add_sums, nothing, nothing);
  }

  float* out = mutable_data<float>(kl);
  PairStatistics* out_statistics = mutable_data<PairStatistics>(statistics);
  std::fill_n(out, kl.numel(), 0.0f);
  std::fill_n(out_statistics, kl.numel(), PairStatistics{});
  for (size_t i = 0; i < kept.size(); ++i) {
    const PairStatistics row =
        jensen_shannon ? finish(normalizers_of(parts[i]), sums[i]) : finish(parts[i]);
    out[kept[i]] = row.divergence();
    out_statistics[kept[i]] = row;
  }
  return {kl, statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_kl, Tensor hidden, Tensor weight, std::optional<Tensor> bias, double scale,
    double softcap, Tensor ref_hidden, Tensor ref_weight, std::optional<Tensor> ref_bias,
    double ref_scale, double ref_softcap, std::optional<Tensor> mask, std::optional<Tensor> offsets,
    bool shift, Tensor temperature, bool jensen_shannon, bool batch_invariant, Tensor statistics,
    bool of_hidden, bool of_weight, bool of_bias, bool of_ref_hidden, bool of_ref_weight,
    bool of_ref_bias) {
  check_offsets(offsets, grad_kl.numel());
  const std::vector<int64_t> kept = kept_tokens(row_map(hidden, offsets, shift), data<bool>(mask));
  const float inv_temperature = inverse_temperature(temperature);
  const PairKernels<float> kernels = pair_kernels<float>(cpu_level());
  const auto run = jensen_shannon ? kernels.jensen_shannon_backward : kernels.backward;
  const auto chain = head_kernels(cpu_level()).chain;
  const int64_t block = block_rows(kept.size(), batch_invariant);
  const int64_t classes = std::min(tile_classes(weight, block), tile_classes(ref_weight, block));
  Side p(hidden, kept, offsets, shift, weight, bias, scale, softcap, batch_invariant, classes);
  Side q(ref_hidden, kept, offsets, shift, ref_weight, ref_bias, ref_scale, ref_softcap,
         batch_invariant, classes);
  const bool of_p = of_hidden || of_weight || of_bias;
  const bool of_q = of_ref_hidden || of_ref_weight || of_ref_bias;
  CpuHeadGradient grad_p(p.head, hidden, weight, bias, of_hidden, of_weight, of_bias);
  CpuHeadGradient grad_q(q.head, ref_hidden, ref_weight, ref_bias, of_ref_hidden, of_ref_weight,
                         of_ref_bias);

  const auto differentiate = [&](float* x, float* y, int64_t count, int64_t i) {
    const int64_t n = kept[i];
    float capped_x[kTileClasses], capped_y[kTileClasses];
    if (p.cap > 0) std::copy_n(x, count, capped_x);
    if (q.cap > 0) std::copy_n(y, count, capped_y);
    run(x, y, of_p ? x : nullptr, of_q ? y : nullptr, count,
        {data<PairStatistics>(statistics)[n], data<float>(grad_kl)[n], inv_temperature});
    if (of_p && p.cap > 0) chain(capped_x, x, count, p.cap);
    if (of_q && q.cap > 0) chain(capped_y, y, count, q.cap);
  };
  if (of_p || of_q) {
    for_each_tile(
        p, q, differentiate,
        [&](int64_t first_row, const Tensor& grads, const Tensor& ref_grads) {
          if (of_p) grad_p.add(first_row, grads);
          if (of_q) grad_q.add(first_row, ref_grads);
        },
        [&] {
          grad_p.finish_tile();
          grad_q.finish_tile();
        });
  }
  return {grad_p.hidden(p.map, kept, p.scale), grad_p.weight(), grad_p.bias(p.scale),
          grad_q.hidden(q.map, kept, q.scale), grad_q.weight(), grad_q.bias(q.scale)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("linear_exact_kl", TORCH_BOX(&forward));
  m.impl("linear_exact_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
