// Shared by CUDA kernels with one block per row: the number of threads, the rows to compute, and
// how a row is written.
#pragma once

#include "common/device.h"
#include "common/row_map.h"

namespace fusedrl {

// Packs that a thread reads before it waits: enough to saturate memory, with registers for two
// blocks.
constexpr int kPacksInFlight = 4;

constexpr int kMinThreads = 128;
constexpr int kMaxThreads = 512;

// Every thread gets whole batches, if the row has enough.
inline int threads_for(int64_t row_bytes) {
  int threads = kMinThreads;
  while (threads < kMaxThreads && threads * kPacksInFlight * 16 < row_bytes) threads *= 2;
  return threads;
}

// The rows of a batch of `classes` columns that are computed.
struct KeptRows {
  const bool* mask;  // null keeps all
  RowMap map;
  int64_t classes;
  Scalar temperature;

  __device__ bool keeps(int64_t token) const {
    return (mask == nullptr || mask[token]) && map.has_row(token);
  }

  __device__ float inverse_temperature() const {
    const double value = temperature.get();
    FUSEDRL_DEVICE_CHECK(value > 0 && value < INFINITY,
                         "temperature: expected a finite number > 0; 1.0 leaves the logits alone");
    return static_cast<float>(1.0 / value);
  }
};

// Writes a row with a block: packs from the first 16-byte boundary on, and single elements before
// and after them.
template <typename T>
struct StoreSplit {
  int64_t head;  // elements before the packs
  int64_t packs;
  int64_t count;

  __device__ StoreSplit(const T* row, int64_t count) : count(count) {
    const int64_t to_boundary = (16 - bytes_past_boundary(row)) % 16 / sizeof(T);
    head = to_boundary < count ? to_boundary : count;
    packs = packs_of<T>(count - head);
  }

  // Calls f(index) for this thread's share of the single elements.
  template <typename F>
  __device__ __forceinline__ void for_each_single(F&& f) const {
    const int64_t in_packs = packs * Pack<T>::kSize;
    const int64_t i = threadIdx.x;
    if (i < count - in_packs) f(i < head ? i : i + in_packs);
  }
};

template <typename T>
__device__ void zero_row(T* row, int64_t classes) {
  const StoreSplit<T> split(row, classes);
  split.for_each_single([&](int64_t i) { row[i] = T(0.0f); });
  uint4* words = reinterpret_cast<uint4*>(row + split.head);
  for (int64_t i = threadIdx.x; i < split.packs; i += blockDim.x) words[i] = uint4{};
}

}  // namespace fusedrl
