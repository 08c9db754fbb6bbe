// CPU ops: kept rows are independent and divided among torch's threads; dropped rows are skipped.
#include <algorithm>
#include <tuple>

#include "common/cpu_ops.h"
#include "common/rows.h"
#include "exact_kl/cpu_rows.h"
#include "exact_kl/results.h"

namespace fusedrl {
namespace {

// Both rows of every token; `map` maps tokens to rows of the logits.
template <typename T>
struct PairRows {
  const T* logits;
  const T* ref_logits;
  RowMap map, ref_map;
  int64_t classes;
  float inv_temperature;

  PairRows(const Tensor& logits, const Tensor& ref_logits, const std::optional<Tensor>& offsets,
           bool shift, const Tensor& temperature)
      : logits(data<T>(logits)),
        ref_logits(data<T>(ref_logits)),
        map(row_map(logits, offsets, shift)),
        ref_map(row_map(ref_logits, offsets, shift)),
        classes(logits.size(logits.dim() - 1)),
        inv_temperature(inverse_temperature(temperature)) {
    check_offsets(offsets, map.tokens);
  }

  const T* row(int64_t index) const { return logits + map.element_of_row(index); }

  const T* ref_row(int64_t index) const { return ref_logits + ref_map.element_of_row(index); }

  // Calls f(token) for the kept tokens, on torch's threads.
  template <typename F>
  void for_each(const std::vector<int64_t>& kept, const F& f) const {
    torch::stable::parallel_for(0, kept.size(), grain_rows(2 * classes),
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t i = begin; i < end; ++i) f(kept[i]);
                                });
  }
};

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, Tensor ref_logits,
                                           std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, double beta, bool entropies) {
  const PairResults results(logits, entropies);
  const PairOutputs out = results.outputs();
  const Pair<float> shares = shares_of(beta);
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const PairRows<T> rows(logits, ref_logits, offsets, shift, temperature);
    const PairKernels<T> kernels = pair_kernels<T>(cpu_level(), is_mixture(beta), entropies);
    for (int64_t n = 0; n < rows.map.tokens; ++n) out.write(n, PairResult{});
    rows.for_each(kept_tokens(rows.map, data<bool>(mask)), [&](int64_t n) {
      const int64_t r = rows.map.row_of(n);
      const T *row = rows.row(r), *ref_row = rows.ref_row(r);
      const auto part = kernels.part(row, ref_row, rows.classes, rows.inv_temperature);
      if (is_mixture(beta)) {
        const Pair<Normalizer> normalizers = normalizers_of(part);
        const auto sums = kernels.mixture_part(row, ref_row, rows.classes, normalizers, shares,
                                               rows.inv_temperature);
        out.write(n, finish(normalizers, entropies_of(part), sums, shares));
      } else {
        out.write(n, finish(part));
      }
    });
  });
  return results.tensors();
}

std::tuple<Tensor, Tensor> backward(Tensor grad_divergence, std::optional<Tensor> grad_entropies,
                                    Tensor logits, Tensor ref_logits, std::optional<Tensor> mask,
                                    std::optional<Tensor> offsets, bool shift, Tensor temperature,
                                    double beta, Tensor entropies, Tensor statistics,
                                    bool wants_grad, bool wants_grad_ref) {
  const auto output = [&](bool wanted) {
    return wanted ? empty_like_sizes(logits, logits, logits.scalar_type())
                  : empty_vector(logits, logits.scalar_type());
  };
  Tensor grad_logits = output(wants_grad), grad_ref_logits = output(wants_grad_ref);
  if (!wants_grad && !wants_grad_ref) return {grad_logits, grad_ref_logits};
  const PairUpstream upstream =
      pair_upstream(grad_divergence, grad_entropies, entropies, statistics, beta);
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const PairRows<T> rows(logits, ref_logits, offsets, shift, temperature);
    const auto run =
        pair_kernels<T>(cpu_level(), is_mixture(beta), grad_entropies.has_value()).backward;
    const std::vector<int64_t> kept = kept_tokens(rows.map, data<bool>(mask));
    T* grad = wants_grad ? mutable_data<T>(grad_logits) : nullptr;
    T* grad_ref = wants_grad_ref ? mutable_data<T>(grad_ref_logits) : nullptr;
    rows.for_each(kept, [&](int64_t n) {
      const int64_t r = rows.map.row_of(n), start = r * rows.classes;
      run(rows.row(r), rows.ref_row(r), wants_grad ? grad + start : nullptr,
          wants_grad_ref ? grad_ref + start : nullptr, rows.classes,
          upstream.of_token(n, rows.inv_temperature));
    });
    if (wants_grad) zero_unread_rows(grad, rows.map, kept, rows.classes);
    if (wants_grad_ref) zero_unread_rows(grad_ref, rows.map, kept, rows.classes);
  });
  return {grad_logits, grad_ref_logits};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("exact_kl", TORCH_BOX(&forward));
  m.impl("exact_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
