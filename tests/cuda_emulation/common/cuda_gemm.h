// Stands in for csrc/common/cuda_gemm.h: matrix products of CPU tensors, in float32.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "common/tensor.h"

namespace fusedrl {

inline Tensor in_float(const Tensor& matrix) {
  return torch::stable::to(matrix, ScalarType::Float);
}

inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "multiply: expected one dtype");
  const std::vector<int64_t> sizes(out.sizes().begin(), out.sizes().end());
  Tensor product = torch::stable::new_empty(out, sizes, ScalarType::Float), target = out;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_mm_out(product.get(), in_float(a).get(), in_float(b).get()));
  torch::stable::copy_(target, product);
}

inline Tensor indices_of(const Tensor& flags) {
  AtenTensorHandle found;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_nonzero(flags.get(), &found));
  return torch::stable::select(Tensor(found), 1, 0);
}

}  // namespace fusedrl
