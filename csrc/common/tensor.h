// Helpers for torch's stable ABI: short names, optional pointers, and dispatch by dtype.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "common/check.h"

namespace fusedrl {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// A 0-dim bool that is not given is false.
inline bool is_set(const std::optional<Tensor>& flag) {
  return flag.has_value() && *data<bool>(flag);
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline Tensor empty_like_sizes(const Tensor& like, const Tensor& sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, sizes.sizes(), dtype);
}

inline Tensor empty_vector(const Tensor& like, ScalarType dtype) {
  return torch::stable::new_empty(like, std::vector<int64_t>{0}, dtype);
}

// Checked here too, as compiled graphs skip the checks in Python, and kernels index with these.
inline void check_offsets(const std::optional<Tensor>& offsets, int64_t tokens) {
  if (!offsets.has_value()) return;
  const int64_t* bounds = data<int64_t>(offsets);
  const int64_t count = offsets->numel();
  bool valid = count > 0 && bounds[0] == 0 && bounds[count - 1] == tokens;
  for (int64_t i = 1; valid && i < count; ++i) valid = bounds[i - 1] <= bounds[i];
  check(valid, "offsets: expected non-decreasing values from 0 to ", tokens,
        ", got others; pass 0 and the running sum of the sequence lengths");
}

// Calls f.operator()<T>() with the element type of a floating-point tensor.
template <typename F>
void dispatch_half_or_float(const Tensor& tensor, const char* name, F&& f) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return f.template operator()<float>();
    case ScalarType::BFloat16:
      return f.template operator()<BFloat16>();
    case ScalarType::Half:
      return f.template operator()<Half>();
    default:
      check(false, name,
            ": expected dtype float32, bfloat16 or float16, got another; convert it with .float()");
  }
}

template <typename F>
void dispatch_floating(const Tensor& tensor, const char* name, F&& f) {
  if (tensor.scalar_type() == ScalarType::Double) return f.template operator()<double>();
  dispatch_half_or_float(tensor, name, std::forward<F>(f));
}

}  // namespace fusedrl
