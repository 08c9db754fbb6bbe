// Stands in for csrc/common/cuda.h: the CUDA ops compiled by a host compiler and registered for CPU
// tensors. The threads of a block take turns on one host thread, each on a stack of its own, and a
// thread has its turn until it waits for others. Who comes first is random, and a warp gets as far
// ahead of the others as it can, so that what is read or written without waiting for the others is
// wrong. Blocks run one after the other, a few to a grid: kernels have to loop over the rest.
#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
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
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Stopped {};  // leaves a kernel whose check failed

// A stack on which a function runs until it waits, and goes on where it waited.
class Fiber {
 public:
  Fiber() : stack_(new char[kStackBytes]) {
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_.get();
    inside_.uc_stack.ss_size = kStackBytes;
    makecontext(&inside_, &Fiber::begin, 0);
    inside_.uc_stack.ss_size = 0;  // else the sanitizer forgets at each switch what it watches here
  }

  // Returns when the function waits; one that has ended begins again.
  void go_on(const std::function<void()>& function) {
    running_ = this;
    function_ = &function;
    void* sanitized;
    __sanitizer_start_switch_fiber(&sanitized, stack_.get(), kStackBytes);
    swapcontext(&outside_, &inside_);
    __sanitizer_finish_switch_fiber(sanitized, nullptr, nullptr);
  }

  // Called by the function: back to who called go_on().
  static void wait() {
    Fiber& self = *running_;
    void* sanitized;
    __sanitizer_start_switch_fiber(&sanitized, self.outer_stack_, self.outer_bytes_);
    swapcontext(&self.inside_, &self.outside_);
    __sanitizer_finish_switch_fiber(sanitized, &self.outer_stack_, &self.outer_bytes_);
  }

 private:
  static constexpr size_t kStackBytes = 128 * 1024;

  static void begin() {
    __sanitizer_finish_switch_fiber(nullptr, &running_->outer_stack_, &running_->outer_bytes_);
    while (true) {
      (*running_->function_)();
      wait();
    }
  }

  static inline Fiber* running_ = nullptr;
  std::unique_ptr<char[]> stack_;
  ucontext_t inside_{}, outside_{};
  const std::function<void()>* function_ = nullptr;
  const void* outer_stack_ = nullptr;
  size_t outer_bytes_ = 0;
};
inline std::deque<Fiber> fibers;  // one a thread, kept from kernel to kernel

// The threads of the block that runs.
class Block {
 public:
  explicit Block(unsigned threads) : threads_(threads), lanes_(kWarp), warps_(threads / kWarp) {
    while (fibers.size() < threads) fibers.emplace_back();
    std::iota(lanes_.begin(), lanes_.end(), 0);
    std::iota(warps_.begin(), warps_.end(), 0);
  }

  // Calls the kernel in every thread. A failed check of one ends that one alone.
  void run(const std::function<void()>& kernel) {
    const std::function<void()> thread = [&] {
      try {
        kernel();
      } catch (const Stopped&) {
      }
      threads_[threadIdx.x].state = kEnded;
    };
    for (Thread& one : threads_) one.state = kRuns;
    do {
      std::ranges::shuffle(warps_, random_);
      for (const unsigned warp : warps_) run_warp(warp * kWarp, thread);
    } while (release(threads_, kWaitsForBlock));
    // Some that wait for others which never do would wait for ever on a GPU.
    if (in_state(threads_, kEnded) < threads_.size()) std::abort();
  }

  void wait_for_block() { wait(kWaitsForBlock); }

  uint32_t value_below(uint32_t value, unsigned distance) {
    const unsigned t = threadIdx.x;
    threads_[t].lane_value = value;
    wait(kWaitsForWarp);
    const uint32_t result =
        t % kWarp + distance < kWarp ? threads_[t + distance].lane_value : value;
    wait(kWaitsForWarp);
    return result;
  }

  const char* failure = nullptr;

 private:
  static constexpr unsigned kWarp = 32;
  enum State { kRuns, kWaitsForWarp, kWaitsForBlock, kEnded };
  struct Thread {
    State state;
    uint32_t lane_value;
  };

  // As far as the warp comes without the others of the block.
  void run_warp(unsigned first, const std::function<void()>& thread) {
    do {
      std::ranges::shuffle(lanes_, random_);
      for (const unsigned lane : lanes_) {
        threadIdx.x = first + lane;
        if (threads_[threadIdx.x].state == kRuns) fibers[threadIdx.x].go_on(thread);
      }
    } while (release({&threads_[first], kWarp}, kWaitsForWarp));
  }

  static size_t in_state(std::span<const Thread> threads, State state) {
    return std::ranges::count(threads, state, &Thread::state);
  }

  // Lets threads go on that wait, if all do that have not ended.
  static bool release(std::span<Thread> threads, State waiting) {
    const size_t count = in_state(threads, waiting);
    if (count == 0 || count + in_state(threads, kEnded) < threads.size()) return false;
    for (Thread& one : threads) {
      if (one.state == waiting) one.state = kRuns;
    }
    return true;
  }

  void wait(State state) {
    threads_[threadIdx.x].state = state;
    Fiber::wait();
  }

  std::vector<Thread> threads_;
  std::vector<unsigned> lanes_, warps_;
  static inline std::mt19937 random_;  // the same orders in every run
};
inline Block* block = nullptr;

[[noreturn]] inline void fail(const char* message) {
  block->failure = message;
  throw Stopped();
}

}  // namespace emulation

inline void __syncthreads() { emulation::block->wait_for_block(); }

inline uint32_t __shfl_down_sync(unsigned, uint32_t value, int distance) {
  return emulation::block->value_below(value, distance);
}

// A thread's turn ends only where it waits.
inline uint32_t atomicOr(uint32_t* p, uint32_t bits) { return std::exchange(*p, *p | bits); }

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
    blockDim.x = threads;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
      block.run([&] { kernel(args...); });
    }
    check(block.failure == nullptr, block.failure);
  }
};

inline Scalar scalar_argument(const char*, const Tensor& tensor, const Tensor&) {
  return {0, data<double>(tensor)};
}

}  // namespace fusedrl

#define __assert_fail(message, ...) emulation::fail(message)
#define CUDA CPU  // the key that the ops are registered for
