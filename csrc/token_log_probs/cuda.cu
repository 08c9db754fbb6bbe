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
  const Outputs out{mutable_data<float>(log_probs),
                    entropy ? mutable_data<float>(entropies) : nullptr,
                    mutable_data<Normalizer>(normalizers)};
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const Rows<T> rows = rows_of<T>(logits, tokens, mask, offsets, shift, temperature);
    const int64_t count = rows.map.tokens;
    if (count == 0) return;
    const int threads = threads_for(rows.classes * sizeof(T));
    const int64_t batches = batches_of<T>(rows.classes, threads);
    if (batches < 2 || count >= device.blocks_at_once()) {
      const auto kernel = entropy ? forward_rows<true, T> : forward_rows<false, T>;
      device.launch(kernel, count, threads, rows, out);
      return;
    }
    const Tensor parts = torch::stable::new_empty(
        logits, std::vector<int64_t>{count * batches * threads, 3}, ScalarType::Float);
    SoftmaxPart<float>* of_batches = mutable_data<SoftmaxPart<float>>(parts);
    device.launch(entropy ? forward_batches<true, T> : forward_batches<false, T>, count * batches,
                  threads, rows, batches, of_batches);
    device.launch(entropy ? merge_batches<true, T> : merge_batches<false, T>, count, threads, rows,
                  batches, of_batches, out);
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
    const int threads = threads_for(rows.classes * sizeof(T));
    const int64_t pieces = rows.map.tokens < device.blocks_at_once()
                               ? std::max<int64_t>(batches_of<T>(rows.classes, threads), 1)
                               : 1;
    device.launch(backward_rows<T>, rows.map.tokens * pieces, threads, rows, pieces,
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
