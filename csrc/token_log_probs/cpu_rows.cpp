// One pass over a row, in chunks that stay in L1. The first chunk is short and finds its maximum
// before it exponentiates; later chunks are relative to it unless they rise too far above it.
// Compiled once per CPU level. Every choice depends only on the row, so that results depend neither
// on the batch nor on the number of threads.
#include "token_log_probs/cpu_rows.h"

#include <algorithm>

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

constexpr int64_t kFirstChunk = 512;
constexpr int64_t kChunk = 4096;

// The part of these logits relative to the logit `base`, and how far they rise above it, as an
// exponent of 2: above kExp2Max the part is spoiled.
template <bool kEntropy, typename T>
SoftmaxPart<double> part_of(const T* p, int64_t count, float scale, float base, float& rise) {
  const float finite_base = base == -INFINITY ? 0.0f : base;
  const float lowest = kExp2Min / scale;
  F top_a = splat(-INFINITY), top_b = top_a, sum_a{}, sum_b{}, dot_a{}, dot_b{};
  const auto add = [&](F x, F& top, F& sum, F& dot) {
    const F d = x - finite_base;
    top = max(d, top);
    const F clamped = clamp_below(d, lowest);
    const Power e = exp2_of_product(clamped, scale);
    sum += e.factor * e.scale;
    if constexpr (kEntropy) dot += clamped * (e.factor * e.scale);
  };
  for_each_block(p, count, T(-INFINITY), [&](Block x, int64_t) {
    add(x.a, top_a, sum_a, dot_a);
    add(x.b, top_b, sum_b, dot_b);
  });
  rise = max_of(max(top_a, top_b)) * scale;
  SoftmaxPart<double> part{base, sum_of(sum_a) + sum_of(sum_b), sum_of(dot_a) + sum_of(dot_b)};
  // The clamp turned 2^-inf into a tiny number; only a NaN may remain of logits that are all -inf.
  if (base == -INFINITY && part.sum == part.sum) part.sum = part.dot = 0;
  return part;
}

template <bool kEntropy, typename T>
SoftmaxPart<double> softmax_part(const T* logits, int64_t count, float inv_temperature) {
  const float scale = inv_temperature * kLog2E;
  SoftmaxPart<double> all;
  for (int64_t start = 0, size; start < count; start += size) {
    size = std::min(start == 0 ? kFirstChunk : kChunk, count - start);
    const T* chunk = logits + start;
    SoftmaxPart<double> part;
    float rise = INFINITY;
    // Chunks rarely rise far above earlier ones, so one read relative to the same logit suffices.
    if (all.max > -INFINITY) part = part_of<kEntropy>(chunk, size, scale, all.max, rise);
    if (rises_too_far(rise, all.sum + part.sum)) {
      part = part_of<kEntropy>(chunk, size, scale, max_element(chunk, size), rise);
    }
    part.dot *= inv_temperature;
    all = merge(all, part, inv_temperature);
  }
  return all;
}

template <typename T>
void backward(const T* logits, T* grad, int64_t count, RowGradient gradient) {
  constexpr float kMinLogP = -86.0f;  // e^x is treated as 0 below it
  const auto of_vector = [&](F x) {
    const F log_p = gradient.log_p(x);
    const F clamped = clamp_below(log_p, kMinLogP);
    const Power e = exp2_of_product(clamped, kLog2E);
    const F p = log_p < splat(kMinLogP) ? F{} : e.factor * e.scale;
    return gradient.other(p, clamped);
  };
  for_each_block(logits, count, T(0.0f), [&](Block x, int64_t i) {
    const Block result{of_vector(x.a), of_vector(x.b)};
    if (i + kBlock <= count) {
      store(grad + i, result);
    } else {
      store_part(grad + i, count - i, result);
    }
  });
}

}  // namespace

template <typename T>
RowKernels<T> row_kernels() {
  return {softmax_part<false, T>, softmax_part<true, T>, backward<T>};
}

template RowKernels<float> row_kernels();
template RowKernels<BFloat16> row_kernels();
template RowKernels<Half> row_kernels();

}  // namespace fusedrl::FUSEDRL_LEVEL
