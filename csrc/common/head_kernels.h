// CUDA kernels around the matrix products of a linear head: they find the rows that are multiplied,
// make logits of products, and sum gradients.
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

// The rows that some of the tokens read.
struct Selection {
  RowMap map;
  const int64_t* tokens;  // null for all
  int64_t count;

  __device__ int64_t token(int64_t i) const { return tokens == nullptr ? i : tokens[i]; }
  __device__ int64_t element(int64_t i) const { return map.element_of_row(map.row_of(token(i))); }
};

template <typename T>
__global__ void gather_rows(Selection kept, const T* from, int64_t width, T* to) {
  for (int64_t i = blockIdx.x; i < kept.count; i += gridDim.x) {
    const T* row = from + kept.element(i);
    for (int64_t k = threadIdx.x; k < width; k += blockDim.x) to[i * width + k] = row[k];
  }
}

template <typename T>
__global__ void scatter_rows(Selection kept, const float* from, int64_t width, T* to) {
  for (int64_t i = blockIdx.x; i < kept.count; i += gridDim.x) {
    T* row = to + kept.element(i);
    for (int64_t k = threadIdx.x; k < width; k += blockDim.x) row[k] = T(from[i * width + k]);
  }
}

static __global__ void add_elements(float* sums, const float* terms, int64_t count) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    sums[i] += terms[i];
  }
}

template <typename T>
__global__ void add_columns(float* sums, const T* rows, int64_t count, int64_t stride_row,
                            int64_t columns) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t v = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; v < columns; v += stride) {
    float sum = 0;
    for (int64_t r = 0; r < count; ++r) sum += static_cast<float>(rows[r * stride_row + v]);
    sums[v] += sum;
  }
}

// Makes a logit of a matrix product: x = scale (product + bias), capped.
template <typename T>
struct LogitShape {
  const T* bias;  // null for none
  float scale;
  float cap;  // 0 for none

  __device__ __forceinline__ float operator()(float product, int64_t v) const {
    const float x = scale * (bias == nullptr ? product : product + static_cast<float>(bias[v]));
    if (cap == 0) return x;
    return softcapped(x, cap, [](float u) {
      constexpr float kLog2E = 1.44269504f, kMost = 80.0f;
      return exp2_normal(fminf(u, kMost) * kLog2E);
    });
  }

  bool is_identity() const { return bias == nullptr && scale == 1 && cap == 0; }

  // The derivative of the logit with respect to the product.
  __device__ __forceinline__ float slope(float logit) const {
    return cap == 0 ? scale : scale * softcap_slope(logit, cap);
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

}  // namespace fusedrl
