// Bindings of the CUDA driver: plain integers and bytes. Each call lets other threads run.
#include "host/cuda_module.h"

#include <pybind11/stl.h>

#include "host/cuda_driver.h"
#include "host/dlpack.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

py::capsule tensor(const CudaDriver&, uint64_t address, int64_t nbytes, int device,
                   py::object owner) {
  return dlpack::uint8_tensor(reinterpret_cast<void*>(address), nbytes, {dlpack::kCuda, device},
                              dlpack::keep_alive(std::move(owner)));
}

py::bytes export_memory(const CudaDriver& driver, int device, uint64_t address) {
  return py::bytes(driver.export_memory(device, address));
}

py::bytes export_event(const CudaDriver& driver, int device, uint64_t event) {
  return py::bytes(driver.export_event(device, event));
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::class_<CudaDriver>(m, "CudaDriver",
                         "The CUDA driver's shared memory and events; loaded at the first call.")
      .def(py::init<>())
      .def("version", &CudaDriver::version, Unlocked(),
           "1000 times the major version of the CUDA that it runs and 10 times the minor one; None "
           "where that is not known.")
      .def("device_count", &CudaDriver::device_count, Unlocked(), "Devices this process sees.")
      .def("uuid", &CudaDriver::uuid, py::arg("device"), Unlocked(),
           "The device's UUID, in hexadecimal digits and dashes.")
      .def("allocate", &CudaDriver::allocate, py::arg("device"), py::arg("nbytes"), Unlocked(),
           "The address of new memory.")
      .def("free", &CudaDriver::free, py::arg("device"), py::arg("address"), Unlocked(),
           "Free what allocate returned.")
      .def("export_memory", &export_memory, py::arg("device"), py::arg("address"),
           "64 bytes for another process's open_memory.")
      .def("open_memory", &CudaDriver::open_memory, py::arg("device"), py::arg("handle"),
           Unlocked(), "The address of another process's memory; closed as often as opened.")
      .def("close_memory", &CudaDriver::close_memory, py::arg("device"), py::arg("address"),
           Unlocked(), "Close what open_memory returned.")
      .def("create_event", &CudaDriver::create_event, py::arg("device"), py::arg("interprocess"),
           Unlocked(), "A new event, without timing.")
      .def("export_event", &export_event, py::arg("device"), py::arg("event"),
           "64 bytes for another process's open_event.")
      .def("open_event", &CudaDriver::open_event, py::arg("device"), py::arg("handle"), Unlocked(),
           "Another process's event; destroy_event lets go of it.")
      .def("destroy_event", &CudaDriver::destroy_event, py::arg("device"), py::arg("event"),
           Unlocked(), "Destroy an event that was created or opened.")
      .def("record_event", &CudaDriver::record_event, py::arg("device"), py::arg("event"),
           py::arg("stream"), Unlocked(), "The event is done when the stream's work so far is.")
      .def("stream_wait_event", &CudaDriver::stream_wait_event, py::arg("device"),
           py::arg("stream"), py::arg("event"), Unlocked(),
           "The stream's later work waits for the event's last record; the caller does not.")
      .def("event_done", &CudaDriver::event_done, py::arg("device"), py::arg("event"), Unlocked(),
           "Whether the work before the event's last record is done; True if there was none.")
      .def("capturing", &CudaDriver::capturing, py::arg("device"), py::arg("stream"), Unlocked(),
           "Whether the stream is capturing a CUDA graph.")
      .def("tensor", &tensor, py::arg("address"), py::arg("nbytes"), py::arg("device"),
           py::arg("owner"),
           "A DLPack capsule of flat uint8 memory; the owner lives as long as tensors over it.");
}

}  // namespace fusedrl
