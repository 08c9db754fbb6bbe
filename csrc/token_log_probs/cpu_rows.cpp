// One pass over a row from memory: chunks that stay in L1 are read twice, for their maximum and for the
// exponentials relative to it. Compiled once a CPU level. The split into chunks depends on the number of
// classes only, so a row's bits do not depend on its batch or on the number of threads.
#include "token_log_probs/cpu_rows.h"

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

constexpr int64_t kChunk = 2048;

// Calls f(block, start) for every block of `count` elements; the last one may be padded with `fill`.
template <typename T, typename Body>
inline void for_each_block(const T* p, int64_t count, T fill, Body&& f) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) f(load(p + i), i);
  if (i < count) f(load_part(p + i, count - i, fill), i);
}

template <bool kEntropy, typename T>
SoftmaxPart<double> part_of(const T* p, int64_t count, float inv_temperature) {
  const T fill(-INFINITY);
  F max_a = splat(-INFINITY), max_b = max_a;
  for_each_block(p, count, fill, [&](Block x, int64_t) {
    max_a = max(x.a, max_a);
    max_b = max(x.b, max_b);
  });
  SoftmaxPart<double> part;
  part.max = max_of(max(max_a, max_b));
  const float base = part.max == -INFINITY ? 0.0f : part.max;
  F sum_a{}, sum_b{}, dot_a{}, dot_b{};
  for_each_block(p, count, fill, [&](Block x, int64_t) {
    const F d_a = clamp_exponent((x.a - base) * inv_temperature);
    const F d_b = clamp_exponent((x.b - base) * inv_temperature);
    const F e_a = exp_clamped(d_a), e_b = exp_clamped(d_b);
    sum_a += e_a;
    sum_b += e_b;
    if constexpr (kEntropy) {
      dot_a += d_a * e_a;
      dot_b += d_b * e_b;
    }
  });
  part.sum = sum_of(sum_a) + sum_of(sum_b);
  part.dot = sum_of(dot_a) + sum_of(dot_b);
  // The clamp turned e^-inf into a tiny number; only a NaN may remain of a part without finite logits.
  if (part.max == -INFINITY && part.sum == part.sum) part.sum = part.dot = 0;
  return part;
}

template <bool kEntropy, typename T>
RowResult forward(const T* row, int64_t classes, int64_t target, float inv_temperature) {
  SoftmaxPart<double> all;
  for (int64_t start = 0; start < classes; start += kChunk) {
    const int64_t count = classes - start < kChunk ? classes - start : kChunk;
    all = merge(all, part_of<kEntropy>(row + start, count, inv_temperature), inv_temperature);
  }
  return finish(all, static_cast<float>(row[target]), inv_temperature);
}

template <typename T>
void backward(const T* row, T* grad, int64_t classes, int64_t target, float log_prob,
              RowGradient gradient) {
  const auto of_vector = [&](F x) {
    const F log_p = x * gradient.inv_temperature - gradient.lse;
    const F clamped = clamp_exponent(log_p);
    const F p = log_p < splat(kExpMin) ? F{} : exp_clamped(clamped);
    return gradient.other(p, clamped);
  };
  for_each_block(row, classes, T(0.0f), [&](Block x, int64_t i) {
    const Block result{of_vector(x.a), of_vector(x.b)};
    if (i + kBlock <= classes) {
      store(grad + i, result);
    } else {
      store_part(grad + i, classes - i, result);
    }
  });
  grad[target] = T(gradient.target(log_prob));
}

}  // namespace

template <typename T>
RowKernels<T> row_kernels() {
  return {forward<false, T>, forward<true, T>, backward<T>};
}

template RowKernels<float> row_kernels();
template RowKernels<BFloat16> row_kernels();
template RowKernels<Half> row_kernels();

}  // namespace fusedrl::FUSEDRL_LEVEL
