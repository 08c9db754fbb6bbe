// Helpers for Python's C API that pybind11 lacks.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

inline bool is_exactly(pybind11::handle value, pybind11::handle type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == type.ptr();
}

inline pybind11::object checked(PyObject* owned) {
  if (owned == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(owned);
}

inline pybind11::object interned(const char* name) {
  return checked(PyUnicode_InternFromString(name));
}

// The value of a key in a dictionary; null if there is none.
inline pybind11::object entry(pybind11::handle dict, pybind11::handle key) {
  PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_borrow<pybind11::object>(value);
}

inline bool is_true(pybind11::handle object, pybind11::handle attribute) {
  return checked(PyObject_GetAttr(object.ptr(), attribute.ptr())).ptr() != Py_False;
}

}  // namespace fusedrl
