#include "host/cuda_driver.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace fusedrl {
namespace {

// The declarations of cuda.h that are used, so that machines without the CUDA toolkit build this
// too.
using Result = int;
using Ordinal = int;
using Context = void*;
using EventPointer = void*;
using StreamPointer = void*;
using DevicePointer = unsigned long long;
struct Uuid {
  unsigned char bytes[16];
};
struct IpcHandle {
  char bytes[64];
};

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kNoDevice = 100;
constexpr Result kNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kEventInterprocess = 4;
constexpr unsigned kLazyPeerAccess = 1;
constexpr int kCaptureRelaxed = 2;

constexpr const char* kOutOfMemoryRemedy =
    "free memory of the device (torch.cuda.empty_cache() returns what torch keeps), use fewer "
    "slots, or memory of the host: device=\"cpu\"";
constexpr const char* kExportRemedy =
    "this device cannot share memory between processes: use memory of the host, device=\"cpu\"";
constexpr const char* kOpenRemedy =
    "the process that exported it may have ended or closed it, or lives in another pid or ipc "
    "namespace (containers): open a handle of a living publisher, or use memory of the host, "
    "device=\"cpu\"";

struct Api {
  Result (*init)(unsigned);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
  Result (*device_count)(int*);
  Result (*device_get)(Ordinal*, int);
  Result (*device_uuid)(Uuid*, Ordinal);
  Result (*primary_context)(Context*, Ordinal);
  Result (*push_context)(Context);
  Result (*pop_context)(Context*);
  Result (*exchange_capture_mode)(int*);
  Result (*allocate)(DevicePointer*, size_t);
  Result (*free)(DevicePointer);
  Result (*export_memory)(IpcHandle*, DevicePointer);
  Result (*open_memory)(DevicePointer*, IpcHandle, unsigned);
  Result (*close_memory)(DevicePointer);
  Result (*create_event)(EventPointer*, unsigned);
  Result (*destroy_event)(EventPointer);
  Result (*export_event)(IpcHandle*, EventPointer);
  Result (*open_event)(EventPointer*, IpcHandle);
  Result (*record_event)(EventPointer, StreamPointer);
  Result (*query_event)(EventPointer);
  Result (*wait_event)(StreamPointer, EventPointer, unsigned);
  Result (*capturing)(StreamPointer, int*);
  Result initialised;
};

void* open_library() { return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); }

Api load() {
  void* library = open_library();
  if (library == nullptr) {
    throw std::runtime_error(
        std::string("CUDA driver: expected libcuda.so.1, got ") + dlerror() +
        "; install NVIDIA's driver, or use memory of the host: device=\"cpu\"");
  }
  Api api{};
  auto find = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
      throw std::runtime_error(std::string("CUDA driver: libcuda.so.1 has no ") + name +
                               "; install a driver for CUDA 12 or newer");
    }
    std::memcpy(&function, &symbol, sizeof symbol);
  };
  find(api.init, "cuInit");
  find(api.error_name, "cuGetErrorName");
  find(api.error_string, "cuGetErrorString");
  find(api.device_count, "cuDeviceGetCount");
  find(api.device_get, "cuDeviceGet");
  find(api.device_uuid, "cuDeviceGetUuid_v2");
  find(api.primary_context, "cuDevicePrimaryCtxRetain");
  find(api.push_context, "cuCtxPushCurrent_v2");
  find(api.pop_context, "cuCtxPopCurrent_v2");
  find(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(api.allocate, "cuMemAlloc_v2");
  find(api.free, "cuMemFree_v2");
  find(api.export_memory, "cuIpcGetMemHandle");
  find(api.open_memory, "cuIpcOpenMemHandle_v2");
  find(api.close_memory, "cuIpcCloseMemHandle");
  find(api.create_event, "cuEventCreate");
  find(api.destroy_event, "cuEventDestroy_v2");
  find(api.export_event, "cuIpcGetEventHandle");
  find(api.open_event, "cuIpcOpenEventHandle");
  find(api.record_event, "cuEventRecord");
  find(api.query_event, "cuEventQuery");
  find(api.wait_event, "cuStreamWaitEvent");
  find(api.capturing, "cuStreamIsCapturing");
  api.initialised = api.init(0);
  return api;
}

const Api& api() {
  static const Api loaded = load();  // never unloaded; tried again if it failed
  return loaded;
}

void check(Result result, const std::string& tried, const char* remedy = nullptr) {
  if (result == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  api().error_name(result, &name);
  api().error_string(result, &text);
  if (result == kNotInitialized) {
    remedy = "CUDA does not survive a fork: start the process with the method \"spawn\"";
  }
  if (result == kOutOfMemory) remedy = kOutOfMemoryRemedy;
  throw std::runtime_error("CUDA driver: " + tried + " failed with " +
                           (name ? name : "error " + std::to_string(result)) +
                           (text ? std::string(" (") + text + ")" : "") +
                           (remedy ? std::string("; ") + remedy : ""));
}

std::string on(int device) { return " on device " + std::to_string(device); }

Ordinal ordinal(int device) {
  check(api().initialised, "cuInit");
  Ordinal ordinal;
  check(api().device_get(&ordinal, device), "cuDeviceGet" + on(device),
        "CUDA_VISIBLE_DEVICES says which devices a process sees");
  return ordinal;
}

// The context that torch uses too. It is retained once and never released, as the driver destroys
// it with the process.
Context primary_context(int device) {
  static std::mutex guard;
  static std::map<int, Context> contexts;
  std::lock_guard<std::mutex> lock(guard);
  auto known = contexts.find(device);
  if (known != contexts.end()) return known->second;
  Context context;
  check(api().primary_context(&context, ordinal(device)), "cuDevicePrimaryCtxRetain" + on(device));
  contexts.emplace(device, context);
  return context;
}

// Makes the device current for the calls in a scope. Another thread may be capturing a CUDA graph
// meanwhile: without the relaxed mode, a query or an allocation would invalidate its capture.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    Context context = primary_context(device);
    check(api().push_context(context), "cuCtxPushCurrent" + on(device));
    api().exchange_capture_mode(&mode_);
  }
  ~OnDevice() {
    api().exchange_capture_mode(&mode_);
    Context popped;
    api().pop_context(&popped);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int mode_ = kCaptureRelaxed;  // after the exchange, the mode to restore
};

IpcHandle handle_of(std::string_view bytes) {
  IpcHandle handle;
  if (bytes.size() != sizeof handle.bytes) {
    throw std::invalid_argument("handle: expected 64 bytes, got " + std::to_string(bytes.size()) +
                                "; pass what export_memory or export_event returned");
  }
  std::memcpy(handle.bytes, bytes.data(), sizeof handle.bytes);
  return handle;
}

std::string bytes_of(const IpcHandle& handle) { return {handle.bytes, sizeof handle.bytes}; }

void* pointer(uint64_t handle) { return reinterpret_cast<void*>(handle); }

}  // namespace

std::optional<int> CudaDriver::version() const {
  void* library = open_library();
  if (library == nullptr) return std::nullopt;
  Result (*get)(int*);
  void* symbol = dlsym(library, "cuDriverGetVersion");
  std::memcpy(&get, &symbol, sizeof symbol);
  int version = 0;
  if (symbol == nullptr || get(&version) != kSuccess || version <= 0) return std::nullopt;
  return version;
}

int CudaDriver::device_count() const {
  if (api().initialised == kNoDevice) return 0;
  check(api().initialised, "cuInit");
  int count;
  check(api().device_count(&count), "cuDeviceGetCount");
  return count;
}

std::string CudaDriver::uuid(int device) const {
  Uuid uuid;
  check(api().device_uuid(&uuid, ordinal(device)), "cuDeviceGetUuid" + on(device));
  std::string text;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += "0123456789abcdef"[uuid.bytes[i] >> 4];
    text += "0123456789abcdef"[uuid.bytes[i] & 15];
  }
  return text;
}

CudaDriver::Address CudaDriver::allocate(int device, uint64_t nbytes) const {
  OnDevice scope(device);
  DevicePointer address;
  check(api().allocate(&address, nbytes),
        "cuMemAlloc of " + std::to_string(nbytes) + " bytes" + on(device));
  return address;
}

void CudaDriver::free(int device, Address address) const {
  OnDevice scope(device);
  check(api().free(address), "cuMemFree" + on(device));
}

std::string CudaDriver::export_memory(int device, Address address) const {
  OnDevice scope(device);
  IpcHandle handle;
  check(api().export_memory(&handle, address), "cuIpcGetMemHandle" + on(device), kExportRemedy);
  return bytes_of(handle);
}

CudaDriver::Address CudaDriver::open_memory(int device, std::string_view handle) const {
  IpcHandle exported = handle_of(handle);
  OnDevice scope(device);
  DevicePointer address;
  check(api().open_memory(&address, exported, kLazyPeerAccess), "cuIpcOpenMemHandle" + on(device),
        kOpenRemedy);
  return address;
}

void CudaDriver::close_memory(int device, Address address) const {
  OnDevice scope(device);
  check(api().close_memory(address), "cuIpcCloseMemHandle" + on(device));
}

CudaDriver::Event CudaDriver::create_event(int device, bool interprocess) const {
  OnDevice scope(device);
  EventPointer event;
  unsigned flags = kEventDisableTiming | (interprocess ? kEventInterprocess : 0);
  check(api().create_event(&event, flags), "cuEventCreate" + on(device),
        interprocess ? kExportRemedy : nullptr);
  return reinterpret_cast<Event>(event);
}

std::string CudaDriver::export_event(int device, Event event) const {
  OnDevice scope(device);
  IpcHandle handle;
  check(api().export_event(&handle, pointer(event)), "cuIpcGetEventHandle" + on(device),
        kExportRemedy);
  return bytes_of(handle);
}

CudaDriver::Event CudaDriver::open_event(int device, std::string_view handle) const {
  IpcHandle exported = handle_of(handle);
  OnDevice scope(device);
  EventPointer event;
  check(api().open_event(&event, exported), "cuIpcOpenEventHandle" + on(device), kOpenRemedy);
  return reinterpret_cast<Event>(event);
}

void CudaDriver::destroy_event(int device, Event event) const {
  OnDevice scope(device);
  check(api().destroy_event(pointer(event)), "cuEventDestroy" + on(device));
}

void CudaDriver::record_event(int device, Event event, Stream stream) const {
  OnDevice scope(device);
  check(api().record_event(pointer(event), pointer(stream)), "cuEventRecord" + on(device));
}

void CudaDriver::stream_wait_event(int device, Stream stream, Event event) const {
  OnDevice scope(device);
  check(api().wait_event(pointer(stream), pointer(event), 0), "cuStreamWaitEvent" + on(device));
}

bool CudaDriver::event_done(int device, Event event) const {
  OnDevice scope(device);
  Result result = api().query_event(pointer(event));
  if (result == kNotReady) return false;
  check(result, "cuEventQuery" + on(device));
  return true;
}

bool CudaDriver::capturing(int device, Stream stream) const {
  OnDevice scope(device);
  int status;  // 0: not capturing, 1: capturing, 2: the capture is invalid
  check(api().capturing(pointer(stream), &status), "cuStreamIsCapturing" + on(device));
  return status != 0;
}

}  // namespace fusedrl
