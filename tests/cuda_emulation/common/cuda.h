// Stands in for csrc/common/cuda.h: the CUDA ops compiled by a host compiler and registered for CPU
// tensors. Every CUDA thread is a host thread, so that sanitizers see races and what lies outside a
// tensor. Blocks run one after the other, a few to a grid: kernels have to loop over the rest.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <semaphore>
#include <thread>
#include <vector>

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
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Stopped {};  // leaves a kernel whose check failed

// What the threads of a running kernel share.
struct Block {
  std::barrier<> all;
  std::deque<std::barrier<>> warps;
  std::vector<uint32_t> lanes;
  std::atomic<const char*> failure = nullptr;

  explicit Block(int threads) : all(threads), lanes(threads) {
    for (int i = 0; i < threads; i += 32) warps.emplace_back(32);
  }

  std::barrier<>& warp() { return warps[threadIdx.x / 32]; }
};
inline Block* block = nullptr;

// Host threads that wait for the next kernel; to start them takes longer than most kernels here.
class Threads {
 public:
  ~Threads() {
    run_ = nullptr;
    for (Waiting& one : waiting_) one.begin.release();
  }

  // Calls run(0) to run(count - 1), each in a thread of its own.
  void run(unsigned count, const std::function<void(unsigned)>& run) {
    while (waiting_.size() < count) {
      Waiting& one = waiting_.emplace_back();
      one.thread = std::jthread([&, index = unsigned(waiting_.size() - 1)] {
        while (one.begin.acquire(), run_ != nullptr) {
          (*run_)(index);
          ended_.release();
        }
      });
    }
    run_ = &run;
    for (unsigned i = 0; i < count; ++i) waiting_[i].begin.release();
    for (unsigned i = 0; i < count; ++i) ended_.acquire();
  }

 private:
  struct Waiting {
    std::binary_semaphore begin{0};
    std::jthread thread;
  };

  const std::function<void(unsigned)>* run_ = nullptr;
  std::counting_semaphore<> ended_{0};
  std::deque<Waiting> waiting_;
};
inline Threads host_threads;

[[noreturn]] inline void fail(const char* message) {
  block->failure = message;
  throw Stopped();
}

}  // namespace emulation

inline void __syncthreads() { emulation::block->all.arrive_and_wait(); }

inline uint32_t __shfl_down_sync(unsigned, uint32_t value, int distance) {
  emulation::Block& block = *emulation::block;
  const unsigned lane = threadIdx.x % 32;
  block.lanes[threadIdx.x] = value;
  block.warp().arrive_and_wait();
  const uint32_t result = lane + distance < 32 ? block.lanes[threadIdx.x + distance] : value;
  block.warp().arrive_and_wait();
  return result;
}

template <typename T>
T __ldg(const T* p) {
  return *p;
}

#include "common/device.h"
#include "common/tensor.h"

namespace fusedrl {

class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor&) {}

  // Some tests have fewer rows, and some more.
  int64_t blocks_at_once() const { return 5; }

  template <typename... Params, typename... Args>
  void launch(void (*kernel)(Params...), int64_t blocks, int threads, Args... args) const {
    constexpr int64_t kMaxBlocks = 3;
    const unsigned grid = static_cast<unsigned>(std::min(blocks, kMaxBlocks));
    emulation::Block block(threads);
    emulation::block = &block;
    emulation::host_threads.run(threads, [&](unsigned t) {
      threadIdx.x = t;
      blockDim.x = threads;
      gridDim.x = grid;
      try {
        for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
          kernel(args...);
          __syncthreads();
        }
      } catch (const emulation::Stopped&) {
        block.warp().arrive_and_drop();
        block.all.arrive_and_drop();
      }
    });
    check(block.failure == nullptr, block.failure.load());
  }
};

inline Scalar scalar_argument(const char*, const Tensor& tensor, const Tensor&) {
  return {0, data<double>(tensor)};
}

}  // namespace fusedrl

#define __assert_fail(message, ...) emulation::fail(message)
#define CUDA CPU  // the key that the ops are registered for
