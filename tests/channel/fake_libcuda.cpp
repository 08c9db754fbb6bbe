// A libcuda.so.1 that notes its calls on stderr and fails at the function that FAKE_CUDA_FAIL
// names. Device memory is the heap; a handle is its address.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace {
struct Bytes16 {
  unsigned char bytes[16];
};
struct Bytes64 {
  char bytes[64];
};
int depth = 0, mode = 0;

int note(const char* name) {
  std::fprintf(stderr, "%s depth=%d mode=%d\n", name, depth, mode);
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  const char* code = std::getenv("FAKE_CUDA_CODE");
  return fail && std::string_view(fail) == name ? std::atoi(code ? code : "1") : 0;
}
}  // namespace

#define FAKE(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

FAKE(cuInit, unsigned) { return note("cuInit"); }
FAKE(cuDriverGetVersion, int* version) {
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  const bool known = !fail || std::string_view(fail) != "cuDriverGetVersion";
  return *version = known ? 13010 : 0, note("cuDriverGetVersion");
}
FAKE(cuGetErrorName, int, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
FAKE(cuGetErrorString, int, const char** text) { return *text = "as asked", 0; }
FAKE(cuDeviceGetCount, int* count) { return *count = 2, note("cuDeviceGetCount"); }
FAKE(cuDeviceGet, int* device, int index) { return *device = index + 10, note("cuDeviceGet"); }
FAKE(cuDeviceGetUuid_v2, Bytes16* uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(17 * i);
  uuid->bytes[15] = static_cast<unsigned char>(device);
  return note("cuDeviceGetUuid");
}
FAKE(cuDevicePrimaryCtxRetain, void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<size_t>(device));
  return note("cuDevicePrimaryCtxRetain");
}
FAKE(cuCtxPushCurrent_v2, void* context) {
  std::fprintf(stderr, "push %zu\n", reinterpret_cast<size_t>(context));
  return ++depth, 0;
}
FAKE(cuCtxPopCurrent_v2, void**) { return --depth, 0; }
FAKE(cuThreadExchangeStreamCaptureMode, int* other) {
  int before = mode;
  mode = *other;
  *other = before;
  return 0;
}
FAKE(cuMemAlloc_v2, unsigned long long* address, size_t nbytes) {
  *address = reinterpret_cast<unsigned long long>(std::calloc(nbytes, 1));
  return note("cuMemAlloc");
}
FAKE(cuMemFree_v2, unsigned long long address) {
  std::free(reinterpret_cast<void*>(address));
  return note("cuMemFree");
}
FAKE(cuIpcGetMemHandle, Bytes64* handle, unsigned long long address) {
  *handle = {};
  std::memcpy(handle->bytes + 56, &address, 8);
  return note("cuIpcGetMemHandle");
}
FAKE(cuIpcOpenMemHandle_v2, unsigned long long* address, Bytes64 handle, unsigned flags) {
  std::memcpy(address, handle.bytes + 56, 8);
  return flags == 1 ? note("cuIpcOpenMemHandle") : 1;
}
FAKE(cuIpcCloseMemHandle, unsigned long long) { return note("cuIpcCloseMemHandle"); }
FAKE(cuEventCreate, void** event, unsigned flags) {
  *event = reinterpret_cast<void*>(static_cast<size_t>(1000 + flags));
  return note("cuEventCreate");
}
FAKE(cuEventDestroy_v2, void*) { return note("cuEventDestroy"); }
FAKE(cuIpcGetEventHandle, Bytes64* handle, void* event) {
  *handle = {};
  std::memcpy(handle->bytes + 56, &event, 8);
  return note("cuIpcGetEventHandle");
}
FAKE(cuIpcOpenEventHandle, void** event, Bytes64 handle) {
  std::memcpy(event, handle.bytes + 56, 8);
  return note("cuIpcOpenEventHandle");
}
FAKE(cuEventRecord, void*, void*) { return note("cuEventRecord"); }
FAKE(cuEventQuery, void*) { return note("cuEventQuery"); }
FAKE(cuStreamWaitEvent, void*, void*, unsigned flags) {
  return flags == 0 ? note("cuStreamWaitEvent") : 1;
}
FAKE(cuStreamIsCapturing, void* stream, int* status) {
  *status = stream == nullptr ? 0 : 1;
  return note("cuStreamIsCapturing");
}
