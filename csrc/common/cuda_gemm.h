// Matrix products on CUDA through torch, also of half inputs with float32 results.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>

#include "common/tensor.h"

namespace fusedrl {

// out = a b, for a float32 `out`: by default (allow_bf16_reduced_precision_reduction), torch may
// sum half-precision outputs in half precision.
inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  if (out.scalar_type() == a.scalar_type()) {
    std::array<StableIValue, 3> stack{from(a), from(b), from(out)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // takes ownership of the returned reference
  } else {
    std::array<StableIValue, 4> stack{from(a), from(b), from(ScalarType::Float), from(out)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::mm", "dtype_out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);
  }
}

// The indices where a bool vector is true, int64 [count]; the host waits for the count.
inline Tensor indices_of(const Tensor& flags) {
  using torch::stable::detail::from;
  std::array<StableIValue, 1> stack{from(flags)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::nonzero", "", stack.data(), TORCH_ABI_VERSION));
  Tensor found = torch::stable::detail::to<Tensor>(stack[0]);
  return torch::stable::select(found, 1, 0);
}

}  // namespace fusedrl
