// Host side of all CUDA ops: device and stream, checked launches, and scalar arguments.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <limits>

#include "common/device.h"
#include "common/tensor.h"

namespace fusedrl {

inline void check_cuda(cudaError_t error, const char* what) {
  check(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

// A guard that makes a tensor's device current, with the current stream of the device.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {
    // This library is linked to its own CUDA runtime, whose device has to be set too.
    check_cuda(cudaSetDevice(device_), "cudaSetDevice");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  // The number of blocks of the largest size that the device runs at a time.
  int64_t blocks_at_once() const {
    int processors = 0;
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_),
               "cudaDeviceGetAttribute");
    return 2 * int64_t(processors);
  }

  template <typename... Params, typename... Args>
  void launch(void (*kernel)(Params...), int64_t blocks, int threads, Args&&... args) const {
    constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
    kernel<<<static_cast<unsigned>(std::min(blocks, kMaxBlocks)), threads, 0, stream_>>>(
        std::forward<Args>(args)...);
    check_cuda(cudaGetLastError(), "kernel launch");
  }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// A 0-dim float64 tensor as a kernel argument. It is read here if it is on the CPU, and by the
// kernel if it is on the device of `like`.
inline Scalar scalar_argument(const char* name, const Tensor& tensor, const Tensor& like) {
  if (tensor.is_cpu()) return {*data<double>(tensor), nullptr};
  check(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
        ": expected a tensor on the CPU or on cuda:", like.get_device_index(),
        ", got another device; move it with .to()");
  return {0, data<double>(tensor)};
}

}  // namespace fusedrl
