// CUDA op: the matrix product of a block of rows, what becomes of it, and two more for gradients.
#include <optional>
#include <tuple>
#include <vector>

#include "common/cuda_head.h"
#include "linear_policy_loss/kernels.h"
#include "linear_policy_loss/tokens.h"

namespace fusedrl {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss(
    Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor tokens,
    std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift, Tensor temperature,
    double scale, double softcap, Tensor advantages, std::optional<Tensor> old_log_probs,
    std::optional<Tensor> ref_log_probs, Tensor weights, int64_t surrogate, double low, double high,
    double most, int64_t estimator, bool entropy, bool of_hidden, bool of_weight, bool of_bias,
    std::optional<Tensor> /*rounds_grads*/) {
  const OnDeviceOf device(hidden);
  std::vector<int64_t> sizes(tokens.sizes().begin(), tokens.sizes().end());
  sizes.push_back(kPolicyRowFloats);
  const Tensor results = new_zeros(hidden, sizes, ScalarType::Float);
  const PolicyTokens policy = policy_tokens(advantages, old_log_probs, ref_log_probs, weights,
                                            surrogate, low, high, most, estimator);
  // Without a sum of the weight's gradient over blocks of rows, there is room for as many bytes of
  // gradients of products.
  const int64_t sum_bytes = of_weight ? weight.numel() * int64_t(sizeof(float)) : 0;
  const HeadRows rows(device, hidden, mask, offsets, shift, temperature, weight.size(0),
                      {.whole_rows = true,
                       .gradient_elements = std::max(kGradientElements,
                                                     sum_bytes / int64_t(hidden.element_size()))});
  const auto none = [&] { return empty_vector(hidden, hidden.scalar_type()); };
  std::tuple<Tensor, Tensor, Tensor> grads{none(), none(), none()};
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    CudaHead<T> head(device, rows, hidden, weight, bias, scale, softcap);
    std::optional<CudaHeadGradient<T>> gradient;
    if (of_hidden || of_weight || of_bias) {
      gradient.emplace(device, rows, head, hidden, weight, of_hidden, of_weight, of_bias,
                       weight.scalar_type() == ScalarType::Half);
    }
    const auto run = entropy ? policy_rows<true, T> : policy_rows<false, T>;
    for_each_tile(
        rows.tiles,
        [&](int64_t first_class, int64_t first_row) {
          const Tile<T> tile = head.tile(first_class, first_row);
          device.launch(
              run, tile.rows, threads_for(tile.classes * sizeof(float)), tile, rows.kept, rows.rows,
              data<int64_t>(tokens), policy, mutable_data<PolicyRow>(results),
              gradient.has_value() ? gradient->grads(first_class, first_row) : GradTile<T>{});
        },
        [&](int64_t first_class, int64_t first_row) {
          if (gradient.has_value()) gradient->add(first_class, first_row);
        });
    if (gradient.has_value()) grads = gradient->result(true, true);
  });
  const auto& [grad_hidden, grad_weight, grad_bias] = grads;
  return {results, grad_hidden, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("linear_policy_loss", TORCH_BOX(&policy_loss));
}

}  // namespace fusedrl
