// A driver of CUDA without a GPU. Device memory is a file in memory, which another process opens by
// its handle; streams are done with everything at once.
//
// FAKE_CUDA_DRIVER is its version (13000), FAKE_CUDA_DEVICES how many GPUs it has (1). It fails at
// the function that FAKE_CUDA_FAIL names, with FAKE_CUDA_CODE (1), and with FAKE_CUDA_NOTES=1 it
// notes its calls on stderr.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

using Address = unsigned long long;

constexpr int kInvalid = 1, kOutOfMemory = 2;
constexpr size_t kTotal = size_t(80) << 30;

struct Bytes64 {
  char bytes[64];
};
// What a handle of memory says: where its file is, and which one it was.
struct Export {
  int pid, fd;
  uint64_t file, nbytes;
  Address address;
};
struct Block {
  size_t nbytes;
  int fd;  // -1: of another process
};

thread_local void* context = nullptr;
thread_local int mode = 0;
std::mutex guard;
std::map<Address, Block>& blocks = *new std::map<Address, Block>;  // torch frees at the very end
size_t used = 0;

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

int note(const char* name) {
  if (number("FAKE_CUDA_NOTES", 0))
    std::fprintf(stderr, "%s context=%zu mode=%d\n", name, reinterpret_cast<size_t>(context), mode);
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  return fail && std::string(fail) == name ? number("FAKE_CUDA_CODE", 1) : 0;
}

void* captured = nullptr;

uint64_t file_of(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

int map_file(Address* address, int fd, size_t nbytes, bool ours) {
  void* mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (!ours) close(fd);
  if (mapped == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<Address>(mapped);
  blocks[*address] = {nbytes, ours ? fd : -1};
  return 0;
}

int unmap(Address address) {
  const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalid;
  const auto [nbytes, fd] = found->second;
  munmap(reinterpret_cast<void*>(address), nbytes);
  if (fd >= 0) {
    close(fd);
    used -= nbytes;
  }
  blocks.erase(found);
  return 0;
}

}  // namespace

#define FAKE(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

FAKE(cuInit, unsigned) { return note("cuInit"); }
FAKE(cuDriverGetVersion, int* version) {
  *version = number("FAKE_CUDA_DRIVER", 13000);
  return note("cuDriverGetVersion");
}
FAKE(cuGetErrorString, int, const char** text) { return *text = "as asked", 0; }
FAKE(cuDeviceGetCount, int* count) {
  *count = number("FAKE_CUDA_DEVICES", 1);
  return note("cuDeviceGetCount");
}
FAKE(cuDevicePrimaryCtxRetain, void** retained, int device) {
  *retained = reinterpret_cast<void*>(static_cast<size_t>(device + 10));
  return note("cuDevicePrimaryCtxRetain");
}
FAKE(cuDevicePrimaryCtxGetState, int, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, 0;
}
FAKE(cuCtxGetCurrent, void** current) { return *current = &used, 0; }  // of the runtime: one
FAKE(cuCtxSetCurrent, void* other) { return context = other, 0; }
FAKE(cuThreadExchangeStreamCaptureMode, int* other) {
  int before = mode;
  mode = *other;
  *other = before;
  return 0;
}

FAKE(cuMemAlloc_v2, Address* address, size_t nbytes) {
  if (int failed = note("cuMemAlloc")) return failed;
  std::lock_guard<std::mutex> lock(guard);
  if (nbytes == 0) return kInvalid;
  if (nbytes > kTotal - used) return kOutOfMemory;
  const int fd = memfd_create("device memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
  used += nbytes;
  return map_file(address, fd, nbytes, true);
}
FAKE(cuMemFree_v2, Address address) {
  if (int failed = note("cuMemFree")) return failed;
  std::lock_guard<std::mutex> lock(guard);
  return unmap(address);
}
FAKE(cuMemGetInfo_v2, size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(guard);
  *free = kTotal - used;
  *total = kTotal;
  return note("cuMemGetInfo");
}
// Only the question whether a pointer is into memory of the device:
// CU_POINTER_ATTRIBUTE_MEMORY_TYPE.
FAKE(cuPointerGetAttribute, void* answer, int attribute, Address address) {
  if (attribute != 2) return kInvalid;
  std::lock_guard<std::mutex> lock(guard);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return kInvalid;
  const auto& [start, block] = *--after;
  if (address >= start + block.nbytes) return kInvalid;
  *static_cast<int*>(answer) = 2;  // CU_MEMORYTYPE_DEVICE
  return 0;
}

FAKE(cuIpcGetMemHandle, Bytes64* handle, Address address) {
  std::lock_guard<std::mutex> lock(guard);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalid;
  const auto [nbytes, fd] = found->second;
  const Export exported{getpid(), fd, file_of(fd), nbytes, address};
  *handle = {};
  std::memcpy(handle->bytes, &exported, sizeof exported);
  return note("cuIpcGetMemHandle");
}
FAKE(cuIpcOpenMemHandle_v2, Address* address, Bytes64 handle, unsigned flags) {
  if (int failed = flags == 1 ? note("cuIpcOpenMemHandle") : kInvalid) return failed;
  Export exported;
  std::memcpy(&exported, handle.bytes, sizeof exported);
  *address = exported.address;
  if (exported.pid == getpid()) return 0;
  const std::string path =
      "/proc/" + std::to_string(exported.pid) + "/fd/" + std::to_string(exported.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalid;
  if (file_of(fd) != exported.file) return close(fd), kInvalid;
  std::lock_guard<std::mutex> lock(guard);
  return map_file(address, fd, exported.nbytes, false);
}
FAKE(cuIpcCloseMemHandle, Address address) {
  std::lock_guard<std::mutex> lock(guard);
  const auto found = blocks.find(address);
  if (found != blocks.end() && found->second.fd < 0) unmap(address);
  return note("cuIpcCloseMemHandle");
}

FAKE(cuLaunchHostFunc, void*, void (*function)(void*), void* argument) {
  if (int failed = note("cuLaunchHostFunc")) return failed;
  return function(argument), 0;
}
FAKE(cuStreamBeginCapture_v2, void* stream, int) {
  if (captured != nullptr) return kInvalid;
  captured = stream;
  return note("cuStreamBeginCapture");
}
FAKE(cuStreamEndCapture, void* stream, void** graph) {
  if (captured != stream) return kInvalid;
  captured = nullptr;
  *graph = &captured;
  return note("cuStreamEndCapture");
}
FAKE(cuStreamIsCapturing, void* stream, int* status) {
  *status = stream != nullptr && stream == captured;
  return note("cuStreamIsCapturing");
}
