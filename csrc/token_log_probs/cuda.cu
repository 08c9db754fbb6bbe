// CUDA ops: launches and registration. Nothing here waits for the device.
#include <tuple>

#include "common/cuda.h"
#include "common/rows.h"
#include "token_log_probs/kernels.h"

namespace fusedrl {
namespace {

template <typename T>
Rows<T> rows_of(const Tensor& logits, const Tensor& tokens, const std::optional<Tensor>& mask,
                const std::optional<Tensor>& offsets, bool shift, const Tensor& temperature) {
  return {{data<bool>(mask), row_map(logits, offsets, shift), logits.size(logits.dim() - 1),
           scalar_argument("temperature", temperature, logits)},
          data<T>(logits),
          data<int64_t>(tokens)};
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, Tensor tokens, std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, bool entropy) {
  const OnDeviceOf device(logits);
  Tensor log_probs = empty_per_token(logits);
  Tensor entropies = entropy ? empty_per_token(logits) : empty_vector(logits, ScalarType::Float);
  Tensor normalizers = empty_per_token(logits, 2);
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const Rows<T> rows = rows_of<T>(logits, tokens, mask, offsets, shift, temperature);
    if (rows.map.tokens == 0) return;
    const auto kernel = entropy ? forward_rows<true, T> : forward_rows<false, T>;
    device.launch(kernel, rows.map.tokens, threads_for(rows.classes * sizeof(T)), rows,
                  mutable_data<float>(log_probs), mutable_data<float>(entropies),
                  mutable_data<Normalizer>(normalizers));
  });
  return {log_probs, entropies, normalizers};
}

Tensor backward(Tensor grad_log_probs, std::optional<Tensor> grad_entropy, Tensor logits,
                Tensor tokens, std::optional<Tensor> mask, std::optional<Tensor> offsets,
                bool shift, Tensor temperature, Tensor log_probs, Tensor entropy,
                Tensor normalizers) {
  const OnDeviceOf device(logits);
  Tensor grad_logits = empty_like_sizes(logits, logits, logits.scalar_type());
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const Rows<T> rows = rows_of<T>(logits, tokens, mask, offsets, shift, temperature);
    if (rows.map.tokens == 0) return;
    device.launch(backward_rows<T>, rows.map.tokens, threads_for(rows.classes * sizeof(T)), rows,
                  data<float>(grad_log_probs), data<float>(grad_entropy), data<float>(log_probs),
                  data<float>(entropy), data<Normalizer>(normalizers),
                  mutable_data<T>(grad_logits));
  });
  return grad_logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("token_log_probs", TORCH_BOX(&forward));
  m.impl("token_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
