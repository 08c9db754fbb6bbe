// CUDA ops: matrix products a tile at a time, each consumed by a kernel right after.
#include <tuple>

#include "common/cuda_head.h"
#include "linear_top_k_kl/kernels.h"

namespace fusedrl {
namespace {

DeviceIds ids_of(const Tensor& ids) { return {data<int64_t>(ids), ids.size(ids.dim() - 1)}; }

// backward() multiplies again, unless all logits are one tile, which is stored.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight,
                                                   std::optional<Tensor> bias, Tensor ids,
                                                   std::optional<Tensor> mask,
                                                   std::optional<Tensor> offsets, bool shift,
                                                   Tensor temperature, double scale, double softcap,
                                                   bool batch_invariant, int64_t stored_bytes) {
  const OnDeviceOf device(hidden);
  const DeviceIds of_tokens = ids_of(ids);
  Tensor log_probs = empty_per_token(hidden, of_tokens.k + 1);
  Tensor normalizers = empty_per_token(hidden, 2);
  Tensor logits = empty_vector(hidden, ScalarType::Float);
  const Tensor rest = empty_per_token(hidden, 3);
  const TopKOutputs out{of_tokens, mutable_data<float>(log_probs),
                        mutable_data<SoftmaxPart<float>>(rest),
                        mutable_data<Normalizer>(normalizers)};
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.batch_invariant = batch_invariant});
  const int64_t tokens = rows.rows.map.tokens;
  if (tokens == 0) return {log_probs, normalizers, logits, rows.stored(stored_bytes)};
  device.launch(start_rests, element_blocks(tokens), kElementThreads, out.rest, tokens);
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    CudaHead<T> head(device, rows, hidden, weight, bias, scale, softcap);
    for_each_tile(rows.tiles, [&](int64_t first_class, int64_t first_row) {
      const Tile<T> tile = head.tile(first_class, first_row);
      device.launch(split_tile<T>, tile.rows, threads_for(tile.classes * sizeof(float)), tile,
                    rows.kept, rows.rows, out);
    });
    logits = head.stored(stored_bytes);
  });
  device.launch(finish_top_k_rows, element_blocks(tokens), kElementThreads, rows.rows, out);
  return {log_probs, normalizers, logits, rows.stored(stored_bytes)};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor grad_log_probs, Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor ids,
    std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift, Tensor temperature,
    double scale, double softcap, Tensor log_probs, Tensor normalizers, Tensor logits, Tensor kept,
    bool batch_invariant, bool of_hidden, bool of_weight, bool of_bias,
    std::optional<Tensor> /*rounds_grads*/) {
  const OnDeviceOf device(hidden);
  const Tensor of_rows = empty_per_token(hidden, 2);
  const TopKUpstream upstream{ids_of(ids), data<float>(grad_log_probs), data<float>(log_probs),
                              data<Normalizer>(normalizers), mutable_data<TopKGradient>(of_rows)};
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.batch_invariant = batch_invariant}, kept);
  const int64_t tokens = rows.rows.map.tokens;
  if (tokens > 0) {
    device.launch(start_gradients, element_blocks(tokens), kElementThreads, rows.rows, upstream);
  }
  std::tuple<Tensor, Tensor, Tensor> grads{hidden, hidden, hidden};
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    CudaHead<T> head(device, rows, hidden, weight, bias, scale, softcap, std::nullopt, 0, logits);
    CudaHeadGradient<T> gradient(device, rows, head, hidden, weight, of_hidden, of_weight, of_bias);
    for_each_tile(
        rows.tiles,
        [&](int64_t first_class, int64_t first_row) {
          const Tile<T> tile = head.tile(first_class, first_row);
          device.launch(differentiate_top_k_tile<T>, tile.rows,
                        threads_for(tile.classes * sizeof(float)), tile, rows.kept, rows.rows,
                        upstream, gradient.grads(first_class, first_row));
        },
        [&](int64_t first_class, int64_t first_row) { gradient.add(first_class, first_row); });
    grads = gradient.result();
  });
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("linear_top_k_kl_log_probs", TORCH_BOX(&forward));
  m.impl("linear_top_k_kl_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
