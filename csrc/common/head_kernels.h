// CUDA kernels around the matrix products of a linear head: select the rows, convert products to
// logits, and sum gradients.
#pragma once

#include "common/device_rows.h"
#include "common/softcap.h"
#include "common/tile_sizes.h"

namespace fusedrl {

inline int64_t element_blocks(int64_t elements) {
  return (elements + kElementThreads - 1) / kElementThreads;
}

// Marks the tokens that are computed.
static __global__ void flag_rows(KeptRows rows, bool* kept) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < rows.map.tokens;
       n += stride) {
    kept[n] = rows.keeps(n);
  }
}

// Lists the tokens that a shift keeps in padded rows: all except the first of each.
static __global__ void list_shifted(int64_t period, int64_t count, int64_t* tokens) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    tokens[i] = i + i / (period - 1) + 1;
  }
}

// The rows that the selected tokens read.
struct Selection {
  RowMap map;
  const int64_t* tokens;  // null for all
  int64_t count;

  __device__ int64_t token(int64_t i) const { return tokens == nullptr ? i : tokens[i]; }
  __device__ int64_t element(int64_t i) const { return map.element_of_row(map.row_of(token(i))); }
};

// Rounds a row with a block, in packs if both rows are aligned.
template <typename From, typename T>
__device__ void copy_row(const From* from, T* to, int64_t width) {
  constexpr int kSize = Pack<From>::kSize;
  const bool starts_pack =
      bytes_past_boundary(from) == 0 && bytes_past_boundary(to) % (kSize * sizeof(T)) == 0;
  const int64_t packs = starts_pack ? width / kSize : 0;
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack<From> pack{__ldg(reinterpret_cast<const uint4*>(from) + i)};
    store(to + i * kSize, pack.elements().at);
  }
  for (int64_t k = packs * kSize + threadIdx.x; k < width; k += blockDim.x) to[k] = T(from[k]);
}

template <typename T>
__global__ void gather_rows(Selection kept, const T* from, int64_t width, T* to) {
  for (int64_t i = blockIdx.x; i < kept.count; i += gridDim.x) {
    copy_row(from + kept.element(i), to + i * width, width);
  }
}

template <typename T>
__global__ void scatter_rows(Selection kept, const float* from, int64_t width, T* to) {
  for (int64_t i = blockIdx.x; i < kept.count; i += gridDim.x) {
    copy_row(from + i * width, to + kept.element(i), width);
  }
}

static __global__ void add_elements(float* sums, const float* terms, int64_t count) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; first < count; first += kPacksInFlight * stride) {
    float results[kPacksInFlight] = {};
#pragma unroll
    for (int u = 0; u < kPacksInFlight; ++u) {
      const int64_t i = first + u * stride;
      if (i < count) results[u] = sums[i] + terms[i];
    }
#pragma unroll
    for (int u = 0; u < kPacksInFlight; ++u) {
      const int64_t i = first + u * stride;
      if (i < count) sums[i] = results[u];
    }
  }
}

// The logit of a matrix product: x = scale (product + bias), capped.
template <typename T>
struct LogitShape {
  const T* bias;  // null for none
  float scale;
  float cap;  // 0 for none

  // Converts the products of `kSize` classes from `first` on to logits, in place.
  template <int kSize>
  __device__ __forceinline__ void operator()(float (&x)[kSize], int64_t first) const {
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] += static_cast<float>(bias[first + j]);
    }
#pragma unroll
    for (float& logit : x) logit *= scale;
    if (cap == 0) return;
#pragma unroll
    for (float& logit : x) {
      logit = softcapped(logit, cap, [](float u) {
        constexpr float kLog2E = 1.44269504f, kMost = 80.0f;
        return exp2_normal(fminf(u, kMost) * kLog2E);
      });
    }
  }

  __device__ __forceinline__ float operator()(float product, int64_t v) const {
    float x[] = {product};
    (*this)(x, v);
    return x[0];
  }

  bool is_identity() const { return bias == nullptr && scale == 1 && cap == 0; }

  // Converts gradients of logits to gradients of products, in place.
  template <int kSize>
  __device__ __forceinline__ void chain(float (&grads)[kSize], const float (&logits)[kSize]) const {
#pragma unroll
    for (float& grad : grads) grad *= scale;
    if (cap == 0) return;
#pragma unroll
    for (int j = 0; j < kSize; ++j) grads[j] *= softcap_slope(logits[j], cap);
  }
};

// A tile of the matrix product, float32: rows of `classes` elements, each on a 16-byte boundary.
template <typename T>
struct Tile {
  const float* products;
  int64_t stride_row;
  int64_t rows;
  int64_t first_row;  // among the selected ones
  int64_t classes;
  int64_t first_class;  // in the whole vocabulary
  LogitShape<T> shape;

  __device__ const float* row(int64_t r) const { return products + r * stride_row; }
};

// The destination of the gradients of a tile's products, with rows aligned for store().
template <typename T>
struct GradTile {
  T* first;  // null if not requested
  int64_t stride_row;

  __device__ T* row(int64_t r) const { return first + r * stride_row; }
};

template <int kSize>
struct Floats {
  float at[kSize];
};

// Calls f(elements of each row, first) for this thread's share of float32 rows aligned to 16 bytes:
// for packs, with kBatch loads per row in flight, and for single elements at the end.
template <int kBatch, int kRows, typename F>
__device__ __forceinline__ void for_each_pack(const float* const (&rows)[kRows], int64_t classes,
                                              F&& f) {
  constexpr int kSize = Pack<float>::kSize;
  // 32 bits suffice for a tile of fewer than 2^31 elements, and take fewer instructions.
  const int count = static_cast<int>(classes), packs = count / kSize, threads = blockDim.x;
  for (int start = threadIdx.x; start < packs; start += kBatch * threads) {
    uint4 batch[kRows][kBatch];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int i = start + u * threads;
        batch[k][u] = i < packs ? reinterpret_cast<const uint4*>(rows[k])[i] : uint4{};
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int i = start + u * threads;
      if (i >= packs) continue;
      Floats<kSize> elements[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) std::memcpy(&elements[k], &batch[k][u], sizeof batch[k][u]);
      f(elements, i * kSize);
    }
  }
  const int last = packs * kSize + static_cast<int>(threadIdx.x);
  if (last < count) {
    Floats<1> elements[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) elements[k].at[0] = rows[k][last];
    f(elements, last);
  }
}

}  // namespace fusedrl
