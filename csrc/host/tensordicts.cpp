#include "host/tensordicts.h"

#include <utility>
#include <vector>

#include "host/python_objects.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

// Reads the dictionaries of plain tensordicts, and of the tensorclass that holds log-probs.
class Plain {
 public:
  Plain(py::object tensor, py::object tensordict, py::object wrapper)
      : tensor_(std::move(tensor)),
        tensordict_(std::move(tensordict)),
        wrapper_(std::move(wrapper)) {}

  // The dictionaries of samples; None unless all samples are plain and unlocked.
  py::object unlocked(const py::list& samples) const {
    Objects values = objects_of(samples);
    for (const py::object& sample : values) {
      if (!is_exactly(sample, tensordict_) || is_true(sample, locked_)) return py::none();
    }
    enter_tensordicts(values);
    return list_of(values);
  }

  // The tensors under a path of keys; None unless each dictionary has a plain tensor there.
  py::object column(const py::list& dicts, const py::tuple& path) const {
    Objects values = objects_of(dicts);
    for (size_t depth = 0; depth < path.size(); ++depth) {
      if (depth > 0 && !enter(values)) return py::none();
      for (py::object& value : values) {
        if (!PyDict_Check(value.ptr())) return py::none();
        value = entry(value, path[depth]);
        if (!value) return py::none();
      }
    }
    for (const py::object& value : values) {
      if (!is_exactly(value, tensor_)) return py::none();
    }
    return list_of(values);
  }

 private:
  using Objects = std::vector<py::object>;

  static Objects objects_of(const py::list& list) {
    Objects objects;
    objects.reserve(list.size());
    for (const py::handle& item : list) objects.push_back(py::reinterpret_borrow<py::object>(item));
    return objects;
  }

  static py::list list_of(const Objects& objects) {
    py::list list(objects.size());
    for (size_t s = 0; s < objects.size(); ++s) list[s] = objects[s];
    return list;
  }

  // Replaces plain tensordicts, and wrappers of one, by their dictionaries; false for others.
  bool enter(Objects& values) const {
    for (py::object& value : values) {
      if (is_exactly(value, tensordict_)) continue;
      if (!is_exactly(value, wrapper_)) return false;
      value = entry(checked(PyObject_GenericGetDict(value.ptr(), nullptr)), entries_);
      if (!value || !is_exactly(value, tensordict_)) return false;
    }
    enter_tensordicts(values);
    return true;
  }

  void enter_tensordicts(Objects& values) const {
    for (py::object& value : values) {
      value = checked(PyObject_GetAttr(value.ptr(), entries_.ptr()));
    }
  }

  py::object tensor_, tensordict_, wrapper_;
  py::object entries_ = interned("_tensordict"), locked_ = interned("_is_locked");
};

// The value of a key in each dictionary, None where it is missing; None if all lack it.
py::object entries(const py::list& dicts, const py::object& key) {
  py::list column(dicts.size());
  bool is_there = false;
  for (size_t s = 0; s < dicts.size(); ++s) {
    py::object value = entry(dicts[s], key);
    is_there |= static_cast<bool>(value);
    if (!value) value = py::none();
    column[s] = std::move(value);
  }
  if (!is_there) return py::none();
  return column;
}

void put(const py::list& dicts, const py::object& key, const py::object& values_given) {
  const py::tuple values(values_given);
  if (dicts.size() != values.size()) throw py::value_error("values: expected one for each row");
  for (size_t s = 0; s < dicts.size(); ++s) {
    const py::object dict = dicts[s], value = values[s];
    if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) throw py::error_already_set();
  }
}

}  // namespace

void bind_tensordicts(py::module_& m) {
  py::class_<Plain>(m, "Plain", "Plain tensordicts by their dictionaries.")
      .def(py::init<py::object, py::object, py::object>(), py::arg("tensor"), py::arg("tensordict"),
           py::arg("wrapper"))
      .def("unlocked", &Plain::unlocked, py::arg("samples"),
           "The dictionaries of tensordicts; None unless all are plain and not locked.")
      .def("column", &Plain::column, py::arg("dicts"), py::arg("path"),
           "The tensors under a path of keys; None unless all have one, of no subclass.");
  m.def("entries", &entries, py::arg("dicts"), py::arg("key"),
        "What each dictionary has under a key, or None for it; None where nothing has one.");
  m.def("put", &put, py::arg("dicts"), py::arg("key"), py::arg("values"),
        "Set one value in each dictionary.");
}

}  // namespace fusedrl
