// What CUDA kernels share: scalars on either side, 16-byte accesses, reduction over a block, asserts.
// Nothing of torch's tensors in here, so that host tests can run kernels without a GPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/host_device.h"

// Stops the kernel with `message` unless `condition` holds, under NDEBUG too: what the host cannot check
// without waiting for the device.
#define FUSEDRL_DEVICE_CHECK(condition, message) \
  if (!(condition)) __assert_fail(message, "fusedrl", __LINE__, __func__)

namespace fusedrl {

// A number that the host knows, or that the kernel reads so that nobody waits for it.
struct Scalar {
  double value;
  const double* device;  // null when `value` holds

  FUSEDRL_HD double get() const { return device == nullptr ? value : *device; }
};

// 2^x within 2 ulp in one instruction; 0 where the result is no normal number. exp2f spends three more on
// denormals.
FUSEDRL_HD float exp2_normal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// Elements that one instruction loads or stores.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <typename T>
__device__ __forceinline__ void store(Pack<T>* p, const Pack<T>& pack) {
  uint4 words;
  std::memcpy(&words, &pack, sizeof words);
  *reinterpret_cast<uint4*>(p) = words;
}

FUSEDRL_HD unsigned bytes_past_boundary(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) % 16);
}

// Read-only elements in packs: pack i holds the elements from i * kSize on, wherever the first one lies.
// Where that is no 16-byte boundary, a pack is put together from the two aligned words it lies in, so that
// the split of a row among threads, and with it the rounding, does not depend on the row's address.
template <typename T, bool kAligned>
class PackReader {
 public:
  static constexpr int kSize = Pack<T>::kSize;

  __device__ PackReader(const T* first, int64_t count)
      : first_(first), count_(count), past_(bytes_past_boundary(first)) {
    words_ = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(first) - past_);
  }

  // How many packs `load` may read: those whose words end inside the elements.
  __device__ int64_t whole() const {
    if constexpr (kAligned) return count_ / kSize;
    const int64_t words = (count_ * sizeof(T) + past_) / 16;
    return words > 0 ? words - 1 : 0;
  }

  __device__ __forceinline__ Pack<T> load(int64_t i) const {
    uint32_t w[8];
    const uint4 low = __ldg(words_ + i);
    std::memcpy(w, &low, sizeof low);
    if constexpr (!kAligned) {
      const uint4 high = __ldg(words_ + i + 1);
      std::memcpy(w + 4, &high, sizeof high);
      shift_down(w);
    }
    Pack<T> pack;
    std::memcpy(&pack, w, sizeof pack);
    return pack;
  }

  // Any pack, element by element; `fill` past the end.
  __device__ __forceinline__ Pack<T> load_guarded(int64_t i, T fill) const {
    Pack<T> pack;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const int64_t element = i * kSize + j;
      pack.at[j] = element < count_ ? first_[element] : fill;
    }
    return pack;
  }

 private:
  // Drops the first `past_` of 32 bytes, leaving 16.
  __device__ __forceinline__ void shift_down(uint32_t (&w)[8]) const {
    if (past_ & 8) {
#pragma unroll
      for (int k = 0; k < 6; ++k) w[k] = w[k + 2];
    }
    if (past_ & 4) {
#pragma unroll
      for (int k = 0; k < 5; ++k) w[k] = w[k + 1];
    }
    if constexpr (sizeof(T) < 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t pair = uint64_t(w[k + 1]) << 32 | w[k];
        w[k] = static_cast<uint32_t>(pair >> (past_ % 4 * 8));
      }
    }
  }

  const T* first_;
  int64_t count_;
  unsigned past_;  // bytes between the boundary and the first element
  const uint4* words_;
};

constexpr int kWarp = 32;

template <typename T>
__device__ __forceinline__ T from_lane_below(const T& x, int distance) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &x, sizeof x);
#pragma unroll
  for (uint32_t& word : words) word = __shfl_down_sync(0xffffffffu, word, distance);
  T result;
  std::memcpy(&result, words, sizeof x);
  return result;
}

// Merges one value a thread, always in the same order; thread 0 gets the result. Every thread of the block
// calls it, and there are whole warps of them.
template <typename T, typename Merge>
__device__ __forceinline__ T reduce_block(T x, Merge merge) {
  __shared__ uint32_t of_warp[kWarp][sizeof(T) / 4];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto reduce_warp = [&] {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      x = merge(x, from_lane_below(x, distance));
    }
  };
  reduce_warp();
  __syncthreads();  // the first warp may still be reading the previous call's values
  if (lane == 0) std::memcpy(of_warp[warp], &x, sizeof x);
  __syncthreads();
  if (warp == 0) {
    x = T();
    if (lane < blockDim.x / kWarp) std::memcpy(&x, of_warp[lane], sizeof x);
    reduce_warp();
  }
  return x;
}

}  // namespace fusedrl
