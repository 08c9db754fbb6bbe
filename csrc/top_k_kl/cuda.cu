// CUDA ops: launches and registration. Nothing here waits for the device.
#include <tuple>

#include "common/cuda.h"
#include "common/rows.h"
#include "common/tile_sizes.h"
#include "top_k_kl/kernels.h"

namespace fusedrl {
namespace {

int64_t blocks_for(int64_t tokens) { return (tokens + kElementThreads - 1) / kElementThreads; }

template <typename T>
LogitRows<T> rows_of(const Tensor& logits, const std::optional<Tensor>& mask,
                     const std::optional<Tensor>& offsets, bool shift, const Tensor& temperature) {
  return {{data<bool>(mask), row_map(logits, offsets, shift), logits.size(logits.dim() - 1),
           scalar_argument("temperature", temperature, logits)},
          data<T>(logits)};
}

DeviceIds ids_of(const Tensor& ids) { return {data<int64_t>(ids), ids.size(ids.dim() - 1)}; }

std::tuple<Tensor, Tensor> forward(Tensor logits, Tensor ids, std::optional<Tensor> mask,
                                   std::optional<Tensor> offsets, bool shift, Tensor temperature) {
  const OnDeviceOf device(logits);
  const DeviceIds of_tokens = ids_of(ids);
  Tensor log_probs = empty_per_token(logits, of_tokens.k + 1);
  Tensor normalizers = empty_per_token(logits, 2);
  const Tensor rest = empty_per_token(logits, 3);
  const TopKOutputs out{of_tokens, mutable_data<float>(log_probs),
                        mutable_data<SoftmaxPart<float>>(rest),
                        mutable_data<Normalizer>(normalizers)};
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const LogitRows<T> rows = rows_of<T>(logits, mask, offsets, shift, temperature);
    const int64_t tokens = rows.map.tokens;
    if (tokens == 0) return;
    const auto split = rows.are_aligned() ? split_rows<true, T> : split_rows<false, T>;
    device.launch(split, tokens, threads_for(rows.classes * sizeof(T)), rows, out);
    device.launch(finish_top_k_rows, blocks_for(tokens), kElementThreads, KeptRows(rows), out);
  });
  return {log_probs, normalizers};
}

Tensor backward(Tensor grad_log_probs, Tensor logits, Tensor ids, std::optional<Tensor> mask,
                std::optional<Tensor> offsets, bool shift, Tensor temperature, Tensor log_probs,
                Tensor normalizers) {
  const OnDeviceOf device(logits);
  Tensor grad_logits = empty_like_sizes(logits, logits, logits.scalar_type());
  const Tensor of_rows = empty_per_token(logits, 2);
  const TopKUpstream upstream{ids_of(ids), data<float>(grad_log_probs), data<float>(log_probs),
                              data<Normalizer>(normalizers), mutable_data<TopKGradient>(of_rows)};
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const LogitRows<T> rows = rows_of<T>(logits, mask, offsets, shift, temperature);
    const int64_t tokens = rows.map.tokens;
    if (tokens == 0) return;
    device.launch(start_gradients, blocks_for(tokens), kElementThreads, KeptRows(rows), upstream);
    device.launch(differentiate_rows<T>, tokens, threads_for(rows.classes * sizeof(T)), rows,
                  upstream, mutable_data<T>(grad_logits));
  });
  return grad_logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("top_k_kl_log_probs", TORCH_BOX(&forward));
  m.impl("top_k_kl_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
