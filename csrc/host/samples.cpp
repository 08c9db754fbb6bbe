#include "host/samples.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "host/tensor_reader.h"
#include "token_kl/sample_memory.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

// Where samples lie, as bytes of SampleMemory, with their dtype and their lengths; None unless they
// fit each other and a kernel can read them there. A mask and a reward may be None.
py::object sample_memory(const TensorReader& reader, const py::tuple& log_probs,
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
  const TensorReader::Column &policy = columns->at(0), &reference = columns->at(1);
  const TensorReader::Column* masks = mask ? &columns->at(2) : nullptr;
  const TensorReader::Column* rewards = reward ? &columns->back() : nullptr;
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
    sample.log_probs = TensorReader::address(p);
    sample.ref_log_probs = TensorReader::address(q);
    if (masks != nullptr) {
      const dlpack::Tensor& kept = (*masks)[s];
      if (!is_bool(kept) || !same_shape(kept, p)) return py::none();
      sample.mask = TensorReader::address(kept);
    }
    if (rewards != nullptr) {
      const dlpack::Tensor& values = (*rewards)[s];
      if (dtype_of(values) != dtype) return py::none();
      if (values.ndim != (*rewards)[0].ndim) return py::none();  // one of them lacks its dimension
      sample.rewards = values.shape[0];
      if (sample.rewards != sample.tokens && sample.rewards != 1) return py::none();
      sample.reward = TensorReader::address(values);
    }
    lengths[s] = py::int_(sample.tokens);
  }
  const py::bytes memory(reinterpret_cast<const char*>(samples.data()),
                         count * sizeof(SampleMemory));
  return py::make_tuple(memory, static_cast<int64_t>(*dtype), lengths);
}

}  // namespace

void bind_samples(py::module_& m) {
  py::class_<TensorReader>(m, "SampleReader", "Reads where tensors of the CPU lie.")
      .def(py::init<py::object, const py::capsule&, bool>(), py::arg("tensor"),
           py::arg("functions"), py::arg("may_require_grad"))
      .def("memory", &sample_memory, py::arg("log_probs"), py::arg("ref_log_probs"),
           py::arg("mask"), py::arg("reward"),
           "Where samples lie, as bytes, with their dtype and lengths; None where a kernel cannot "
           "read them there.");
}

}  // namespace fusedrl
