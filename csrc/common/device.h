// Shared by CUDA kernels: scalars on host or device, 16-byte accesses, reductions over a block, and
// asserts. Independent of torch, so that host tests can run kernels without a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/host_device.h"

// Asserts `condition`, under NDEBUG too, for checks that the host cannot do without waiting for the
// device.
#define FUSEDRL_DEVICE_CHECK(condition, message) \
  if (!(condition)) __assert_fail(message, "fusedrl", __LINE__, __func__)

namespace fusedrl {

// A number on the host or, so that the host need not wait for it, on the device.
struct Scalar {
  double value;
  const double* device;  // null when `value` holds

  FUSEDRL_HD double get() const { return device == nullptr ? value : *device; }
};

// 2^x within 2 ulp in one instruction; 0 for subnormal results, for which exp2f has three more.
FUSEDRL_HD float exp2_normal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// log2 x for positive normal x, within 2^-22 of it or, near 1, of 1; in one instruction.
FUSEDRL_HD float log2_normal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::log2(x);
#endif
}

// 1 / x within 1 ulp, where x and 1 / x are normal numbers; in one instruction.
FUSEDRL_HD float inverse_normal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1 / x;
#endif
}

// The elements that one instruction loads or stores, in the form in which it moves them: separate
// registers for halves would take twice as many.
template <typename T>
struct Pack {
  static constexpr int kSize = 16 / sizeof(T);

  struct Elements {
    T at[kSize];
  };

  uint4 words;

  FUSEDRL_HD static Pack filled(T value) {
    Elements elements;
#pragma unroll
    for (T& x : elements.at) x = value;
    return of(elements);
  }

  FUSEDRL_HD Elements elements() const {
    Elements elements;
    std::memcpy(&elements, &words, sizeof words);
    return elements;
  }

  FUSEDRL_HD static Pack of(const Elements& elements) {
    Pack pack;
    std::memcpy(&pack.words, &elements, sizeof elements);
    return pack;
  }
};

// Rounds elements and writes them with one instruction, where `to` is a multiple of their bytes.
template <typename T, typename From, int kSize>
__device__ __forceinline__ void store(T* to, const From (&values)[kSize]) {
  struct alignas(kSize * sizeof(T)) Elements {
    T at[kSize];
  } elements;
#pragma unroll
  for (int j = 0; j < kSize; ++j) elements.at[j] = T(values[j]);
  *reinterpret_cast<Elements*>(to) = elements;
}

FUSEDRL_HD unsigned bytes_past_boundary(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) % 16);
}

// The number of packs in `count` elements that are read as packs. The two words that hold such a
// pack end within the elements, so less than two packs remain.
template <typename T>
FUSEDRL_HD int64_t packs_of(int64_t count) {
  return count < Pack<T>::kSize ? 0 : count / Pack<T>::kSize - 1;
}

// Read-only elements in packs: pack i holds the elements from i * kSize on, at any address. Unless
// it is aligned to 16 bytes, a pack is assembled from the two aligned words that contain it, so
// that the split of a row among threads, and with it the rounding, does not depend on the address.
template <typename T, bool kAligned>
class PackReader {
 public:
  __device__ explicit PackReader(const T* first)
      : past_(bytes_past_boundary(first)),
        words_(reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(first) - past_)) {}

  // Loads the packs first, first + step, ... below `packs`, and `fill` in place of others. All
  // loads are issued before it waits for the first one.
  template <int kBatch>
  __device__ __forceinline__ void load(Pack<T> (&batch)[kBatch], int64_t first, int64_t packs,
                                       T fill) const {
    uint4 high[kBatch];
    const uint4 filling = Pack<T>::filled(fill).words;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t i = first + u * blockDim.x;
      batch[u].words = i < packs ? __ldg(words_ + i) : filling;
      if constexpr (!kAligned) high[u] = i < packs ? __ldg(words_ + i + 1) : filling;
    }
    if constexpr (!kAligned) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) batch[u].words = shifted(batch[u].words, high[u]);
    }
  }

 private:
  // 16 of the 32 bytes, from `past_` on.
  __device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high) const {
    uint32_t w[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
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
    return {w[0], w[1], w[2], w[3]};
  }

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

// Merges one value of each thread, always in the same order; thread 0 gets the result. T() is the
// neutral value. Every thread of the block has to call it, and the block consists of whole warps.
template <typename T, typename Merge>
__device__ __forceinline__ T reduce_block(T x, Merge merge) {
  __shared__ uint32_t of_warp[kWarp][sizeof(T) / 4];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
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

// Returns thread 0's value in every thread of the block, all of which have to call it.
template <typename T>
__device__ __forceinline__ T from_first_thread(T x) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0);
  __shared__ uint32_t words[sizeof(T) / 4];
  __syncthreads();  // a thread may still be reading the previous call's value
  if (threadIdx.x == 0) std::memcpy(words, &x, sizeof x);
  __syncthreads();
  std::memcpy(&x, words, sizeof x);
  return x;
}

}  // namespace fusedrl
