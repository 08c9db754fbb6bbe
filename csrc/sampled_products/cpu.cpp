// CPU ops: an entry, or a row of the gradient, after the other. No bit depends on how many there
// are.
#include "common/cpu_ops.h"
#include "common/cpu_share.h"
#include "sampled_products/cpu_rows.h"

namespace fusedrl {
namespace {

Tensor forward(Tensor hidden, Tensor weight, Tensor rows, Tensor ids) {
  Tensor products = empty_like_sizes(hidden, ids, ScalarType::Float);
  const int64_t *row = data<int64_t>(rows), *id = data<int64_t>(ids);
  float* out = mutable_data<float>(products);
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    const auto a = IndexedRows<T>::of(hidden), b = IndexedRows<T>::of(weight);
    const auto dot = sampled_kernels<T>(cpu_level()).dot;
    torch::stable::parallel_for(
        0, ids.numel(), grain_rows(a.width), [&](int64_t begin, int64_t end) {
          for (int64_t s = begin; s < end; ++s) {
            out[s] = row[s] < 0 ? 0.0f : dot(a.row(row[s]), b.row(id[s]), a.width);
          }
        });
  });
  return products;
}

Tensor backward(Tensor grads, Tensor index, Tensor begins, Tensor ends, Tensor matrix) {
  const int64_t count = begins.numel(), width = matrix.size(1);
  Tensor out = torch::stable::new_empty(matrix, std::vector<int64_t>{count, width});
  const int64_t *begin = data<int64_t>(begins), *end = data<int64_t>(ends);
  dispatch_half_or_float(matrix, "matrix", [&]<typename T>() {
    const auto from = IndexedRows<T>::of(matrix);
    const auto sum = sampled_kernels<T>(cpu_level()).sum;
    const Spans parts{{0, count}, grain_rows(width)};
    // Likely classes have many entries, most have none.
    share(
        parts.count(), [] { return 0; },
        [&](int, int64_t i) {
          for (int64_t r = parts[i].first; r < parts[i].end(); ++r) {
            T* row = mutable_data<T>(out) + r * width;
            if (begin[r] == end[r]) {
              std::memset(static_cast<void*>(row), 0, width * sizeof(T));
            } else {
              sum(from, data<float>(grads) + begin[r], data<int64_t>(index) + begin[r],
                  end[r] - begin[r], row);
            }
          }
        });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("sampled_products", TORCH_BOX(&forward));
  m.impl("sampled_products_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
