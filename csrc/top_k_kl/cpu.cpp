// CPU ops: kept rows are independent, shared out among torch's threads; dropped ones cost nothing.
#include <algorithm>
#include <tuple>

#include "common/cpu_ops.h"
#include "common/rows.h"
#include "token_log_probs/cpu_rows.h"
#include "top_k_kl/ids.h"
#include "top_k_kl/math.h"

namespace fusedrl {
namespace {

// Classes of a row that are copied at a time, to leave the ids out of the copy.
constexpr int64_t kChunk = 4096;

// The logits of a token's ids, and the statistics of all others.
template <typename T>
SoftmaxPart<double> split_row(const T* row, int64_t classes, const Ids& ids, int64_t token,
                              float inv_temperature, float* of_ids) {
  const auto part_of = row_kernels<T>(cpu_level()).part;
  T copy[kChunk];
  SoftmaxPart<double> rest;
  for (int64_t first = 0; first < classes; first += kChunk) {
    const int64_t count = std::min(kChunk, classes - first);
    const T* chunk = row + first;
    ids.for_each_in(token, first, count, [&](int64_t j, int64_t place) {
      if (chunk != copy) std::copy_n(row + first, count, copy);
      chunk = copy;
      of_ids[j] = static_cast<float>(copy[place]);
      copy[place] = T(-INFINITY);
    });
    rest = merge(rest, part_of(chunk, count, inv_temperature), inv_temperature);
  }
  return rest;
}

std::tuple<Tensor, Tensor> forward(Tensor logits, Tensor ids_of_tokens, std::optional<Tensor> mask,
                                   std::optional<Tensor> offsets, bool shift, Tensor temperature) {
  const Ids ids(ids_of_tokens);
  Tensor log_probs = empty_per_token(logits, ids.k + 1);
  Tensor normalizers = empty_per_token(logits, 2);
  const RowMap map = row_map(logits, offsets, shift);
  check_offsets(offsets, map.tokens);
  const int64_t classes = logits.size(logits.dim() - 1);
  const float inv_temperature = inverse_temperature(temperature);
  const std::vector<int64_t> kept = kept_tokens(map, data<bool>(mask));
  ids.check_of(kept, classes);

  float* out = mutable_data<float>(log_probs);
  Normalizer* out_normalizers = mutable_data<Normalizer>(normalizers);
  std::fill_n(out, log_probs.numel(), 0.0f);
  std::fill_n(out_normalizers, map.tokens, Normalizer{0.0f, 0.0f});
  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const T* base = data<T>(logits);
    torch::stable::parallel_for(
        0, kept.size(), grain_rows(classes), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t n = kept[i];
            const T* row = base + map.element_of_row(map.row_of(n));
            float* out_row = out + n * (ids.k + 1);
            const SoftmaxPart<double> rest =
                split_row(row, classes, ids, n, inv_temperature, out_row);
            out_normalizers[n] = finish_top_k(rest, ids.of(n), ids.k, inv_temperature, out_row);
          }
        });
  });
  return {log_probs, normalizers};
}

Tensor backward(Tensor grad_log_probs, Tensor logits, Tensor ids_of_tokens,
                std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift,
                Tensor temperature, Tensor log_probs, Tensor normalizers) {
  const Ids ids(ids_of_tokens);
  Tensor grad_logits = empty_like_sizes(logits, logits, logits.scalar_type());
  const RowMap map = row_map(logits, offsets, shift);
  check_offsets(offsets, map.tokens);
  const int64_t classes = logits.size(logits.dim() - 1);
  const float inv_temperature = inverse_temperature(temperature);
  const std::vector<int64_t> kept = kept_tokens(map, data<bool>(mask));

  dispatch_half_or_float(logits, "logits", [&]<typename T>() {
    const auto run = row_kernels<T>(cpu_level()).backward;
    const T* base = data<T>(logits);
    T* grad = mutable_data<T>(grad_logits);
    torch::stable::parallel_for(
        0, kept.size(), grain_rows(classes), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t n = kept[i], r = map.row_of(n);
            const float* up = data<float>(grad_log_probs) + n * (ids.k + 1);
            const float* of_classes = data<float>(log_probs) + n * (ids.k + 1);
            const TopKGradient gradient(up, of_classes, ids.of(n), ids.k);
            T* grad_row = grad + r * classes;
            run(base + map.element_of_row(r), grad_row, classes,
                gradient.of_rest(data<Normalizer>(normalizers)[n], inv_temperature));
            ids.for_each_in(n, 0, classes, [&](int64_t j, int64_t v) {
              grad_row[v] = T(gradient.of_id(up[j], of_classes[j], inv_temperature));
            });
          }
        });
    zero_unread_rows(grad, map, kept, classes);
  });
  return grad_logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("top_k_kl_log_probs", TORCH_BOX(&forward));
  m.impl("top_k_kl_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
