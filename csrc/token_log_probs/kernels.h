// CUDA kernels: one block per row, one pass over it. Every thread reads batches of 16-byte packs
// and accumulates their softmax statistics; for a row without a kept token, one thread writes
// zeros.
//
// The split of a row among threads depends only on the number of classes and the dtype, and parts
// are merged in a fixed order, so results depend neither on the batch nor on addresses.
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
                         "tokens: expected values in [0, V); leave it out with mask");
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

// Uses the elements in memory as logits, unchanged.
struct AsTheyAre {
  template <typename T, int kSize>
  __device__ __forceinline__ void operator()(T (&)[kSize], int64_t) const {}
};

// The part of a row that a thread reads: a few packs of every batch, and at most one of the last
// elements, which fill no pack. to_logits(elements, first) converts elements of the row to logits.
template <bool kEntropy, bool kAligned, typename T, typename ToLogits = AsTheyAre>
struct ThreadRow {
  const T* row;
  int64_t classes;
  float inv_temperature;
  ToLogits to_logits = {};

  __device__ __forceinline__ SoftmaxPart<float> batch(int64_t start) const {
    const int64_t in_packs = packs_of<T>(classes);
    Pack<T> packs[kForwardBatch];
    PackReader<T, kAligned>(row).load(packs, start + threadIdx.x, in_packs, T(-INFINITY));
    if constexpr (!std::is_same_v<ToLogits, AsTheyAre>) {
#pragma unroll
      for (int u = 0; u < kForwardBatch; ++u) {
        const int64_t i = start + threadIdx.x + u * blockDim.x;
        if (i >= in_packs) continue;
        auto elements = packs[u].elements();
        to_logits(elements.at, i * Pack<T>::kSize);
        packs[u] = Pack<T>::of(elements);
      }
    }
    return part_of<kEntropy>(packs, inv_temperature);
  }

  __device__ __forceinline__ SoftmaxPart<float> last() const {
    const int64_t i = packs_of<T>(classes) * Pack<T>::kSize + threadIdx.x;
    if (i >= classes) return {};
    auto elements = Pack<T>::filled(T(-INFINITY)).elements();
    T last[] = {row[i]};
    to_logits(last, i);
    elements.at[0] = last[0];
    const Pack<T> packs[] = {Pack<T>::of(elements)};
    return part_of<kEntropy>(packs, inv_temperature);
  }
};

template <typename T>
FUSEDRL_HD int64_t batches_of(int64_t classes, int threads) {
  const int64_t packs = packs_of<T>(classes), batch = int64_t(kForwardBatch) * threads;
  return (packs + batch - 1) / batch;
}

// The statistics of this thread's share of a row. part_of_batch(first pack) gives those of a batch.
template <typename Row, typename T, typename PartOfBatch>
__device__ __forceinline__ SoftmaxPart<float> merged(const Row& row, const T*,
                                                     PartOfBatch&& part_of_batch) {
  SoftmaxPart<float> all;
  const int64_t in_packs = packs_of<T>(row.classes);
  for (int64_t start = 0; start < in_packs; start += kForwardBatch * blockDim.x) {
    all = merge(all, part_of_batch(start), row.inv_temperature);
  }
  return merge(all, row.last(), row.inv_temperature);
}

template <bool kEntropy, bool kAligned, typename T, typename ToLogits = AsTheyAre>
__device__ SoftmaxPart<float> thread_part(const T* row, int64_t classes, float inv_temperature,
                                          ToLogits to_logits = {}) {
  const ThreadRow<kEntropy, kAligned, T, ToLogits> mine{row, classes, inv_temperature, to_logits};
  return merged(mine, row, [&](int64_t start) { return mine.batch(start); });
}

struct Outputs {
  float* log_probs;
  float* entropies;  // null for none
  Normalizer* normalizers;

  __device__ void put(int64_t n, const RowResult& result) const {
    log_probs[n] = result.log_prob;
    normalizers[n] = result.normalizer;
    if (entropies != nullptr) entropies[n] = result.entropy;
  }
};

// The block's result for one row from the statistics of its threads, in thread 0.
template <typename T>
__device__ __forceinline__ RowResult finish_row(const Rows<T>& rows, int64_t n, const T* row,
                                                const SoftmaxPart<float>& mine,
                                                float inv_temperature) {
  const auto merge_parts = [=](const SoftmaxPart<float>& x, const SoftmaxPart<float>& y) {
    return merge(x, y, inv_temperature);
  };
  const float target_logit = static_cast<float>(row[rows.target(n)]);
  return finish(reduce_block(mine, merge_parts), target_logit, inv_temperature);
}

template <bool kEntropy, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2) forward_rows(Rows<T> rows, Outputs out) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t n = blockIdx.x; n < rows.map.tokens; n += gridDim.x) {
    RowResult result{};
    if (rows.keeps(n)) {
      const T* row = rows.row(rows.map.row_of(n));
      const SoftmaxPart<float> mine =
          bytes_past_boundary(row) == 0
              ? thread_part<kEntropy, true>(row, rows.classes, inv_temperature)
              : thread_part<kEntropy, false>(row, rows.classes, inv_temperature);
      result = finish_row(rows, n, row, mine, inv_temperature);
    }
    if (threadIdx.x == 0) out.put(n, result);
  }
}

// If rows are too few to occupy the device, their batches are divided among blocks: every thread
// writes its part of a batch to `parts`, and merge_batches merges them in the order of
// forward_rows. The results are the same bits unless the compiler contracts the kernels
// differently.
template <bool kEntropy, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    forward_batches(Rows<T> rows, int64_t batches, SoftmaxPart<float>* parts) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t i = blockIdx.x; i < rows.map.tokens * batches; i += gridDim.x) {
    const int64_t n = i / batches, start = i % batches * kForwardBatch * blockDim.x;
    if (!rows.keeps(n)) continue;
    const T* row = rows.row(rows.map.row_of(n));
    parts[i * blockDim.x + threadIdx.x] =
        bytes_past_boundary(row) == 0
            ? ThreadRow<kEntropy, true, T>{row, rows.classes, inv_temperature}.batch(start)
            : ThreadRow<kEntropy, false, T>{row, rows.classes, inv_temperature}.batch(start);
  }
}

template <bool kEntropy, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    merge_batches(Rows<T> rows, int64_t batches, const SoftmaxPart<float>* parts, Outputs out) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t n = blockIdx.x; n < rows.map.tokens; n += gridDim.x) {
    RowResult result{};
    if (rows.keeps(n)) {
      const T* row = rows.row(rows.map.row_of(n));
      const ThreadRow<kEntropy, true, T> mine{row, rows.classes, inv_temperature};
      const SoftmaxPart<float>* of_row = parts + n * batches * blockDim.x + threadIdx.x;
      const SoftmaxPart<float> all = merged(mine, row, [&](int64_t) {
        const SoftmaxPart<float> part = *of_row;
        of_row += blockDim.x;
        return part;
      });
      result = finish_row(rows, n, row, all, inv_temperature);
    }
    if (threadIdx.x == 0) out.put(n, result);
  }
}

// The gradient of a logit that is not the target's.
__device__ __forceinline__ float other_gradient(const RowGradient& gradient, float logit) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kMinLogP = -200.0f;  // e^x is 0 here, and log p has to be finite
  float log_p = gradient.log_p(logit);
  if (log_p < kMinLogP) log_p = kMinLogP;
  return gradient.other(exp2_normal(log_p * kLog2E), log_p);
}

// The gradients of the logits of one row, whose softmax is recomputed from its normalizer.
struct LogitGradients {
  RowGradient gradient;
  int64_t target;
  float of_target;

  // Converts the logits of `kSize` classes from `first` on to gradients, in place.
  template <int kSize>
  __device__ __forceinline__ void operator()(float (&x)[kSize], int64_t first) const {
#pragma unroll
    for (float& logit : x) logit = other_gradient(gradient, logit);
    const int64_t target_at = target - first;
    if (target_at < 0 || target_at >= kSize) return;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j == target_at) x[j] = of_target;
    }
  }
};

// Writes the gradients of one row.
template <typename T>
struct RowBackward {
  const T* row;
  T* grad;
  LogitGradients gradients;

  __device__ void write(int64_t i) const {
    float x[] = {static_cast<float>(row[i])};
    gradients(x, i);
    grad[i] = T(x[0]);
  }

  // `first` is where the pack starts in the row.
  __device__ __forceinline__ uint4 of_pack(const Pack<T>& logits, int64_t first) const {
    auto elements = logits.elements();
    float x[Pack<T>::kSize];
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) x[j] = static_cast<float>(elements.at[j]);
    gradients(x, first);
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) elements.at[j] = T(x[j]);
    return Pack<T>::of(elements).words;
  }

  // The packs of one of `pieces` blocks.
  template <bool kAligned>
  __device__ void write_packs(const StoreSplit<T>& split, int64_t piece, int64_t pieces) const {
    const PackReader<T, kAligned> reader(row + split.head);
    uint4* out = reinterpret_cast<uint4*>(grad + split.head);
    const int64_t batch = kBackwardBatch * blockDim.x;
    for (int64_t start = piece * batch + threadIdx.x; start < split.packs;
         start += pieces * batch) {
      Pack<T> packs[kBackwardBatch];
      reader.load(packs, start, split.packs, T(0.0f));
#pragma unroll
      for (int u = 0; u < kBackwardBatch; ++u) {
        const int64_t i = start + u * blockDim.x;
        if (i < split.packs) out[i] = of_pack(packs[u], split.head + i * Pack<T>::kSize);
      }
    }
  }

  // The share of one of `pieces` blocks.
  __device__ __forceinline__ void write_row(int64_t classes, int64_t piece, int64_t pieces) const {
    const StoreSplit<T> split(grad, classes);
    if (piece == 0) split.for_each_single([&](int64_t v) { write(v); });
    if (bytes_past_boundary(row + split.head) == 0) {
      write_packs<true>(split, piece, pieces);
    } else {
      write_packs<false>(split, piece, pieces);
    }
  }
};

// One block for each of the `pieces` of a row: more than one only if rows are too few to occupy the
// device.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    backward_rows(Rows<T> rows, int64_t pieces, const float* grad_log_probs,
                  const float* grad_entropy, const float* log_probs, const float* entropy,
                  const Normalizer* normalizers, T* grad_logits) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t i = blockIdx.x; i < rows.map.tokens * pieces; i += gridDim.x) {
    const int64_t r = i / pieces, piece = i % pieces;
    T* grad = grad_logits + r * rows.classes;
    const int64_t n = rows.map.token_of(r);
    if (n >= rows.map.tokens || !rows.keeps(n)) {
      if (piece == 0) zero_row(grad, rows.classes);
      continue;
    }
    const bool of_entropy = grad_entropy != nullptr;
    const RowGradient gradient{grad_log_probs[n], of_entropy ? grad_entropy[n] : 0.0f,
                               of_entropy ? entropy[n] : 0.0f, normalizers[n], inv_temperature};
    const RowBackward<T> backward{
        rows.row(r), grad, {gradient, rows.target(n), gradient.target(log_probs[n])}};
    backward.write_row(rows.classes, piece, pieces);
  }
}

}  // namespace fusedrl
