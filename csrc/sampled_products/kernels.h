// CUDA kernels: a warp an entry, and a block a row of the gradient.
#pragma once

#include "common/device.h"
#include "sampled_products/indexed_rows.h"

namespace fusedrl {

constexpr int kSampledThreads = 256;

template <typename T>
__global__ void multiply_sampled(IndexedRows<T> hidden, IndexedRows<T> weight, const int64_t* rows,
                                 const int64_t* ids, int64_t count, float* products) {
  const int64_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  for (int64_t s = blockIdx.x * warps + threadIdx.x / kWarp; s < count; s += gridDim.x * warps) {
    float sum = 0;
    if (rows[s] >= 0) {
      const T *x = hidden.row(rows[s]), *y = weight.row(ids[s]);
      for (int64_t i = lane; i < hidden.width; i += kWarp) {
        sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
      }
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      sum += from_lane_below(sum, distance);
    }
    if (lane == 0) products[s] = sum;
  }
}

// out[r] = sum of grads[s] matrix[index[s]] for s from begins[r] to ends[r], in packs where every
// row starts on a boundary.
template <typename T>
__global__ void sum_sampled(IndexedRows<T> matrix, const float* grads, const int64_t* index,
                            const int64_t* begins, const int64_t* ends, int64_t rows, T* out) {
  constexpr int kSize = Pack<T>::kSize;
  const bool start_packs = bytes_past_boundary(matrix.data) == 0 && matrix.stride % kSize == 0 &&
                           matrix.width % kSize == 0;
  const int64_t packs = start_packs ? matrix.width / kSize : 0;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
      float sums[kSize] = {};
      for (int64_t s = begins[r]; s < ends[r]; ++s) {
        const uint4* row = reinterpret_cast<const uint4*>(matrix.row(index[s]));
        const auto elements = Pack<T>{__ldg(row + i)}.elements();
#pragma unroll
        for (int j = 0; j < kSize; ++j) sums[j] += grads[s] * static_cast<float>(elements.at[j]);
      }
      store(out + r * matrix.width + i * kSize, sums);
    }
    for (int64_t i = packs * kSize + threadIdx.x; i < matrix.width; i += blockDim.x) {
      float sum = 0;
      for (int64_t s = begins[r]; s < ends[r]; ++s) {
        sum += grads[s] * static_cast<float>(matrix.row(index[s])[i]);
      }
      out[r * matrix.width + i] = T(sum);
    }
  }
}

}  // namespace fusedrl
