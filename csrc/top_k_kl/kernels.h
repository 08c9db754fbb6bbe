// CUDA kernels: one block a row. Its ids are bits in shared memory, so that every thread leaves
// them out of its part of the row, which it reads as token_log_probs does.
#pragma once

#include "common/device_rows.h"
#include "token_log_probs/kernels.h"
#include "top_k_kl/math.h"

namespace fusedrl {

// Classes whose bits are in shared memory at a time: 16 KiB of it.
constexpr int64_t kWindow = 1 << 17;
constexpr int64_t kWindowWords = kWindow / 32;

// The classes of each token that are looked at one by one.
struct DeviceIds {
  const int64_t* all;
  int64_t k;

  __device__ const int64_t* of(int64_t token) const { return all + token * k; }

  // Calls f(j, place) for this thread's share of a token's ids among `count` classes from `first`.
  template <typename F>
  __device__ __forceinline__ void for_each_in(int64_t token, int64_t first, int64_t count,
                                              F&& f) const {
    for (int64_t j = threadIdx.x; j < k; j += blockDim.x) {
      const int64_t id = of(token)[j], place = id - first;
      if (id >= 0 && place >= 0 && place < count) f(j, place);
    }
  }
};

// This thread's part of the logits of `classes` classes from `first_class` on but those of the
// token's ids. All threads of the block call it, with kWindowWords words of shared memory.
template <bool kAligned, typename T, typename ToLogits = AsTheyAre>
__device__ SoftmaxPart<float> rest_part(const T* row, int64_t first_class, int64_t classes,
                                        const DeviceIds& ids, int64_t token, float inv_temperature,
                                        uint32_t* taken, ToLogits to_logits = {}) {
  SoftmaxPart<float> all;
  for (int64_t first = 0; first < classes; first += kWindow) {
    const int64_t count = classes - first < kWindow ? classes - first : kWindow;
    __syncthreads();  // a thread may still be reading the previous window's bits
    for (int64_t i = threadIdx.x; i < (count + 31) / 32; i += blockDim.x) taken[i] = 0;
    __syncthreads();
    ids.for_each_in(token, first_class + first, count, [&](int64_t, int64_t place) {
      const uint32_t bit = 1u << place % 32;
      const bool twice = (atomicOr(taken + place / 32, bit) & bit) != 0;
      FUSEDRL_DEVICE_CHECK(!twice,
                           "ids: expected every class at most once a token; set one of them to -1");
    });
    __syncthreads();
    const auto of_rest = [&]<int kSize>(T(&elements)[kSize], int64_t v) {
      to_logits(elements, first + v);
      // The bits of a pack are in one word. 32 bits take fewer registers than 64.
      const uint32_t bit = static_cast<uint32_t>(v), bits = taken[bit / 32] >> bit % 32;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if ((bits >> j & 1) != 0) elements[j] = T(-INFINITY);
      }
    };
    all = merge(all, thread_part<false, kAligned>(row + first, count, inv_temperature, of_rest),
                inv_temperature);
  }
  return all;
}

// The block's part of what its threads read, in thread 0.
__device__ __forceinline__ SoftmaxPart<float> reduce_parts(const SoftmaxPart<float>& mine,
                                                           float inv_temperature) {
  return reduce_block(mine, [=](const SoftmaxPart<float>& x, const SoftmaxPart<float>& y) {
    return merge(x, y, inv_temperature);
  });
}

// Where each token's results go.
struct TopKOutputs {
  DeviceIds ids;
  float* log_probs;  // k + 1 a token: the logits of the ids at first
  SoftmaxPart<float>* rest;
  Normalizer* normalizers;

  __device__ float* row(int64_t token) const { return log_probs + token * (ids.k + 1); }
};

template <typename T>
struct LogitRows : KeptRows {
  const T* logits;

  FUSEDRL_HD const T* row(int64_t index) const { return logits + map.element_of_row(index); }

  // Whether all rows start on 16-byte boundaries.
  bool are_aligned() const {
    const int64_t strides = map.stride_row | map.stride_sequence;
    return bytes_past_boundary(logits) == 0 && strides * sizeof(T) % 16 == 0;
  }
};

// Takes every row apart: the logits of its ids, and the statistics of all others. In the registers
// that leave room for two blocks, the bits of the ids do not fit.
template <bool kAligned, typename T>
__global__ void __launch_bounds__(kMaxThreads, 1) split_rows(LogitRows<T> rows, TopKOutputs out) {
  __shared__ uint32_t taken[kWindowWords];
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t n = blockIdx.x; n < rows.map.tokens; n += gridDim.x) {
    if (!rows.keeps(n)) continue;
    const T* row = rows.row(rows.map.row_of(n));
    const SoftmaxPart<float> mine =
        rest_part<kAligned>(row, 0, rows.classes, out.ids, n, inv_temperature, taken);
    const SoftmaxPart<float> rest = reduce_parts(mine, inv_temperature);
    if (threadIdx.x == 0) out.rest[n] = rest;
    out.ids.for_each_in(n, 0, rows.classes,
                        [&](int64_t j, int64_t v) { out.row(n)[j] = static_cast<float>(row[v]); });
  }
}

static __global__ void finish_top_k_rows(KeptRows rows, TopKOutputs out) {
  const float inv_temperature = rows.inverse_temperature();
  const int64_t stride = int64_t(gridDim.x) * blockDim.x, k = out.ids.k;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < rows.map.tokens;
       n += stride) {
    if (!rows.keeps(n)) {
      for (int64_t j = 0; j <= k; ++j) out.row(n)[j] = 0.0f;
      out.normalizers[n] = {0.0f, 0.0f};
      continue;
    }
    const int64_t* ids = out.ids.of(n);
    for (int64_t j = 0; j < k; ++j) {
      FUSEDRL_DEVICE_CHECK(ids[j] < rows.classes,
                           "ids: expected values below V; mask the token, or set the id to -1");
    }
    const SoftmaxPart<double> rest{out.rest[n].max, out.rest[n].sum, 0.0};
    out.normalizers[n] = finish_top_k(rest, ids, k, inv_temperature, out.row(n));
  }
}

// What the gradients of every token's logits start from.
struct TopKUpstream {
  DeviceIds ids;
  const float* grads;
  const float* log_probs;
  const Normalizer* normalizers;
  TopKGradient* of_rows;

  __device__ RowGradient of_rest(int64_t token, float inv_temperature) const {
    return of_rows[token].of_rest(normalizers[token], inv_temperature);
  }

  // Calls put(place, gradient) for this thread's share of the ids among `count` classes.
  template <typename Put>
  __device__ __forceinline__ void for_each_in(int64_t token, int64_t first, int64_t count,
                                              float inv_temperature, Put&& put) const {
    ids.for_each_in(token, first, count, [&](int64_t j, int64_t place) {
      const int64_t at = token * (ids.k + 1) + j;
      put(place, of_rows[token].of_id(grads[at], log_probs[at], inv_temperature));
    });
  }
};

static __global__ void start_gradients(KeptRows rows, TopKUpstream upstream) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x, k = upstream.ids.k;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < rows.map.tokens;
       n += stride) {
    if (!rows.keeps(n)) continue;
    const int64_t at = n * (k + 1);
    upstream.of_rows[n] =
        TopKGradient(upstream.grads + at, upstream.log_probs + at, upstream.ids.of(n), k);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    differentiate_rows(LogitRows<T> rows, TopKUpstream upstream, T* grad_logits) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < rows.map.tokens; r += gridDim.x) {
    T* grad = grad_logits + r * rows.classes;
    const int64_t n = rows.map.token_of(r);
    if (n >= rows.map.tokens || !rows.keeps(n)) {
      zero_row(grad, rows.classes);
      continue;
    }
    const RowBackward<T> of_rest{
        rows.row(r), grad, {upstream.of_rest(n, inv_temperature), -1, 0.0f}};
    of_rest.write_row(rows.classes, 0, 1);
    __syncthreads();
    upstream.for_each_in(n, 0, rows.classes, inv_temperature,
                         [&](int64_t v, float gradient) { grad[v] = T(gradient); });
  }
}

}  // namespace fusedrl
