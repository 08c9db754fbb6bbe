// The CUDA driver, found at run time: memory and events that processes share. Nothing is loaded
// before the first call, and no call changes the caller's current device. The driver may wait for
// the device where memory is freed or closed, and nowhere else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fusedrl {

// Devices are ordinals as this process sees them (CUDA_VISIBLE_DEVICES), as torch counts them.
class CudaDriver {
 public:
  using Address = uint64_t;
  using Event = uint64_t;   // CUevent
  using Stream = uint64_t;  // CUstream; 0 is the default stream of the device

  // The newest CUDA that the driver runs, 1000 times the major version and 10 times the minor one;
  // nothing where there is no driver, or none that says. It asks for no device and initialises
  // nothing, so that a process that has asked may still fork.
  std::optional<int> version() const;

  int device_count() const;
  // 8-4-4-4-12 hexadecimal digits; those of the MIG instance, if there is one.
  std::string uuid(int device) const;

  Address allocate(int device, uint64_t nbytes) const;
  void free(int device, Address address) const;
  std::string export_memory(int device, Address address) const;
  Address open_memory(int device, std::string_view handle) const;
  void close_memory(int device, Address address) const;

  Event create_event(int device, bool interprocess) const;
  std::string export_event(int device, Event event) const;
  Event open_event(int device, std::string_view handle) const;
  void destroy_event(int device, Event event) const;
  void record_event(int device, Event event, Stream stream) const;
  void stream_wait_event(int device, Stream stream, Event event) const;
  bool event_done(int device, Event event) const;

  bool capturing(int device, Stream stream) const;
};

}  // namespace fusedrl
