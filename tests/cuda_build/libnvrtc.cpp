// A compiler of kernels at run time, which torch has for a few of its functions: whatever it is
// given, it makes one byte of it, which is never run and must not be kept for a GPU.
#include <cstddef>
#include <cstdlib>

#define FAKE(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

namespace {
const int without_cache = setenv("USE_PYTORCH_KERNEL_CACHE", "0", 1);
}

FAKE(nvrtcVersion, int* major, int* minor) {
  return *major = FAKE_CUDA_MAJOR, *minor = without_cache, 0;
}
FAKE(nvrtcGetPTXSize, void*, size_t* nbytes) { return *nbytes = 1, 0; }
FAKE(nvrtcGetCUBINSize, void*, size_t* nbytes) { return *nbytes = 1, 0; }
FAKE(nvrtcGetProgramLogSize, void*, size_t* nbytes) { return *nbytes = 1, 0; }
FAKE(nvrtcGetLoweredName, void*, const char*, const char** name) { return *name = "played", 0; }
