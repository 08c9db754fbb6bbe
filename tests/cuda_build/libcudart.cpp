// A runtime of CUDA over the driver of libcuda.cpp: one H100. A launch computes nothing; it is
// refused where an H100 would refuse it, and is a line of the file FAKE_CUDA_LAUNCHES names. Copies
// copy.
//
// The prototypes are ours, as those of CUDA 12 and 13 differ in arguments that nothing here reads.
#include <cxxabi.h>
#include <dlfcn.h>
#include <driver_types.h>
#include <vector_types.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

extern "C" {
int cuDriverGetVersion(int*);
int cuDeviceGetCount(int*);
int cuMemAlloc_v2(unsigned long long*, size_t);
int cuMemFree_v2(unsigned long long);
int cuMemGetInfo_v2(size_t*, size_t*);
int cuPointerGetAttribute(void*, int, unsigned long long);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
int cuStreamIsCapturing(void*, int*);
}

namespace {

constexpr int kSharedMemory = 48 << 10, kMostSharedMemory = 227 << 10;  // of a block
constexpr int kMostBlocks = 2147483647, kMostOthers = 65535;            // of a grid: x, y and z
constexpr int kProcessors = 132;

struct Kernel {
  std::string name;
  size_t most_shared_memory = kSharedMemory;
};

std::mutex guard;
std::unordered_map<const void*, Kernel>& kernels() {
  static auto* known =
      new std::unordered_map<const void*, Kernel>;  // libraries register theirs early
  return *known;
}
std::map<const char*, size_t>& pinned = *new std::map<const char*, size_t>;
std::atomic<unsigned long long> captures = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t noted(int error) { return noted(static_cast<cudaError_t>(error)); }

unsigned long long address(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer);
}

template <typename Handle>
cudaError_t make(Handle* handle) {
  *handle = static_cast<Handle>(std::malloc(8));
  return cudaSuccess;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(guard);
  const char* byte = static_cast<const char*>(pointer);
  auto after = pinned.upper_bound(byte);
  return after != pinned.begin() && byte < (--after)->first + after->second;
}

bool is_legal(dim3 grid, dim3 block, size_t shared_memory, size_t most_shared_memory) {
  const auto within = [](unsigned count, int most) {
    return count >= 1 && count <= unsigned(most);
  };
  return within(grid.x, kMostBlocks) && within(grid.y, kMostOthers) &&
         within(grid.z, kMostOthers) && within(block.x, 1024) && within(block.y, 1024) &&
         within(block.z, 64) && within(block.x * block.y * block.z, 1024) &&
         shared_memory <= most_shared_memory;
}

std::string demangled(const std::string& name) {
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const std::string found = text ? text : name;
  std::free(text);
  return found;
}

void log_launch(const std::string& name, dim3 grid, dim3 block, size_t shared_memory, bool legal) {
  const char* path = std::getenv("FAKE_CUDA_LAUNCHES");
  if (path == nullptr) return;
  if (std::FILE* file = std::fopen(path, "a")) {
    std::fprintf(file, "%u,%u,%u %u,%u,%u %zu %s %s\n", grid.x, grid.y, grid.z, block.x, block.y,
                 block.z, shared_memory, legal ? "runs" : "refused", demangled(name).c_str());
    std::fclose(file);
  }
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, size_t shared_memory) {
  Kernel kernel;
  {
    std::lock_guard<std::mutex> lock(guard);
    kernel = kernels()[function];
  }
  const bool legal = is_legal(grid, block, shared_memory, kernel.most_shared_memory);
  log_launch(kernel.name, grid, block, shared_memory, legal);
  return noted(legal ? cudaSuccess : cudaErrorInvalidConfiguration);
}

struct Configuration {
  dim3 grid, block;
  size_t shared_memory;
  void* stream;
};
thread_local Configuration pushed;

int nothing() { return 0; }

}  // namespace

#define FAKE(type, name, ...) \
  extern "C" __attribute__((visibility("default"))) type name(__VA_ARGS__)

// The device.

FAKE(cudaError_t, cudaGetDeviceCount, int* count) {
  if (cuDeviceGetCount(count) != 0 || *count == 0) return noted(cudaErrorNoDevice);
  static const int version = [] {  // of the process, as a driver does not change
    int found = 0;
    cuDriverGetVersion(&found);
    return found;
  }();
  return noted(version / 1000 < FAKE_CUDA_MAJOR ? cudaErrorInsufficientDriver : cudaSuccess);
}
FAKE(cudaError_t, cudaGetDevice, int* device) { return *device = 0, cudaSuccess; }
FAKE(cudaError_t, cudaSetDevice, int device) {
  return noted(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
FAKE(cudaError_t, cudaDriverGetVersion, int* version) { return noted(cuDriverGetVersion(version)); }
FAKE(cudaError_t, cudaRuntimeGetVersion, int* version) {
  return *version = 1000 * FAKE_CUDA_MAJOR, cudaSuccess;
}
FAKE(cudaError_t, cudaGetDeviceProperties, cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "NVIDIA H100 (played)");
  properties->major = 9;
  properties->totalGlobalMem = size_t(80) << 30;
  properties->multiProcessorCount = kProcessors;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsPerBlock = 1024;
  properties->warpSize = 32;
  properties->sharedMemPerBlock = kSharedMemory;
  properties->sharedMemPerBlockOptin = kMostSharedMemory;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 50 << 20;
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    properties->maxGridSize[i] = i < 1 ? kMostBlocks : kMostOthers;
  }
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}
// As CUDA 12 names it.
FAKE(cudaError_t, cudaGetDeviceProperties_v2, cudaDeviceProp* properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
FAKE(cudaError_t, cudaDeviceGetAttribute, int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> known{
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMultiProcessorCount, kProcessors},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedMemory},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kMostSharedMemory},
      {cudaDevAttrMaxGridDimX, kMostBlocks},
      {cudaDevAttrWarpSize, 32},
  };
  const auto found = known.find(attribute);
  return *value = found == known.end() ? 0 : found->second, cudaSuccess;
}
FAKE(cudaError_t, cudaDeviceGetStreamPriorityRange, int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
FAKE(cudaError_t, cudaDeviceCanAccessPeer, int* can, int, int) { return *can = 0, cudaSuccess; }

// Errors.

FAKE(cudaError_t, cudaGetLastError) { return std::exchange(last_error, cudaSuccess); }
FAKE(cudaError_t, cudaPeekAtLastError) { return last_error; }
FAKE(const char*, cudaGetErrorName, cudaError_t) { return "cudaErrorPlayed"; }
FAKE(const char*, cudaGetErrorString, cudaError_t error) {
  static const std::map<cudaError_t, const char*> known{
      {cudaErrorInvalidConfiguration, "invalid configuration argument"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorNoDevice, "no CUDA-capable device is detected"},
      {cudaErrorInsufficientDriver, "CUDA driver version is insufficient"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
  };
  const auto found = known.find(error);
  return found == known.end() ? "an error of a runtime that is played" : found->second;
}

// Memory.

FAKE(cudaError_t, cudaMalloc, void** pointer, size_t nbytes) {
  unsigned long long allocated = 0;
  const int error = nbytes ? cuMemAlloc_v2(&allocated, nbytes) : 0;
  *pointer = reinterpret_cast<void*>(allocated);
  return noted(error);
}
FAKE(cudaError_t, cudaFree, void* pointer) {
  return noted(pointer ? cuMemFree_v2(address(pointer)) : 0);
}
FAKE(cudaError_t, cudaMemGetInfo, size_t* free, size_t* total) {
  return noted(cuMemGetInfo_v2(free, total));
}
FAKE(cudaError_t, cudaHostAlloc, void** pointer, size_t nbytes, unsigned) {
  if (posix_memalign(pointer, 4096, nbytes) != 0) return noted(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> lock(guard);
  pinned[static_cast<char*>(*pointer)] = nbytes;
  return cudaSuccess;
}
FAKE(cudaError_t, cudaFreeHost, void* pointer) {
  std::lock_guard<std::mutex> lock(guard);
  if (pinned.erase(static_cast<char*>(pointer)) == 0) return noted(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}
FAKE(cudaError_t, cudaPointerGetAttributes, cudaPointerAttributes* attributes,
     const void* pointer) {
  int type = 0;
  *attributes = {};
  if (cuPointerGetAttribute(&type, 2, address(pointer)) == 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else {
    attributes->type = is_pinned(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}
FAKE(cudaError_t, cudaMemcpyAsync, void* to, const void* from, size_t nbytes, int, void*) {
  return std::memmove(to, from, nbytes), cudaSuccess;
}
FAKE(cudaError_t, cudaMemcpy, void* to, const void* from, size_t nbytes, int kind) {
  return cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
}
FAKE(cudaError_t, cudaMemcpy2DAsync, void* to, size_t to_pitch, const void* from, size_t from_pitch,
     size_t width, size_t height, int, void*) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
FAKE(cudaError_t, cudaMemsetAsync, void* to, int value, size_t nbytes, void*) {
  return std::memset(to, value, nbytes), cudaSuccess;
}
FAKE(cudaError_t, cudaMemset, void* to, int value, size_t nbytes) {
  return cudaMemsetAsync(to, value, nbytes, nullptr);
}

// Streams, events and captures.

FAKE(cudaError_t, cudaStreamCreate, void** stream) { return make(stream); }
FAKE(cudaError_t, cudaStreamCreateWithFlags, void** stream, unsigned) { return make(stream); }
FAKE(cudaError_t, cudaStreamCreateWithPriority, void** stream, unsigned, int) {
  return make(stream);
}
FAKE(cudaError_t, cudaStreamSynchronize, void* stream) {
  int is_captured = 0;
  cuStreamIsCapturing(stream, &is_captured);
  return noted(is_captured ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}
FAKE(cudaError_t, cudaEventCreate, void** event) { return make(event); }
FAKE(cudaError_t, cudaEventCreateWithFlags, void** event, unsigned) { return make(event); }
FAKE(cudaError_t, cudaEventDestroy, void* event) { return std::free(event), cudaSuccess; }
FAKE(cudaError_t, cudaEventElapsedTime, float* ms, void*, void*) { return *ms = 1, cudaSuccess; }
FAKE(cudaError_t, cudaStreamBeginCapture, void* stream, int mode) {
  ++captures;
  return noted(cuStreamBeginCapture_v2(stream, mode));
}
FAKE(cudaError_t, cudaStreamEndCapture, void* stream, void** graph) {
  return noted(cuStreamEndCapture(stream, graph));
}
FAKE(cudaError_t, cudaStreamIsCapturing, void* stream, int* status) {
  return noted(cuStreamIsCapturing(stream, status));
}
FAKE(cudaError_t, cudaStreamGetCaptureInfo, void* stream, int* status, unsigned long long* id) {
  if (id != nullptr) *id = captures;
  return cudaStreamIsCapturing(stream, status);
}
// As CUDA 12 names it.
FAKE(cudaError_t, cudaStreamGetCaptureInfo_v2, void* stream, int* status, unsigned long long* id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
FAKE(cudaError_t, cudaGraphInstantiateWithFlags, void** executable, void*, unsigned long long) {
  return make(executable);
}
FAKE(cudaError_t, cudaGraphInstantiate, void** executable, void*, unsigned long long) {
  return make(executable);
}
FAKE(cudaError_t, cudaGraphGetNodes, void*, void*, size_t* count) {
  return *count = 1, cudaSuccess;
}

// Kernels.

FAKE(void**, __cudaRegisterFatBinary, void*) {
  static void* handle;
  return &handle;
}
FAKE(char, __cudaInitModule, void**) { return 1; }
FAKE(void, __cudaRegisterFunction, void**, const char* function, char*, const char* name) {
  std::lock_guard<std::mutex> lock(guard);
  kernels()[function].name = name;
}
// Writes the names of all kernels that libraries have brought: what a test compares launches with.
FAKE(void, fake_cuda_kernels, const char* path) {
  std::lock_guard<std::mutex> lock(guard);
  if (std::FILE* file = std::fopen(path, "w")) {
    for (const auto& [function, kernel] : kernels()) {
      std::fprintf(file, "%s\n", demangled(kernel.name).c_str());
    }
    std::fclose(file);
  }
}
FAKE(unsigned, __cudaPushCallConfiguration, dim3 grid, dim3 block, size_t shared_memory,
     void* stream) {
  return pushed = {grid, block, shared_memory, stream}, 0;
}
FAKE(cudaError_t, __cudaPopCallConfiguration, dim3* grid, dim3* block, size_t* shared_memory,
     void** stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_memory = pushed.shared_memory;
  *stream = pushed.stream;
  return cudaSuccess;
}
FAKE(cudaError_t, __cudaGetKernel, const void** kernel, const void* function) {
  return *kernel = function, cudaSuccess;
}
FAKE(cudaError_t, cudaLaunchKernel, const void* function, dim3 grid, dim3 block, void**,
     size_t shared_memory, void*) {
  return launch(function, grid, block, shared_memory);
}
FAKE(cudaError_t, __cudaLaunchKernel, const void* kernel, dim3 grid, dim3 block, void**,
     size_t shared_memory, void*) {
  return launch(kernel, grid, block, shared_memory);
}
FAKE(cudaError_t, cudaLaunchKernelExC, const cudaLaunchConfig_t* asked, const void* function,
     void**) {
  return launch(function, asked->gridDim, asked->blockDim, asked->dynamicSmemBytes);
}
FAKE(cudaError_t, cudaFuncGetAttributes, cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  return cudaSuccess;
}
FAKE(cudaError_t, cudaFuncSetAttribute, const void* function, int attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > kMostSharedMemory) return noted(cudaErrorInvalidValue);
  std::lock_guard<std::mutex> lock(guard);
  kernels()[function].most_shared_memory = static_cast<size_t>(value);
  return cudaSuccess;
}
FAKE(cudaError_t, cudaOccupancyMaxActiveBlocksPerMultiprocessor, int* count, const void*, int,
     size_t) {
  return *count = 2, cudaSuccess;
}
FAKE(cudaError_t, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int* count, const void*,
     int, size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
FAKE(cudaError_t, cudaGetDriverEntryPointByVersion, const char* name, void** function, unsigned,
     unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = reinterpret_cast<void*>(&nothing);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
// As CUDA 12 names it.
FAKE(cudaError_t, cudaGetDriverEntryPoint, const char* name, void** function, unsigned long long,
     cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, 0, found);
}
