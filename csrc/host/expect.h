// Hints that objects of Python will be read soon.
//
// The samples of a batch lie apart, and as a rule in no cache: to wait for the memory of one object
// takes longer than to look something up in it. A loop over all samples that says what the next
// loop reads has many waits at a time. A hint reads nothing but what was expected before it, and a
// wrong one does no harm. KLComputation over fresh stacks of 64 and more samples takes a tenth
// longer without them. All are always inlined: GCC takes a function that only prefetches for one
// without an effect, and leaves out the calls of it.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fusedrl {

[[gnu::always_inline]] inline void expect_memory(const void* first, int64_t bytes) {
  constexpr int64_t kLine = 64;
  if (first == nullptr) return;
  const char* address = static_cast<const char*>(first);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(address + at);
  __builtin_prefetch(address + bytes - 1);
}

// An object of a class that is written in Python, with what the interpreter keeps before it.
[[gnu::always_inline]] inline void expect_instance(const PyObject* object) {
  constexpr int64_t kBefore = 4 * sizeof(void*);
  expect_memory(reinterpret_cast<const char*>(object) - kBefore, kBefore + sizeof(PyObject));
}

// The few attributes of such an object.
[[gnu::always_inline]] inline void expect_attributes(PyObject* object) {
  constexpr int64_t kAttributes = 4 * sizeof(void*);
#if PY_VERSION_HEX >= 0x030d0000
  expect_memory(object, sizeof(PyObject) + kAttributes);
#elif PY_VERSION_HEX >= 0x030b0000
  if (!PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_MANAGED_DICT)) return;
  const auto* words = reinterpret_cast<const char* const*>(object);
  expect_memory(words[-3], kAttributes);
  expect_memory(words[-4], kAttributes);
#else
  if (PyObject** dict = _PyObject_GetDictPtr(object)) expect_memory(*dict, kAttributes);
#endif
}

[[gnu::always_inline]] inline void expect_dict(const PyObject* dict) {
  expect_memory(dict, sizeof(PyDictObject));
}

// What is looked up in a dictionary of a few entries.
[[gnu::always_inline]] inline void expect_entries(const PyObject* dict) {
  constexpr int64_t kFewEntries = 96;
  expect_memory(reinterpret_cast<const PyDictObject*>(dict)->ma_keys, kFewEntries);
}

// What torch keeps of a tensor behind its object, whose third word says where.
[[gnu::always_inline]] inline void expect_tensor(const PyObject* tensor) {
  constexpr int64_t kParts = 184;
  const auto* words = reinterpret_cast<const char* const*>(tensor);
  expect_memory(words[2], kParts);
}

}  // namespace fusedrl
