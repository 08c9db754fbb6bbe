// Stands in for csrc/common/cuda_gemm.h: matrix products of CPU tensors, in float32.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "common/tensor.h"

namespace fusedrl {

inline Tensor in_float(const Tensor& matrix) {
  return torch::stable::contiguous(torch::stable::to(matrix, ScalarType::Float));
}

// Every element is summed in the same order, which CPU libraries do not where matrices are narrow.
inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  check(a.scalar_type() == b.scalar_type(), "multiply: expected one dtype");
  check(out.scalar_type() == ScalarType::Float, "multiply: expected a float32 result");
  const std::vector<int64_t> sizes(out.sizes().begin(), out.sizes().end());
  Tensor product = torch::stable::new_empty(out, sizes), target = out;
  const Tensor left = in_float(a), right = in_float(b);
  const int64_t depth = a.size(1), columns = b.size(1);
  for (int64_t i = 0; i < product.numel(); ++i) {
    float sum = 0;
    for (int64_t k = 0; k < depth; ++k) {
      sum += data<float>(left)[i / columns * depth + k] *
             data<float>(right)[k * columns + i % columns];
    }
    mutable_data<float>(product)[i] = sum;
  }
  torch::stable::copy_(target, product);
}

extern "C" {
__attribute__((visibility("default"))) inline int64_t rows_counted = 0;
}

inline Tensor indices_of(const Tensor& flags) {
  ++rows_counted;
  AtenTensorHandle found;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_nonzero(flags.get(), &found));
  return torch::stable::select(Tensor(found), 1, 0);
}

}  // namespace fusedrl
