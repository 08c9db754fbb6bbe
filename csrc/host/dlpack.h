// Makes torch tensors over existing memory without torch, by DLPack capsules.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace fusedrl::dlpack {

// The unversioned structures of DLPack, which every torch accepts.
constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;

struct Device {
  int32_t type;
  int32_t id;
};

struct Dtype {
  uint8_t code;  // 1: unsigned integer
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  Dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The C functions that read tensors of a class without a Python call, from DLPack 1.2 on, in the
// order of the standard.
struct ExchangeFunctions {
  uint32_t major, minor;
  const void* previous;
  void (*not_used[3])();
  int (*tensor_of)(void* object, Tensor* out);  // a view; returns -1 with an error set
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// A Python object that C++ may drop on any thread, with or without the GIL. It is leaked while the
// interpreter ends, when waiting for the GIL is not allowed.
inline std::shared_ptr<void> keep_alive(pybind11::object object) {
  return {object.release().ptr(), [](void* kept) {
            auto* python = static_cast<PyObject*>(kept);
            if (!Py_IsInitialized()) return;
            if (PyGILState_Check()) {
              Py_DECREF(python);
              return;
            }
            if (is_finalizing()) return;
            PyGILState_STATE state = PyGILState_Ensure();
            Py_DECREF(python);
            PyGILState_Release(state);
          }};
}

// A flat uint8 tensor over [data, data + nbytes), for torch.from_dlpack. The owner is dropped with
// the last tensor over it, on any thread.
inline pybind11::capsule uint8_tensor(void* data, int64_t nbytes, Device device,
                                      std::shared_ptr<void> owner) {
  struct Held {
    ManagedTensor managed;
    int64_t shape;
    int64_t stride;
    std::shared_ptr<void> owner;
  };
  auto held = std::make_unique<Held>();
  held->shape = nbytes;
  held->stride = 1;
  held->owner = std::move(owner);
  held->managed = {
      {nbytes == 0 ? nullptr : data, device, 1, {1, 8, 1}, &held->shape, &held->stride, 0},
      held.get(),
      [](ManagedTensor* self) { delete static_cast<Held*>(self->context); }};
  // A consumer renames the capsule and calls the deleter, so a capsule with the original name was
  // not consumed.
  pybind11::capsule capsule(&held->managed, "dltensor", [](PyObject* self) {
    if (!PyCapsule_IsValid(self, "dltensor")) return;
    auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    managed->deleter(managed);
  });
  held.release();
  return capsule;
}

}  // namespace fusedrl::dlpack
