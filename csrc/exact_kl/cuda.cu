// CUDA ops: launches and registration. Nothing here waits for the device.
#include <tuple>

#include "common/cuda.h"
#include "common/rows.h"
#include "exact_kl/kernels.h"
#include "exact_kl/results.h"

namespace fusedrl {
namespace {

template <typename T>
PairRows<T> rows_of(const Tensor& logits, const Tensor& ref_logits,
                    const std::optional<Tensor>& mask, const std::optional<Tensor>& offsets,
                    bool shift, const Tensor& temperature) {
  return {{data<bool>(mask), row_map(logits, offsets, shift), logits.size(logits.dim() - 1),
           scalar_argument("temperature", temperature, logits)},
          data<T>(logits),
          data<T>(ref_logits),
          row_map(ref_logits, offsets, shift)};
}

template <typename T>
int threads_of(const PairRows<T>& rows) {
  return threads_for(2 * rows.classes * sizeof(T));
}

template <typename T>
auto forward_kernel(bool mixture, bool entropies) {
  return mixture ? (entropies ? forward_pairs<true, true, T> : forward_pairs<true, false, T>)
                 : (entropies ? forward_pairs<false, true, T> : forward_pairs<false, false, T>);
}

template <typename T>
auto backward_kernel(bool mixture, bool entropies) {
  return mixture ? (entropies ? backward_pairs<true, true, T> : backward_pairs<true, false, T>)
                 : (entropies ? backward_pairs<false, true, T> : backward_pairs<false, false, T>);
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, Tensor ref_logits,
                                           std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, double beta, bool entropies) {
  const OnDeviceOf device(logits);
  const PairResults results(logits, entropies);
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const PairRows<T> rows = rows_of<T>(logits, ref_logits, mask, offsets, shift, temperature);
    if (rows.map.tokens == 0) return;
    device.launch(forward_kernel<T>(is_mixture(beta), entropies), rows.map.tokens, threads_of(rows),
                  rows, shares_of(beta), results.outputs());
  });
  return results.tensors();
}

std::tuple<Tensor, Tensor> backward(Tensor grad_divergence, std::optional<Tensor> grad_entropies,
                                    Tensor logits, Tensor ref_logits, std::optional<Tensor> mask,
                                    std::optional<Tensor> offsets, bool shift, Tensor temperature,
                                    double beta, Tensor entropies, Tensor statistics,
                                    bool wants_grad, bool wants_grad_ref) {
  const OnDeviceOf device(logits);
  const auto output = [&](bool wanted) {
    return wanted ? empty_like_sizes(logits, logits, logits.scalar_type())
                  : empty_vector(logits, logits.scalar_type());
  };
  Tensor grad_logits = output(wants_grad), grad_ref_logits = output(wants_grad_ref);
  if (!wants_grad && !wants_grad_ref) return {grad_logits, grad_ref_logits};
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const PairRows<T> rows = rows_of<T>(logits, ref_logits, mask, offsets, shift, temperature);
    if (rows.map.tokens == 0) return;
    device.launch(backward_kernel<T>(is_mixture(beta), grad_entropies.has_value()), rows.map.tokens,
                  threads_of(rows), rows,
                  pair_upstream(grad_divergence, grad_entropies, entropies, statistics, beta),
                  wants_grad ? mutable_data<T>(grad_logits) : nullptr,
                  wants_grad_ref ? mutable_data<T>(grad_ref_logits) : nullptr);
  });
  return {grad_logits, grad_ref_logits};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("exact_kl", TORCH_BOX(&forward));
  m.impl("exact_kl_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
