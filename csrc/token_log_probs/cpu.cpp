// CPU ops: kept rows are independent and divided among torch's threads; dropped rows are skipped.
#include <algorithm>
#include <tuple>

#include "common/cpu_ops.h"
#include "common/outside.h"
#include "common/rows.h"
#include "token_log_probs/cpu_rows.h"

namespace fusedrl {
namespace {

void check_targets(const std::vector<int64_t>& kept, const Tensor& tokens, int64_t classes) {
  const int64_t* targets = data<int64_t>(tokens);
  const int64_t columns = tokens.dim() == 2 ? tokens.size(1) : 0;
  for (const int64_t n : kept) {
    if (targets[n] >= 0 && targets[n] < classes) continue;
    refuse_class(targets[n], classes, n, columns);
  }
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, Tensor tokens, std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, bool entropy) {
  Tensor log_probs = empty_per_token(logits);
  Tensor entropies = entropy ? empty_per_token(logits) : empty_vector(logits, ScalarType::Float);
  Tensor normalizers = empty_per_token(logits, 2);
  check_offsets(offsets, tokens.numel());
  const RowMap map = row_map(logits, offsets, shift);
  const int64_t classes = logits.size(logits.dim() - 1);
  const int64_t* targets = data<int64_t>(tokens);
  const float inv_temperature = inverse_temperature(temperature);
  const std::vector<int64_t> kept = kept_tokens(map, data<bool>(mask));
  check_targets(kept, tokens, classes);

  float* out = mutable_data<float>(log_probs);
  float* out_entropy = entropy ? mutable_data<float>(entropies) : nullptr;
  Normalizer* out_normalizers = mutable_data<Normalizer>(normalizers);
  std::fill_n(out, map.tokens, 0.0f);
  std::fill_n(out_normalizers, map.tokens, Normalizer{0.0f, 0.0f});
  if (entropy) std::fill_n(out_entropy, map.tokens, 0.0f);
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const RowKernels<T> kernels = row_kernels<T>(cpu_level());
    const auto part_of = entropy ? kernels.part_entropy : kernels.part;
    const T* base = data<T>(logits);
    torch::stable::parallel_for(
        0, kept.size(), grain_rows(classes), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t n = kept[i];
            const T* row = base + map.element_of_row(map.row_of(n));
            const RowResult result = finish(part_of(row, classes, inv_temperature),
                                            static_cast<float>(row[targets[n]]), inv_temperature);
            out[n] = result.log_prob;
            out_normalizers[n] = result.normalizer;
            if (entropy) out_entropy[n] = result.entropy;
          }
        });
  });
  return {log_probs, entropies, normalizers};
}

Tensor backward(Tensor grad_log_probs, std::optional<Tensor> grad_entropy, Tensor logits,
                Tensor tokens, std::optional<Tensor> mask, std::optional<Tensor> offsets,
                bool shift, Tensor temperature, Tensor log_probs, Tensor entropy,
                Tensor normalizers) {
  Tensor grad_logits = empty_like_sizes(logits, logits, logits.scalar_type());
  check_offsets(offsets, tokens.numel());
  const RowMap map = row_map(logits, offsets, shift);
  const int64_t classes = logits.size(logits.dim() - 1);
  const int64_t* targets = data<int64_t>(tokens);
  const float inv_temperature = inverse_temperature(temperature);
  const std::vector<int64_t> kept = kept_tokens(map, data<bool>(mask));

  const float* up = data<float>(grad_log_probs);
  const float* up_entropy = data<float>(grad_entropy);
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const auto run = row_kernels<T>(cpu_level()).backward;
    const T* base = data<T>(logits);
    T* grad = mutable_data<T>(grad_logits);
    torch::stable::parallel_for(
        0, kept.size(), grain_rows(classes), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t n = kept[i], r = map.row_of(n);
            const RowGradient gradient{up[n], up_entropy == nullptr ? 0.0f : up_entropy[n],
                                       up_entropy == nullptr ? 0.0f : data<float>(entropy)[n],
                                       data<Normalizer>(normalizers)[n], inv_temperature};
            T* grad_row = grad + r * classes;
            run(base + map.element_of_row(r), grad_row, classes, gradient);
            grad_row[targets[n]] = T(gradient.target(data<float>(log_probs)[n]));
          }
        });
    zero_unread_rows(grad, map, kept, classes);
  });
  return grad_logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("token_log_probs", TORCH_BOX(&forward));
  m.impl("token_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
