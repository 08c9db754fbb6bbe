#include "host/samples.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "host/dlpack.h"
#include "host/expect.h"
#include "host/python_objects.h"
#include "token_kl/sample_memory.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

// The dtype of kernels; nothing for another one.
std::optional<SampleDtype> dtype_of(const dlpack::Tensor& tensor) {
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

bool is_bool(const dlpack::Tensor& tensor) {
  constexpr uint8_t kBool = 6;
  return tensor.dtype.code == kBool && tensor.dtype.bits == 8 && tensor.dtype.lanes == 1;
}

int64_t elements(const dlpack::Tensor& tensor) {
  int64_t count = 1;
  for (int32_t d = 0; d < tensor.ndim; ++d) count *= tensor.shape[d];
  return count;
}

bool same_shape(const dlpack::Tensor& one, const dlpack::Tensor& other) {
  return one.ndim == other.ndim && std::equal(one.shape, one.shape + one.ndim, other.shape);
}

using Column = std::vector<dlpack::Tensor>;

// How tensors of torch are read: by the C functions of DLPack, which their class has.
class Reader {
 public:
  Reader(py::object tensor, const py::capsule& functions, bool may_require_grad)
      : tensor_(std::move(tensor)),
        functions_(functions.get_pointer<dlpack::ExchangeFunctions>()),
        may_require_grad_(may_require_grad) {}

  // Contiguous memory of the CPU; nothing for a tensor that is more than that: of another class,
  // with a gradient to record, negated lazily, without memory.
  std::optional<dlpack::Tensor> read_any(const py::object& value) const {
    return has_its_values(value) ? read(value) : std::nullopt;
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
        const auto tensor = read(value);
        if (!tensor || !has_one_value_a_row(*tensor)) return std::nullopt;
        found[c].push_back(*tensor);
      }
    }
    return found;
  }

  static const void* address(const dlpack::Tensor& tensor) {
    return static_cast<const char*>(tensor.data) + tensor.byte_offset;
  }

 private:
  // Whether the memory of a tensor has its values, and not those of the other sign.
  bool has_its_values(py::handle value) const {
    if (!is_exactly(value, tensor_)) return false;
    return checked(PyObject_CallMethodNoArgs(value.ptr(), is_neg_.ptr())).ptr() == Py_False;
  }

  // As `read_any`, for a tensor whose memory has its values.
  std::optional<dlpack::Tensor> read(py::handle value) const {
    if (!may_require_grad_ && is_true(value, requires_grad_)) return std::nullopt;
    if (functions_->major != 1) return std::nullopt;
    dlpack::Tensor found;
    if (functions_->tensor_of(value.ptr(), &found) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    if (found.device.type != dlpack::kCpu || !is_contiguous(found)) return std::nullopt;
    if (found.data == nullptr && elements(found) != 0) return std::nullopt;
    return found;
  }

  static bool has_one_value_a_row(const dlpack::Tensor& tensor) {
    return tensor.ndim == 1 || (tensor.ndim == 2 && tensor.shape[1] == 1);
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

// Where samples lie, as bytes of SampleMemory, with their dtype and their lengths; None unless they
// fit each other and a kernel can read them there. A mask and a reward may be None.
py::object sample_memory(const Reader& reader, const py::tuple& log_probs,
                         const py::tuple& ref_log_probs, const std::optional<py::tuple>& mask,
                         const std::optional<py::tuple>& reward) {
  std::vector<py::tuple> given{log_probs, ref_log_probs};
  if (mask) given.push_back(*mask);
  if (reward) given.push_back(*reward);
  const size_t count = log_probs.size();
  const auto is_as_long = [=](const py::tuple& column) { return column.size() == count; };
  if (count == 0 || !std::all_of(given.begin(), given.end(), is_as_long)) return py::none();
  const auto columns = reader.read_columns(given);
  if (!columns) return py::none();
  const Column &policy = columns->at(0), &reference = columns->at(1);
  const Column* masks = mask ? &columns->at(2) : nullptr;
  const Column* rewards = reward ? &columns->back() : nullptr;
  const auto dtype = dtype_of(policy[0]);
  if (!dtype) return py::none();
  std::vector<SampleMemory> samples(count);
  py::list lengths(count);
  for (size_t s = 0; s < count; ++s) {
    SampleMemory& sample = samples[s];
    const dlpack::Tensor &p = policy[s], &q = reference[s];
    if (p.ndim != 1 || !same_shape(p, q)) return py::none();
    if (dtype_of(p) != dtype || dtype_of(q) != dtype) return py::none();
    sample.tokens = p.shape[0];
    sample.log_probs = Reader::address(p);
    sample.ref_log_probs = Reader::address(q);
    if (masks != nullptr) {
      const dlpack::Tensor& kept = (*masks)[s];
      if (!is_bool(kept) || !same_shape(kept, p)) return py::none();
      sample.mask = Reader::address(kept);
    }
    if (rewards != nullptr) {
      const dlpack::Tensor& values = (*rewards)[s];
      if (dtype_of(values) != dtype) return py::none();
      if (values.ndim != (*rewards)[0].ndim) return py::none();  // one of them lacks its dimension
      sample.rewards = values.shape[0];
      if (sample.rewards != sample.tokens && sample.rewards != 1) return py::none();
      sample.reward = Reader::address(values);
    }
    lengths[s] = py::int_(sample.tokens);
  }
  const py::bytes memory(reinterpret_cast<const char*>(samples.data()),
                         count * sizeof(SampleMemory));
  return py::make_tuple(memory, static_cast<int64_t>(*dtype), lengths);
}

// Offsets that partition so many tokens; nothing for others.
std::optional<std::vector<int64_t>> bounds_of(const dlpack::Tensor& offsets, int64_t tokens) {
  const bool is_int64 = offsets.dtype.code == 0 && offsets.dtype.bits == 64;
  if (!is_int64 || offsets.dtype.lanes != 1 || offsets.ndim != 1 || offsets.shape[0] < 1) {
    return std::nullopt;
  }
  const auto* first = static_cast<const int64_t*>(Reader::address(offsets));
  std::vector<int64_t> bounds(first, first + offsets.shape[0]);
  const bool fit = bounds.front() == 0 && bounds.back() == tokens;
  if (!fit || !std::is_sorted(bounds.begin(), bounds.end())) return std::nullopt;
  return bounds;
}

int64_t bytes_of(SampleDtype dtype) {
  switch (dtype) {
    case SampleDtype::float32:
      return 4;
    case SampleDtype::float64:
      return 8;
    default:
      return 2;
  }
}

// The sequences of a batch, each with one reward of those at the batch's.
std::vector<SampleMemory> one_a_sequence(const SampleMemory& batch,
                                         const std::vector<int64_t>& bounds, SampleDtype dtype) {
  const auto behind = [](const void* memory, int64_t bytes) -> const void* {
    return memory == nullptr ? nullptr : static_cast<const char*>(memory) + bytes;
  };
  const int64_t size = bytes_of(dtype);
  std::vector<SampleMemory> sequences;
  sequences.reserve(bounds.size() - 1);
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    const int64_t first = bounds[s], at = static_cast<int64_t>(s) * size;
    sequences.push_back({behind(batch.log_probs, first * size),
                         behind(batch.ref_log_probs, first * size), behind(batch.mask, first),
                         behind(batch.reward, at), bounds[s + 1] - first, 1});
  }
  return sequences;
}

// Packed or padded columns of one shape as samples: one for all, or one for each sequence that has
// one reward. None unless they fit each other and a kernel can read them where they lie.
py::object batch_memory(const Reader& reader, const py::object& log_probs,
                        const py::object& ref_log_probs, const py::object& mask,
                        const py::object& offsets, const py::object& reward) {
  const auto policy = reader.read_any(log_probs), reference = reader.read_any(ref_log_probs);
  if (!policy || !reference || !same_shape(*policy, *reference)) return py::none();
  const auto dtype = dtype_of(*policy);
  if (!dtype || dtype_of(*reference) != dtype) return py::none();
  SampleMemory batch{};
  batch.log_probs = Reader::address(*policy);
  batch.ref_log_probs = Reader::address(*reference);
  batch.tokens = elements(*policy);
  if (!mask.is_none()) {
    const auto kept = reader.read_any(mask);
    if (!kept || !is_bool(*kept) || !same_shape(*kept, *policy)) return py::none();
    batch.mask = Reader::address(*kept);
  }
  std::vector<int64_t> bounds{0, batch.tokens};
  if (!offsets.is_none()) {
    const auto given = reader.read_any(offsets);
    const auto found = given ? bounds_of(*given, batch.tokens) : std::nullopt;
    if (!found || policy->ndim != 1) return py::none();
    bounds = *found;
  }
  std::vector<SampleMemory> samples{batch};
  if (!reward.is_none()) {
    const auto values = reader.read_any(reward);
    if (!values || dtype_of(*values) != dtype) return py::none();
    samples[0].reward = Reader::address(*values);
    samples[0].rewards = batch.tokens;
    if (!same_shape(*values, *policy)) {
      if (offsets.is_none() || values->ndim != 1) return py::none();
      const size_t sequences = bounds.size() - 1;
      if (values->shape[0] != static_cast<int64_t>(sequences)) return py::none();
      samples = one_a_sequence(samples[0], bounds, *dtype);
    }
  }
  const py::bytes memory(reinterpret_cast<const char*>(samples.data()),
                         samples.size() * sizeof(SampleMemory));
  return py::make_tuple(memory, samples.size(), static_cast<int64_t>(*dtype));
}

}  // namespace

void bind_samples(py::module_& m) {
  py::class_<Reader>(m, "SampleReader", "Reads where tensors of the CPU lie.")
      .def(py::init<py::object, const py::capsule&, bool>(), py::arg("tensor"),
           py::arg("functions"), py::arg("may_require_grad"))
      .def("memory", &sample_memory, py::arg("log_probs"), py::arg("ref_log_probs"),
           py::arg("mask"), py::arg("reward"),
           "Where samples lie, as bytes, with their dtype and lengths; None where a kernel cannot "
           "read them there.")
      .def("batch_memory", &batch_memory, py::arg("log_probs"), py::arg("ref_log_probs"),
           py::arg("mask"), py::arg("offsets"), py::arg("reward"),
           "Where packed or padded columns lie, as the bytes of so many samples of a dtype; None "
           "where a kernel cannot read them there.");
}

}  // namespace fusedrl
