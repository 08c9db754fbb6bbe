// CUDA kernels: one block per token, one pass over its two rows, and a second one for a mixture.
// For a dropped token, one thread writes zeros.
//
// The split of rows among threads depends only on the number of classes and the dtype, and parts
// are merged in a fixed order, so results depend neither on the batch nor on addresses.
#pragma once

#include "common/device_rows.h"
#include "exact_kl/math.h"

namespace fusedrl {

// Packs of each row that a thread has in flight: eight elements, limited by registers; for a
// mixture, which reads the rows twice and computes more, one pack.
template <bool kMixture, typename T>
constexpr int kPairBatch = kMixture ? 1 : 8 / Pack<T>::kSize;

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

constexpr float kLog2OfE = 1.44269504f;

__device__ __forceinline__ float exp_of(float x) { return exp2_normal(x * kLog2OfE); }

// The `math` argument of log_ratios.
struct MixtureMath {
  __device__ __forceinline__ float inverse(float x) const { return inverse_normal(x); }

  // The instruction far from 1; near 1, where it cancels, x - 1 + (x - 1)^2 times the best
  // polynomial between 0.85 and 1.15, within 1.7e-7 of the logarithm's value.
  __device__ __forceinline__ float log(float x, float less_one) const {
    constexpr float kTiny = 1e-37f;  // makes log 0 finite, and is negligible in any relevant x
    const float far = log2_normal(x + kTiny) * 0.693147181f;
    float factor = 0.20409307f + less_one * -0.17097582f;
    factor = 0.33331016f + less_one * (-0.24996339f + less_one * factor);
    factor = -0.50000006f + less_one * factor;
    const float near = less_one + less_one * less_one * factor;
    return fabsf(less_one) < 0.15f ? near : far;
  }
};

// Calls f(packs, packs of the second row) for what this thread reads of two rows: its packs of
// every batch, and at most one of the last elements. Missing elements are -inf.
template <bool kAligned, int kBatch, typename T, typename F>
__device__ __forceinline__ void for_each_batch(const T* row, const T* ref_row, int64_t classes,
                                               F&& f) {
  const PackReader<T, kAligned> reader(row), ref_reader(ref_row);
  const int64_t in_packs = packs_of<T>(classes);
  for (int64_t start = 0; start < in_packs; start += kBatch * blockDim.x) {
    Pack<T> x[kBatch], y[kBatch];
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

// Adds packs of both rows to a part: with or without their entropies, and without the sum for KL if
// there is a mixture.
template <bool kMixture, bool kEntropies>
struct AddToPart {
  float inv_temperature;

  // The part moves to the maxima of the packs first.
  template <int kPacks, typename T>
  __device__ __forceinline__ void operator()(PairPart<float>& part, const Pack<T> (&x)[kPacks],
                                             const Pack<T> (&y)[kPacks]) const {
    part = part.relative_to(fmaxf(part.max_p, max_of(x)), fmaxf(part.max_q, max_of(y)),
                            inv_temperature);
    if constexpr (kMixture) part.cross = 0;  // frees its registers
    if constexpr (!kEntropies) part.dot_p = part.dot_q = 0;
    const float base_p = part.max_p == -INFINITY ? 0.0f : part.max_p;
    const float base_q = part.max_q == -INFINITY ? 0.0f : part.max_q;
    const float scale = inv_temperature * kLog2OfE;
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const auto logits = x[u].elements(), ref_logits = y[u].elements();
      float sum_p = 0, sum_q = 0, cross = 0, dot_p = 0, dot_q = 0;
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) {
        const float dp = static_cast<float>(logits.at[j]) - base_p;
        const float dq = static_cast<float>(ref_logits.at[j]) - base_q;
        const float p = exp2_normal(dp * scale), q = exp2_normal(dq * scale);
        sum_p += p;
        sum_q += q;
        if constexpr (!kMixture) {
          if (p != 0.0f) cross += p * (dp - dq);
        }
        if constexpr (kEntropies) {
          if (p != 0.0f) dot_p += p * dp;
          if (q != 0.0f) dot_q += q * dq;
        }
      }
      part.sum_p += sum_p;
      part.sum_q += sum_q;
      part.cross += cross * inv_temperature;
      part.dot_p += dot_p * inv_temperature;
      part.dot_q += dot_q * inv_temperature;
    }
  }
};

// Adds packs of both rows to the sums of p log(p / m) and q log(q / m).
struct AddToSums {
  Pair<Normalizer> normalizers;
  Pair<float> shares;
  float inv_temperature;

  template <int kPacks, typename T>
  __device__ __forceinline__ void operator()(Pair<float>& sums, const Pack<T> (&x)[kPacks],
                                             const Pack<T> (&y)[kPacks]) const {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const auto logits = x[u].elements(), ref_logits = y[u].elements();
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) {
        const float z = static_cast<float>(logits.at[j]), w = static_cast<float>(ref_logits.at[j]);
        const float p = exp_of(normalizers.p.log_p(z, inv_temperature));
        const float q = exp_of(normalizers.q.log_p(w, inv_temperature));
        const Pair<float> log = log_ratios(p, q, shares, MixtureMath());
        sums.p += p * log.p;
        sums.q += q * log.q;
      }
    }
  }
};

// This thread's share of two rows, added to `Sums` by `add`.
template <typename Sums, int kBatch, typename T, typename Add>
__device__ __forceinline__ Sums sums_of_thread(const T* row, const T* ref_row, int64_t classes,
                                               Add add) {
  Sums sums{};
  const auto take = [&](const auto& x, const auto& y) { add(sums, x, y); };
  if (bytes_past_boundary(row) == 0 && bytes_past_boundary(ref_row) == 0) {
    for_each_batch<true, kBatch>(row, ref_row, classes, take);
  } else {
    for_each_batch<false, kBatch>(row, ref_row, classes, take);
  }
  return sums;
}

// The statistics of two whole rows, in thread 0.
template <bool kMixture, bool kEntropies, typename T>
__device__ __forceinline__ PairPart<float> part_of(const T* row, const T* ref_row, int64_t classes,
                                                   float inv_temperature) {
  return reduce_block(sums_of_thread<PairPart<float>, kPairBatch<kMixture, T>>(
                          row, ref_row, classes, AddToPart<kMixture, kEntropies>{inv_temperature}),
                      [=](const auto& x, const auto& y) { return merge(x, y, inv_temperature); });
}

// The sums of a mixture over two rows, in thread 0.
template <typename T>
__device__ __forceinline__ Pair<float> sums_of(const T* row, const T* ref_row, int64_t classes,
                                               AddToSums add) {
  return reduce_block(
      sums_of_thread<Pair<float>, kPairBatch<true, T>>(row, ref_row, classes, add),
      [](const auto& x, const auto& y) { return Pair<float>{x.p + y.p, x.q + y.q}; });
}

template <bool kMixture, bool kEntropies, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    forward_pairs(PairRows<T> rows, Pair<float> shares, PairOutputs out) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t n = blockIdx.x; n < rows.map.tokens; n += gridDim.x) {
    PairResult result{};
    if (rows.keeps(n)) {
      const int64_t r = rows.map.row_of(n);
      const T *row = rows.row(r), *ref_row = rows.ref_row(r);
      const auto part = part_of<kMixture, kEntropies>(row, ref_row, rows.classes, inv_temperature);
      if constexpr (kMixture) {
        const auto normalizers = from_first_thread(normalizers_of(part));
        const auto entropies = kEntropies ? entropies_of(part) : Pair<float>{};
        const auto sums =
            sums_of(row, ref_row, rows.classes, {normalizers, shares, inv_temperature});
        result = finish(normalizers, entropies, sums, shares);
      } else {
        result = finish(part);
      }
    }
    if (threadIdx.x == 0) out.write(n, result);
  }
}

// The gradients of the two logits of a class, from recomputed softmaxes.
template <bool kMixture, bool kEntropies>
struct LogitPairGradients {
  PairGradient gradient;

  __device__ __forceinline__ Pair<float> operator()(float logit, float ref_logit) const {
    const auto log = gradient.log_probs(logit, ref_logit);
    const float p = exp_of(log.p), q = exp_of(log.q);
    Pair<float> result;
    if constexpr (kMixture) {
      result = gradient.of_mixture(p, q, MixtureMath());
    } else {
      result = gradient.of_kl(p, q, log);
    }
    if constexpr (kEntropies) {
      const Pair<float> more = gradient.of_entropies(p, q, log);
      result = {result.p + more.p, result.q + more.q};
    }
    return result;
  }
};

// Writes the gradients of two rows. Either may be null; otherwise both have the same alignment.
template <bool kMixture, bool kEntropies, typename T>
struct PairBackward {
  const T* row;
  const T* ref_row;
  T* grad;
  T* grad_ref;
  LogitPairGradients<kMixture, kEntropies> gradients;

  __device__ __forceinline__ Pair<T> of(T logit, T ref_logit) const {
    const auto result = gradients(static_cast<float>(logit), static_cast<float>(ref_logit));
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

template <bool kMixture, bool kEntropies, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    backward_pairs(PairRows<T> rows, PairUpstream upstream, T* grad_logits, T* grad_ref_logits) {
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
    const PairBackward<kMixture, kEntropies, T> backward{
        rows.row(r), rows.ref_row(r), grad, grad_ref, {upstream.of_token(n, inv_temperature)}};
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
