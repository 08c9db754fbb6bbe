// CUDA ops: launches and registration. Nothing here waits for the device.
#include "common/cuda.h"
#include "sampled_products/kernels.h"

namespace fusedrl {
namespace {

Tensor forward(Tensor hidden, Tensor weight, Tensor rows, Tensor ids) {
  const OnDeviceOf device(hidden);
  Tensor products = empty_like_sizes(hidden, ids, ScalarType::Float);
  const int64_t count = ids.numel(), warps = kSampledThreads / kWarp;
  if (count == 0) return products;
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    device.launch(multiply_sampled<T>, (count + warps - 1) / warps, kSampledThreads,
                  IndexedRows<T>::of(hidden), IndexedRows<T>::of(weight), data<int64_t>(rows),
                  data<int64_t>(ids), count, mutable_data<float>(products));
  });
  return products;
}

Tensor backward(Tensor grads, Tensor index, Tensor begins, Tensor ends, Tensor matrix) {
  const OnDeviceOf device(matrix);
  const int64_t rows = begins.numel();
  Tensor out = torch::stable::new_empty(matrix, std::vector<int64_t>{rows, matrix.size(1)});
  if (rows == 0) return out;
  dispatch_half_or_float(matrix, "matrix", [&]<typename T>() {
    device.launch(sum_sampled<T>, rows, kSampledThreads, IndexedRows<T>::of(matrix),
                  data<float>(grads), data<int64_t>(index), data<int64_t>(begins),
                  data<int64_t>(ends), rows, mutable_data<T>(out));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) {
  m.impl("sampled_products", TORCH_BOX(&forward));
  m.impl("sampled_products_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
