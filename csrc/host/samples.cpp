#include "host/samples.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "host/dlpack.h"
#include "token_kl/sample_memory.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

bool is_exactly(py::handle value, py::handle type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == type.ptr();
}

py::object checked(PyObject* owned) {
  if (owned == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(owned);
}

py::object interned(const char* name) { return checked(PyUnicode_InternFromString(name)); }

// What a dictionary has under a key; null for nothing.
py::object entry(py::handle dict, py::handle key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found);
}

bool is_true(py::handle object, py::handle attribute) {
  return checked(PyObject_GetAttr(object.ptr(), attribute.ptr())).ptr() != Py_False;
}

// The dictionaries of plain tensordicts, and of the tensorclass that holds log-probs.
class Plain {
 public:
  Plain(py::object tensor, py::object tensordict, py::object wrapper)
      : tensor_(std::move(tensor)),
        tensordict_(std::move(tensordict)),
        wrapper_(std::move(wrapper)) {}

  // Those of samples that may be written to; None unless all are plain and not locked.
  py::object unlocked(const py::list& samples) const {
    py::list found(samples.size());
    for (size_t s = 0; s < samples.size(); ++s) {
      const py::object sample = samples[s];
      if (!is_exactly(sample, tensordict_) || is_true(sample, locked_)) return py::none();
      found[s] = checked(PyObject_GetAttr(sample.ptr(), entries_.ptr()));
    }
    return found;
  }

  // The tensors under a path of keys; None unless all dictionaries have one, of no subclass.
  py::object column(const py::list& dicts, const py::tuple& path) const {
    py::list found(dicts.size());
    for (size_t s = 0; s < dicts.size(); ++s) {
      py::object value = dicts[s];
      for (size_t depth = 0; depth < path.size(); ++depth) {
        const py::object inside = depth == 0 ? value : dict_of(value);
        if (!inside || !PyDict_Check(inside.ptr())) return py::none();
        value = entry(inside, path[depth]);
        if (!value) return py::none();
      }
      if (!is_exactly(value, tensor_)) return py::none();
      found[s] = value;
    }
    return found;
  }

 private:
  py::object dict_of(const py::object& value) const {
    if (is_exactly(value, tensordict_)) {
      return checked(PyObject_GetAttr(value.ptr(), entries_.ptr()));
    }
    if (!is_exactly(value, wrapper_)) return py::object();
    const py::object held = entry(checked(PyObject_GenericGetDict(value.ptr(), nullptr)), entries_);
    return held && is_exactly(held, tensordict_) ? dict_of(held) : py::object();
  }

  py::object tensor_, tensordict_, wrapper_;
  py::object entries_ = interned("_tensordict"), locked_ = interned("_is_locked");
};

void put(const py::list& dicts, const py::object& key, const py::object& values_given) {
  const py::tuple values(values_given);
  if (dicts.size() != values.size()) throw py::value_error("values: expected one for each row");
  for (size_t s = 0; s < dicts.size(); ++s) {
    const py::object dict = dicts[s], value = values[s];
    if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) throw py::error_already_set();
  }
}

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

// How tensors of torch are read: by the C functions of DLPack, which their class has.
class Reader {
 public:
  Reader(py::object tensor, const py::capsule& functions, bool may_require_grad)
      : tensor_(std::move(tensor)),
        functions_(functions.get_pointer<dlpack::ExchangeFunctions>()),
        may_require_grad_(may_require_grad) {}

  // One value a row in contiguous memory of the CPU.
  std::optional<dlpack::Tensor> read(const py::object& value) const {
    const auto found = read_any(value);
    const bool is_row = found && (found->ndim == 1 || (found->ndim == 2 && found->shape[1] == 1));
    return is_row ? found : std::nullopt;
  }

  // Contiguous memory of the CPU; nothing for a tensor that is more than that: of another class,
  // with a gradient to record, negated lazily, without memory.
  std::optional<dlpack::Tensor> read_any(const py::object& value) const {
    if (!is_exactly(value, tensor_)) return std::nullopt;
    if (!may_require_grad_ && is_true(value, requires_grad_)) return std::nullopt;
    if (functions_->major != 1) return std::nullopt;
    dlpack::Tensor found;
    if (functions_->tensor_of(value.ptr(), &found) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    if (found.device.type != dlpack::kCpu || !is_contiguous(found)) return std::nullopt;
    if (found.data == nullptr && elements(found) != 0) return std::nullopt;
    if (checked(PyObject_CallMethodNoArgs(value.ptr(), is_neg_.ptr())).ptr() != Py_False) {
      return std::nullopt;
    }
    return found;
  }

  static const void* address(const dlpack::Tensor& tensor) {
    return static_cast<const char*>(tensor.data) + tensor.byte_offset;
  }

 private:
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
  const size_t count = log_probs.size();
  if (count == 0 || ref_log_probs.size() != count) return py::none();
  if ((mask && mask->size() != count) || (reward && reward->size() != count)) return py::none();
  std::vector<SampleMemory> samples(count);
  py::list lengths(count);
  std::optional<SampleDtype> dtype;
  int32_t reward_dims = 0;
  for (size_t s = 0; s < count; ++s) {
    SampleMemory& sample = samples[s];
    const auto policy = reader.read(log_probs[s]), reference = reader.read(ref_log_probs[s]);
    if (!policy || !reference || policy->ndim != 1 || reference->ndim != 1) return py::none();
    if (s == 0) dtype = dtype_of(*policy);
    if (!dtype || dtype_of(*policy) != dtype || dtype_of(*reference) != dtype) return py::none();
    sample.tokens = policy->shape[0];
    if (reference->shape[0] != sample.tokens) return py::none();
    sample.log_probs = Reader::address(*policy);
    sample.ref_log_probs = Reader::address(*reference);
    if (mask) {
      const auto kept = reader.read((*mask)[s]);
      if (!kept || kept->ndim != 1 || !is_bool(*kept)) return py::none();
      if (kept->shape[0] != sample.tokens) return py::none();
      sample.mask = Reader::address(*kept);
    }
    if (reward) {
      const auto values = reader.read((*reward)[s]);
      if (!values || dtype_of(*values) != dtype) return py::none();
      if (s == 0) reward_dims = values->ndim;
      if (values->ndim != reward_dims) return py::none();  // one of them lacks its dimension
      sample.rewards = values->shape[0];
      if (sample.rewards != sample.tokens && sample.rewards != 1) return py::none();
      sample.reward = Reader::address(*values);
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
  py::class_<Plain>(m, "Plain", "Plain tensordicts by their dictionaries.")
      .def(py::init<py::object, py::object, py::object>(), py::arg("tensor"), py::arg("tensordict"),
           py::arg("wrapper"))
      .def("unlocked", &Plain::unlocked, py::arg("samples"),
           "The dictionaries of tensordicts; None unless all are plain and not locked.")
      .def("column", &Plain::column, py::arg("dicts"), py::arg("path"),
           "The tensors under a path of keys; None unless all have one, of no subclass.");
  m.def("put", &put, py::arg("dicts"), py::arg("key"), py::arg("values"),
        "Set one value in each dictionary.");
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
