// Where tensors of torch lie, by the C functions of DLPack that their class has.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "host/dlpack.h"
#include "host/expect.h"
#include "host/python_objects.h"
#include "token_kl/sample_memory.h"

namespace fusedrl {

namespace py = pybind11;

// The dtype of kernels; nothing for another one.
inline std::optional<SampleDtype> dtype_of(const dlpack::Tensor& tensor) {
  constexpr uint8_t kFloat = 2, kBfloat = 4;
  const dlpack::Dtype dtype = tensor.dtype;
  if (dtype.lanes != 1) return std::nullopt;
  if (dtype.code == kBfloat && dtype.bits == 16) return SampleDtype::bfloat16;
  if (dtype.code != kFloat) return std::nullopt;
  switch (dtype.bits) {
    case 16:
      return SampleDtype::float16;
    case 32:
      return SampleDtype::float32;
    case 64:
      return SampleDtype::float64;
    default:
      return std::nullopt;
  }
}

inline bool is_bool(const dlpack::Tensor& tensor) {
  constexpr uint8_t kBool = 6;
  return tensor.dtype.code == kBool && tensor.dtype.bits == 8 && tensor.dtype.lanes == 1;
}

inline int64_t elements(const dlpack::Tensor& tensor) {
  int64_t count = 1;
  for (int32_t d = 0; d < tensor.ndim; ++d) count *= tensor.shape[d];
  return count;
}

inline bool same_shape(const dlpack::Tensor& one, const dlpack::Tensor& other) {
  return one.ndim == other.ndim && std::equal(one.shape, one.shape + one.ndim, other.shape);
}

// How tensors of torch are read: by the C functions of DLPack, which their class has.
class TensorReader {
 public:
  using Column = std::vector<dlpack::Tensor>;

  TensorReader(py::object tensor, const py::capsule& functions, bool may_require_grad)
      : tensor_(std::move(tensor)),
        functions_(functions.get_pointer<dlpack::ExchangeFunctions>()),
        may_require_grad_(may_require_grad) {}

  // Contiguous memory of the CPU; nothing for a tensor that is more than that: of another class,
  // with a gradient to record, negated lazily, without memory.
  std::optional<dlpack::Tensor> read(py::handle value) const {
    return has_its_values(value) ? memory_of(value) : std::nullopt;
  }

  // The same for each tensor of columns, which have one value a row; nothing if one is not so.
  std::optional<std::vector<Column>> read_columns(const std::vector<py::tuple>& columns) const {
    for (const py::tuple& column : columns) {
      for (const py::handle value : column) {
        if (is_exactly(value, tensor_)) expect_tensor(value.ptr());
      }
    }
    // This comes first, because torch lets other threads run in it.
    for (const py::tuple& column : columns) {
      for (const py::handle value : column) {
        if (!has_its_values(value)) return std::nullopt;
      }
    }
    std::vector<Column> found(columns.size());
    for (size_t c = 0; c < columns.size(); ++c) {
      found[c].reserve(columns[c].size());
      for (const py::handle value : columns[c]) {
        const auto tensor = memory_of(value);
        if (!tensor || !has_one_value_a_row(*tensor)) return std::nullopt;
        found[c].push_back(*tensor);
      }
    }
    return found;
  }

  static const void* address(const dlpack::Tensor& tensor) {
    return static_cast<const char*>(tensor.data) + tensor.byte_offset;
  }

  // Whether what torch has just made like a tensor that was read is plain, too, and its memory. A
  // mode may have made something else.
  bool is_made(const py::object& value, void*& memory) const {
    dlpack::Tensor found;
    if (!is_exactly(value, tensor_) || !describe(value, found)) return false;
    memory = const_cast<void*>(address(found));
    return true;
  }

 private:
  // Whether the memory of a tensor has its values, and not those of the other sign.
  bool has_its_values(py::handle value) const {
    if (!is_exactly(value, tensor_)) return false;
    return checked(PyObject_CallMethodNoArgs(value.ptr(), is_neg_.ptr())).ptr() == Py_False;
  }

  std::optional<dlpack::Tensor> memory_of(py::handle value) const {
    if (!may_require_grad_ && is_true(value, requires_grad_)) return std::nullopt;
    dlpack::Tensor found;
    if (!describe(value, found)) return std::nullopt;
    if (found.device.type != dlpack::kCpu || !is_contiguous(found)) return std::nullopt;
    if (found.data == nullptr && elements(found) != 0) return std::nullopt;
    return found;
  }

  static bool has_one_value_a_row(const dlpack::Tensor& tensor) {
    return tensor.ndim == 1 || (tensor.ndim == 2 && tensor.shape[1] == 1);
  }

  bool describe(py::handle value, dlpack::Tensor& found) const {
    if (functions_->major != 1) return false;
    if (functions_->tensor_of(value.ptr(), &found) == 0) return true;
    PyErr_Clear();
    return false;
  }

  static bool is_contiguous(const dlpack::Tensor& tensor) {
    int64_t inside = 1;
    for (int32_t d = tensor.ndim - 1; tensor.strides != nullptr && d >= 0; --d) {
      if (tensor.shape[d] > 1 && tensor.strides[d] != inside) return false;
      inside *= tensor.shape[d];
    }
    return true;
  }

  py::object tensor_;
  const dlpack::ExchangeFunctions* functions_;
  bool may_require_grad_;
  py::object requires_grad_ = interned("requires_grad"), is_neg_ = interned("is_neg");
};

}  // namespace fusedrl
