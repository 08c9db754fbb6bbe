// CUDA ops: one tile of matrix products at a time, consumed immediately.
#include <tuple>
#include <type_traits>

#include "common/cuda_head.h"
#include "linear_token_log_probs/kernels.h"

namespace fusedrl {
namespace {

// Accumulates each row's softmax over the tiles and, if `sums` are requested, the weighted sum of
// the weights of all classes except the target.
template <typename T>
Tensor add_tiles(const OnDeviceOf& device, const HeadRows& rows, CudaHead<T>& head,
                 const Tensor& hidden, const Tensor& weight, const int64_t* targets, bool entropy,
                 bool sums_weights, VocabPart* parts) {
  const auto add = entropy ? add_tile<true, T> : add_tile<false, T>;
  const auto add_to_parts = [&](int64_t first_class, int64_t first_row) {
    const Tile<T> tile = head.tile(first_class, first_row);
    device.launch(add, tile.rows, threads_for(tile.classes * sizeof(float)), tile, rows.kept,
                  rows.rows, targets, parts);
    return tile;
  };
  // Never requested for float16 weights, whose range is too small for the exponentials.
  if constexpr (!std::is_same_v<T, Half>) {
    if (sums_weights) {
      CudaHeadGradient<T> sums(device, rows, head, hidden, weight, true, false, false);
      const Tensor relative_to = new_matrix(hidden, rows.kept.count, 1, ScalarType::Float);
      Tensor start = relative_to;
      torch::stable::fill_(start, -INFINITY);
      for_each_tile(
          rows.tiles,
          [&](int64_t first_class, int64_t first_row) {
            const Tile<T> tile = add_to_parts(first_class, first_row);
            device.launch(weigh_tile<T>, tile.rows, threads_for(tile.classes * sizeof(float)), tile,
                          rows.kept, rows.rows, targets, parts, mutable_data<float>(relative_to),
                          sums.hidden_sums(), weight.size(1), sums.grads(first_class, first_row));
          },
          [&](int64_t first_class, int64_t first_row) { sums.add(first_class, first_row); });
      return std::get<0>(sums.result(true));
    }
  }
  for_each_tile(rows.tiles, add_to_parts);
  return empty_vector(hidden, ScalarType::Float);
}

// backward() recomputes the logits, unless they are one tile, which is stored, or only the hidden
// states have a gradient: then the sums of weights are stored.
std::tuple<Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight, std::optional<Tensor> bias,
                                           Tensor tokens, std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, bool shift,
                                           Tensor temperature, double scale, double softcap,
                                           bool entropy, std::optional<int64_t> vocab_offset,
                                           bool batch_invariant, int64_t stored_bytes,
                                           bool sums_weights,
                                           std::optional<Tensor> /*rounds_grads*/) {
  const OnDeviceOf device(hidden);
  Tensor parts = empty_per_token(hidden, 4);
  Tensor stored = sums_weights ? torch::stable::new_zeros(hidden, hidden.sizes(), ScalarType::Float)
                               : empty_vector(hidden, ScalarType::Float);
  if (tokens.numel() == 0) return {parts, stored, empty_vector(hidden, ScalarType::Long)};
  VocabPart* out = mutable_data<VocabPart>(parts);
  const int64_t* targets = data<int64_t>(tokens);
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.batch_invariant = batch_invariant, .one_a_block = sums_weights});
  device.launch(start_parts, element_blocks(tokens.numel()), kElementThreads, rows.rows, targets,
                !vocab_offset.has_value(), vocab_offset.value_or(0) == 0, out);
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    CudaHead<T> head(device, rows, hidden, weight, bias, scale, softcap, std::nullopt,
                     vocab_offset.value_or(0));
    const Tensor sums =
        add_tiles(device, rows, head, hidden, weight, targets, entropy, sums_weights, out);
    stored = sums_weights ? sums : head.stored(stored_bytes);
  });
  return {parts, stored, rows.stored(stored_bytes)};
}

std::tuple<Tensor, Tensor, Tensor> combine(Tensor parts, Tensor temperature, bool entropy) {
  const OnDeviceOf device(parts);
  const Tensor one = torch::stable::select(parts, 0, 0);
  Tensor log_probs = empty_per_token(one);
  Tensor entropies = entropy ? empty_per_token(one) : empty_vector(one, ScalarType::Float);
  Tensor normalizers = empty_per_token(one, 2);
  const int64_t tokens = log_probs.numel();
  if (tokens == 0) return {log_probs, entropies, normalizers};
  device.launch(finish_parts, element_blocks(tokens), kElementThreads, data<VocabPart>(parts),
                parts.size(0), tokens, scalar_argument("temperature", temperature, parts),
                mutable_data<float>(log_probs), entropy ? mutable_data<float>(entropies) : nullptr,
                mutable_data<Normalizer>(normalizers));
  return {log_probs, entropies, normalizers};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor grad_log_probs, std::optional<Tensor> grad_entropy, Tensor hidden, Tensor weight,
    std::optional<Tensor> bias, Tensor tokens, std::optional<Tensor> mask,
    std::optional<Tensor> offsets, bool shift, Tensor temperature, double scale, double softcap,
    Tensor log_probs, Tensor entropy, Tensor normalizers, Tensor logits, Tensor kept,
    std::optional<int64_t> vocab_offset, bool batch_invariant, bool of_hidden, bool of_weight,
    bool of_bias, std::optional<Tensor> /*rounds_grads*/) {
  const OnDeviceOf device(hidden);
  const TokenGradients upstream{data<float>(grad_log_probs), data<float>(grad_entropy),
                                data<float>(log_probs), data<float>(entropy),
                                data<Normalizer>(normalizers)};
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.batch_invariant = batch_invariant}, kept);
  std::tuple<Tensor, Tensor, Tensor> grads{hidden, hidden, hidden};
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    CudaHead<T> head(device, rows, hidden, weight, bias, scale, softcap, std::nullopt,
                     vocab_offset.value_or(0), logits);
    CudaHeadGradient<T> gradient(device, rows, head, hidden, weight, of_hidden, of_weight, of_bias);
    for_each_tile(
        rows.tiles,
        [&](int64_t first_class, int64_t first_row) {
          const Tile<T> tile = head.tile(first_class, first_row);
          device.launch(differentiate_tile<T>, tile.rows, threads_for(tile.classes * sizeof(float)),
                        tile, rows.kept, rows.rows, data<int64_t>(tokens), upstream,
                        gradient.grads(first_class, first_row));
        },
        [&](int64_t first_class, int64_t first_row) { gradient.add(first_class, first_row); });
    // The ranks of a sharded vocabulary sum their gradients before rounding.
    grads = gradient.result(vocab_offset.has_value());
  });
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("linear_token_log_probs", TORCH_BOX(&forward));
  m.impl("linear_token_log_probs_finish", TORCH_BOX(&combine));
  m.impl("linear_token_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
