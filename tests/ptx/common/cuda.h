// Stands in for csrc/common/cuda.h: the host code of the CUDA ops as it is, registered for CPU
// tensors, but that a launch goes to whoever has set `launcher`: the interpreter of the kernels'
// PTX. The kernels that are compiled here are never called: their addresses name them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <tuple>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { std::abort(); }
inline uint32_t __shfl_down_sync(unsigned, uint32_t, int) { std::abort(); }
inline uint32_t atomicOr(uint32_t*, uint32_t) { std::abort(); }
template <typename T>
T __ldg(const T*) {
  std::abort();
}
#define __assert_fail(...) abort()

namespace ptx {

// One argument of a kernel, by value.
struct Argument {
  const void* value;
  size_t size;
};

// Runs a kernel, and returns the message of what stopped it, or null.
using Launcher = const char* (*)(const void* kernel, unsigned blocks, unsigned threads,
                                 const Argument* arguments, size_t count);
extern "C" Launcher launcher;

}  // namespace ptx

#include "common/device.h"
#include "common/tensor.h"

namespace fusedrl {

class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor&) {}

  // Some tests have fewer rows, and some more.
  int64_t blocks_at_once() const { return 5; }

  // As few blocks as most kernels have to loop with, and more than others need.
  template <typename... Params, typename... Args>
  void launch(void (*kernel)(Params...), int64_t blocks, int threads, Args&&... args) const {
    constexpr int64_t kBlocks = 3;
    const std::tuple<Params...> values(std::forward<Args>(args)...);
    std::apply(
        [&](const auto&... each) {
          const ptx::Argument arguments[] = {{&each, sizeof each}...};
          const char* stopped =
              ptx::launcher(reinterpret_cast<const void*>(kernel), blocks > 0 ? kBlocks : 0,
                            threads, arguments, sizeof...(Params));
          check(stopped == nullptr, stopped);
        },
        values);
  }
};

// A kernel is told every third value, so that the two of an op and its backward pass take turns,
// and reads the others.
inline Scalar scalar_argument(const char*, const Tensor& tensor, const Tensor&) {
  static int calls = 0;
  const bool told = ++calls % 3 == 0;
  return told ? Scalar{*data<double>(tensor), nullptr} : Scalar{0, data<double>(tensor)};
}

}  // namespace fusedrl

#define CUDA CPU  // the key that the ops are registered for
