// CUDA kernels: one block a row, one pass over it. Every thread reads batches of 16-byte packs and
// keeps the softmax statistics of what it read; a row without a kept token costs one thread's
// zeros.
//
// How a row is split among threads depends on its number of classes and dtype alone, and parts are
// merged in a fixed order, so its bits depend neither on the batch around it nor on its address.
#pragma once

#include "common/device_rows.h"
#include "token_log_probs/math.h"

namespace fusedrl {

constexpr int kForwardBatch = kPacksInFlight;
constexpr int kBackwardBatch = 2;

template <typename T>
struct Rows : KeptRows {
  const T* logits;
  const int64_t* tokens;

  __device__ const T* row(int64_t index) const { return logits + map.element_of_row(index); }

  __device__ int64_t target(int64_t token) const {
    const int64_t target = tokens[token];
    FUSEDRL_DEVICE_CHECK(target >= 0 && target < classes,
                         "tokens: expected values in [0, V); mask the token or clamp it");
    return target;
  }
};

template <bool kEntropy, int kPacks, typename T>
__device__ __forceinline__ SoftmaxPart<float> part_of(const Pack<T> (&packs)[kPacks],
                                                      float inv_temperature) {
  constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
  constexpr float kMinExponent = -200.0f;  // 2^x is 0 here, and x 2^x has to be 0 below it
  SoftmaxPart<float> part;
#pragma unroll
  for (const Pack<T>& pack : packs) {
#pragma unroll
    for (const T x : pack.elements().at) part.max = fmaxf(part.max, static_cast<float>(x));
  }
  const float base = part.max == -INFINITY ? 0.0f : part.max;
  const float scale = inv_temperature * kLog2E;
#pragma unroll
  for (const Pack<T>& pack : packs) {
    float sum = 0, dot = 0;
#pragma unroll
    for (const T x : pack.elements().at) {
      const float exponent = (static_cast<float>(x) - base) * scale;
      const float e = exp2_normal(exponent);
      sum += e;
      if constexpr (kEntropy) dot += fmaxf(exponent, kMinExponent) * e;
    }
    part.sum += sum;
    part.dot += dot;
  }
  part.dot *= kLn2;
  return part;
}

// The part of a row that this thread reads: its packs of every batch, and at most one of the last
// elements.
template <bool kEntropy, bool kAligned, typename T>
__device__ SoftmaxPart<float> thread_part(const T* row, int64_t classes, float inv_temperature) {
  const PackReader<T, kAligned> reader(row);
  const int64_t in_packs = packs_of<T>(classes);
  SoftmaxPart<float> all;
  for (int64_t start = 0; start < in_packs; start += kForwardBatch * blockDim.x) {
    Pack<T> packs[kForwardBatch];
    reader.load(packs, start + threadIdx.x, in_packs, T(-INFINITY));
    all = merge(all, part_of<kEntropy>(packs, inv_temperature), inv_temperature);
  }
  const int64_t last = in_packs * Pack<T>::kSize + threadIdx.x;
  if (last < classes) {
    auto elements = Pack<T>::filled(T(-INFINITY)).elements();
    elements.at[0] = row[last];
    const Pack<T> packs[] = {Pack<T>::of(elements)};
    all = merge(all, part_of<kEntropy>(packs, inv_temperature), inv_temperature);
  }
  return all;
}

template <bool kEntropy, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    forward_rows(Rows<T> rows, float* log_probs, float* entropies, Normalizer* normalizers) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t n = blockIdx.x; n < rows.map.tokens; n += gridDim.x) {
    RowResult result{};
    if (rows.keeps(n)) {
      const T* row = rows.row(rows.map.row_of(n));
      const float target_logit = static_cast<float>(row[rows.target(n)]);
      const SoftmaxPart<float> part =
          bytes_past_boundary(row) == 0
              ? thread_part<kEntropy, true>(row, rows.classes, inv_temperature)
              : thread_part<kEntropy, false>(row, rows.classes, inv_temperature);
      const auto merge_parts = [=](const SoftmaxPart<float>& x, const SoftmaxPart<float>& y) {
        return merge(x, y, inv_temperature);
      };
      result = finish(reduce_block(part, merge_parts), target_logit, inv_temperature);
    }
    if (threadIdx.x != 0) continue;
    log_probs[n] = result.log_prob;
    normalizers[n] = result.normalizer;
    if constexpr (kEntropy) entropies[n] = result.entropy;
  }
}

// The gradient of one row, whose softmax is computed anew from the logits and their normalizer.
template <typename T>
struct RowBackward {
  const T* row;
  T* grad;
  int64_t target;
  T target_grad;
  RowGradient gradient;

  // The gradient of a logit that is not the target's.
  __device__ __forceinline__ T other(T logit) const {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kMinLogP = -200.0f;  // e^x is 0 here, and log p has to be finite
    float log_p = gradient.log_p(static_cast<float>(logit));
    if (log_p < kMinLogP) log_p = kMinLogP;
    return T(gradient.other(exp2_normal(log_p * kLog2E), log_p));
  }

  __device__ void write(int64_t i) const { grad[i] = i == target ? target_grad : other(row[i]); }

  // `first` is where the pack starts in the row.
  __device__ __forceinline__ uint4 of_pack(const Pack<T>& logits, int64_t first) const {
    auto elements = logits.elements();
#pragma unroll
    for (T& x : elements.at) x = other(x);
    const int64_t target_at = target - first;
    if (target_at >= 0 && target_at < Pack<T>::kSize) {
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) {
        if (j == target_at) elements.at[j] = target_grad;
      }
    }
    return Pack<T>::of(elements).words;
  }

  template <bool kAligned>
  __device__ void write_packs(const StoreSplit<T>& split) const {
    const PackReader<T, kAligned> reader(row + split.head);
    uint4* out = reinterpret_cast<uint4*>(grad + split.head);
    for (int64_t start = threadIdx.x; start < split.packs; start += kBackwardBatch * blockDim.x) {
      Pack<T> packs[kBackwardBatch];
      reader.load(packs, start, split.packs, T(0.0f));
#pragma unroll
      for (int u = 0; u < kBackwardBatch; ++u) {
        const int64_t i = start + u * blockDim.x;
        if (i < split.packs) out[i] = of_pack(packs[u], split.head + i * Pack<T>::kSize);
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    backward_rows(Rows<T> rows, const float* grad_log_probs, const float* grad_entropy,
                  const float* log_probs, const float* entropy, const Normalizer* normalizers,
                  T* grad_logits) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < rows.map.tokens; r += gridDim.x) {
    T* grad = grad_logits + r * rows.classes;
    const int64_t n = rows.map.token_of(r);
    if (n >= rows.map.tokens || !rows.keeps(n)) {
      zero_row(grad, rows.classes);
      continue;
    }
    const bool of_entropy = grad_entropy != nullptr;
    const RowGradient gradient{grad_log_probs[n], of_entropy ? grad_entropy[n] : 0.0f,
                               of_entropy ? entropy[n] : 0.0f, normalizers[n], inv_temperature};
    const RowBackward<T> backward{rows.row(r), grad, rows.target(n),
                                  T(gradient.target(log_probs[n])), gradient};
    const StoreSplit<T> split(grad, rows.classes);
    split.for_each_single([&](int64_t i) { backward.write(i); });
    if (bytes_past_boundary(backward.row + split.head) == 0) {
      backward.template write_packs<true>(split);
    } else {
      backward.template write_packs<false>(split);
    }
  }
}

}  // namespace fusedrl
