// CUDA kernels: one block a token, one pass over its two rows, and a second one for Jensen-Shannon.
// A token that is dropped costs one thread's zeros.
//
// How the rows are split among threads depends on their number of classes and dtype alone, and
// parts are merged in a fixed order, so the bits depend neither on the batch nor on addresses.
#pragma once

#include "common/device_rows.h"
#include "exact_kl/math.h"

namespace fusedrl {

// Packs of each row that a thread has in flight: eight elements, or registers run out.
template <typename T>
constexpr int kPairBatch = 8 / Pack<T>::kSize;

template <typename T>
struct PairRows : KeptRows {
  const T* logits;
  const T* ref_logits;
  RowMap ref_map;

  __device__ const T* row(int64_t index) const { return logits + map.element_of_row(index); }

  __device__ const T* ref_row(int64_t index) const {
    return ref_logits + ref_map.element_of_row(index);
  }
};

// 2^x as a factor of e^x, and log x as half_logs takes it.
__device__ __forceinline__ float exp_of(float x) {
  constexpr float kLog2E = 1.44269504f;
  return exp2_normal(x * kLog2E);
}

struct LogOrZero {
  __device__ __forceinline__ float operator()(float x) const {
    return x == 0.0f ? 0.0f : std::log(x);
  }
};

// Calls f(packs, packs of the second row) for what this thread reads of two rows: its packs of
// every batch, and at most one of the last elements. Missing elements are -inf.
template <bool kAligned, typename T, typename F>
__device__ __forceinline__ void for_each_batch(const T* row, const T* ref_row, int64_t classes,
                                               F&& f) {
  const PackReader<T, kAligned> reader(row), ref_reader(ref_row);
  const int64_t in_packs = packs_of<T>(classes);
  for (int64_t start = 0; start < in_packs; start += kPairBatch<T> * blockDim.x) {
    Pack<T> x[kPairBatch<T>], y[kPairBatch<T>];
    reader.load(x, start + threadIdx.x, in_packs, T(-INFINITY));
    ref_reader.load(y, start + threadIdx.x, in_packs, T(-INFINITY));
    f(x, y);
  }
  const int64_t last = in_packs * Pack<T>::kSize + threadIdx.x;
  if (last < classes) {
    const auto single = [](T value) {
      auto elements = Pack<T>::filled(T(-INFINITY)).elements();
      elements.at[0] = value;
      return Pack<T>::of(elements);
    };
    const Pack<T> x[] = {single(row[last])}, y[] = {single(ref_row[last])};
    f(x, y);
  }
}

template <int kPacks, typename T>
__device__ __forceinline__ float max_of(const Pack<T> (&packs)[kPacks]) {
  float max = -INFINITY;
#pragma unroll
  for (const Pack<T>& pack : packs) {
#pragma unroll
    for (const T x : pack.elements().at) max = fmaxf(max, static_cast<float>(x));
  }
  return max;
}

// Takes packs of both rows into a part, which moves to their maxima first.
template <int kPacks, typename T>
__device__ __forceinline__ void add(PairPart<float>& part, const Pack<T> (&x)[kPacks],
                                    const Pack<T> (&y)[kPacks], float inv_temperature) {
  part =
      part.relative_to(fmaxf(part.max_p, max_of(x)), fmaxf(part.max_q, max_of(y)), inv_temperature);
  const float base_p = part.max_p == -INFINITY ? 0.0f : part.max_p;
  const float base_q = part.max_q == -INFINITY ? 0.0f : part.max_q;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const auto logits = x[u].elements(), ref_logits = y[u].elements();
    float sum_p = 0, sum_q = 0, cross = 0;
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) {
      const float dp = static_cast<float>(logits.at[j]) - base_p;
      const float dq = static_cast<float>(ref_logits.at[j]) - base_q;
      const float p = exp_of(dp * inv_temperature);
      sum_p += p;
      sum_q += exp_of(dq * inv_temperature);
      if (p != 0.0f) cross += p * (dp - dq);
    }
    part.sum_p += sum_p;
    part.sum_q += sum_q;
    part.cross += cross * inv_temperature;
  }
}

// Adds p log(p / m) / 2 and q log(q / m) / 2 of packs of both rows.
template <int kPacks, typename T>
__device__ __forceinline__ void add(Pair<float>& sums, const Pack<T> (&x)[kPacks],
                                    const Pack<T> (&y)[kPacks], const Pair<Normalizer>& normalizers,
                                    float inv_temperature) {
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const auto logits = x[u].elements(), ref_logits = y[u].elements();
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) {
      const float z = static_cast<float>(logits.at[j]), w = static_cast<float>(ref_logits.at[j]);
      const float p = exp_of(normalizers.p.log_p(z, inv_temperature));
      const float q = exp_of(normalizers.q.log_p(w, inv_temperature));
      const Pair<float> score = half_logs(p, q, LogOrZero());
      sums.p += p * score.p;
      sums.q += q * score.q;
    }
  }
}

// What this thread reads of two rows, added to `sums` by `add`.
template <typename Sums, typename T, typename... More>
__device__ __forceinline__ Sums sums_of_thread(const T* row, const T* ref_row, int64_t classes,
                                               More... more) {
  Sums sums{};
  const auto take = [&](const auto& x, const auto& y) { add(sums, x, y, more...); };
  if (bytes_past_boundary(row) == 0 && bytes_past_boundary(ref_row) == 0) {
    for_each_batch<true>(row, ref_row, classes, take);
  } else {
    for_each_batch<false>(row, ref_row, classes, take);
  }
  return sums;
}

// The statistics of two rows, in thread 0.
template <bool kJensenShannon, typename T>
__device__ __forceinline__ PairStatistics statistics_of(const T* row, const T* ref_row,
                                                        int64_t classes, float inv_temperature) {
  const auto part =
      reduce_block(sums_of_thread<PairPart<float>>(row, ref_row, classes, inv_temperature),
                   [=](const auto& x, const auto& y) { return merge(x, y, inv_temperature); });
  if constexpr (!kJensenShannon) return finish(part);
  const auto normalizers = from_first_thread(normalizers_of(part));
  const auto sums =
      reduce_block(sums_of_thread<Pair<float>>(row, ref_row, classes, normalizers, inv_temperature),
                   [](const auto& x, const auto& y) { return Pair<float>{x.p + y.p, x.q + y.q}; });
  return finish(normalizers, sums);
}

template <bool kJensenShannon, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    forward_pairs(PairRows<T> rows, float* kl, PairStatistics* statistics) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t n = blockIdx.x; n < rows.map.tokens; n += gridDim.x) {
    PairStatistics result{};
    if (rows.keeps(n)) {
      const int64_t r = rows.map.row_of(n);
      result = statistics_of<kJensenShannon>(rows.row(r), rows.ref_row(r), rows.classes,
                                             inv_temperature);
    }
    if (threadIdx.x != 0) continue;
    kl[n] = result.divergence();
    statistics[n] = result;
  }
}

// The gradients of two rows, whose softmaxes are computed anew. Either may be null; otherwise they
// lie alike between 16-byte boundaries.
template <bool kJensenShannon, typename T>
struct PairBackward {
  const T* row;
  const T* ref_row;
  T* grad;
  T* grad_ref;
  PairGradient gradient;

  __device__ __forceinline__ Pair<T> of(T logit, T ref_logit) const {
    const auto log = gradient.log_probs(static_cast<float>(logit), static_cast<float>(ref_logit));
    const float p = exp_of(log.p), q = exp_of(log.q);
    Pair<float> result;
    if constexpr (kJensenShannon) {
      result = gradient.of_jensen_shannon(p, q, LogOrZero());
    } else {
      result = gradient.of_kl(p, q, log);
    }
    return {T(result.p), T(result.q)};
  }

  __device__ void write(int64_t i) const {
    const Pair<T> result = of(row[i], ref_row[i]);
    if (grad != nullptr) grad[i] = result.p;
    if (grad_ref != nullptr) grad_ref[i] = result.q;
  }

  template <bool kAligned>
  __device__ void write_packs(const StoreSplit<T>& split) const {
    const PackReader<T, kAligned> reader(row + split.head), ref_reader(ref_row + split.head);
    for (int64_t i = threadIdx.x; i < split.packs; i += blockDim.x) {
      Pack<T> x[1], y[1];
      reader.load(x, i, split.packs, T(0.0f));
      ref_reader.load(y, i, split.packs, T(0.0f));
      auto logits = x[0].elements(), ref_logits = y[0].elements();
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) {
        const Pair<T> result = of(logits.at[j], ref_logits.at[j]);
        logits.at[j] = result.p;
        ref_logits.at[j] = result.q;
      }
      const auto store = [&](T* out, const auto& elements) {
        if (out != nullptr) {
          reinterpret_cast<uint4*>(out + split.head)[i] = Pack<T>::of(elements).words;
        }
      };
      store(grad, logits);
      store(grad_ref, ref_logits);
    }
  }
};

template <bool kJensenShannon, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    backward_pairs(PairRows<T> rows, const float* grad_kl, const PairStatistics* statistics,
                   T* grad_logits, T* grad_ref_logits) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < rows.map.tokens; r += gridDim.x) {
    const int64_t start = r * rows.classes;
    T* grad = grad_logits == nullptr ? nullptr : grad_logits + start;
    T* grad_ref = grad_ref_logits == nullptr ? nullptr : grad_ref_logits + start;
    const int64_t n = rows.map.token_of(r);
    if (n >= rows.map.tokens || !rows.keeps(n)) {
      if (grad != nullptr) zero_row(grad, rows.classes);
      if (grad_ref != nullptr) zero_row(grad_ref, rows.classes);
      continue;
    }
    const PairBackward<kJensenShannon, T> backward{
        rows.row(r), rows.ref_row(r), grad, grad_ref, {statistics[n], grad_kl[n], inv_temperature}};
    const StoreSplit<T> split(grad == nullptr ? grad_ref : grad, rows.classes);
    split.for_each_single([&](int64_t i) { backward.write(i); });
    if (bytes_past_boundary(backward.row + split.head) == 0 &&
        bytes_past_boundary(backward.ref_row + split.head) == 0) {
      backward.template write_packs<true>(split);
    } else {
      backward.template write_packs<false>(split);
    }
  }
}

}  // namespace fusedrl
