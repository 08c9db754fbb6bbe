// One pass over two rows, in chunks that stay in L1: the first, a short one, finds its maxima
// before it exponentiates, the others are relative to those unless they rise far above them.
// Jensen-Shannon takes a second pass, with the normalizers. Compiled once a CPU level. Every choice
// depends on the two rows alone.
#include "exact_kl/cpu_rows.h"

#include <algorithm>

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

constexpr int64_t kFirstChunk = 512;
constexpr int64_t kChunk = 2048;

// The sums of a part, and how far its logits rise above its maxima, one a lane.
struct Sums {
  F top_p = splat(-INFINITY), top_q = splat(-INFINITY);
  F sum_p{}, sum_q{}, cross{};

  void add(F dp, F dq, float scale) {
    top_p = max(dp, top_p);
    top_q = max(dq, top_q);
    const F p = exp2_or_zero(dp, scale);
    sum_p += p;
    sum_q += exp2_or_zero(dq, scale);
    const F term = p * (dp - dq);
    cross += p == F{} ? F{} : term;
  }
};

// The part of these logits relative to `max_p` and `max_q`. A logit so far above them that powers
// of two leave the safe range spoils the part: then `overflow` is set.
template <typename T>
PairPart<double> chunk_part(const T* logits, const T* ref_logits, int64_t count,
                            float inv_temperature, float max_p, float max_q, bool& overflow) {
  const float scale = inv_temperature * kLog2E;
  const float base_p = max_p == -INFINITY ? 0.0f : max_p;
  const float base_q = max_q == -INFINITY ? 0.0f : max_q;
  Sums a, b;
  for_each_block_pair(logits, ref_logits, count, T(-INFINITY), [&](Block x, Block y, int64_t) {
    a.add(x.a - base_p, y.a - base_q, scale);
    b.add(x.b - base_p, y.b - base_q, scale);
  });
  const float top = std::max(max_of(max(a.top_p, b.top_p)), max_of(max(a.top_q, b.top_q)));
  overflow = top * scale > kExp2Max / 2;
  return {max_p, max_q, sum_of(a.sum_p) + sum_of(b.sum_p), sum_of(a.sum_q) + sum_of(b.sum_q),
          (sum_of(a.cross) + sum_of(b.cross)) * inv_temperature};
}

template <typename T>
PairPart<double> pair_part(const T* logits, const T* ref_logits, int64_t count,
                           float inv_temperature) {
  PairPart<double> all;
  for (int64_t start = 0, size; start < count; start += size) {
    size = std::min(start == 0 ? kFirstChunk : kChunk, count - start);
    const T *x = logits + start, *y = ref_logits + start;
    PairPart<double> part;
    // A chunk rarely exceeds what came before by 2^62: relative to the same logits, one read.
    bool again = all.max_p == -INFINITY || all.max_q == -INFINITY;
    if (!again) part = chunk_part(x, y, size, inv_temperature, all.max_p, all.max_q, again);
    if (again) {
      part = chunk_part(x, y, size, inv_temperature, max_element(x, size), max_element(y, size),
                        again);
    }
    all = merge(all, part, inv_temperature);
  }
  return all;
}

inline F probability(F log_p) { return exp2_or_zero(log_p, kLog2E); }

constexpr auto kLog = [](F x) { return log_of(x); };

template <typename T>
Pair<double> jensen_shannon_part(const T* logits, const T* ref_logits, int64_t count,
                                 Pair<Normalizer> normalizers, float inv_temperature) {
  F sum_p{}, sum_q{};
  Pair<double> all{};
  const auto add = [&](F x, F y) {
    const F p = probability(normalizers.p.log_p(x, inv_temperature));
    const F q = probability(normalizers.q.log_p(y, inv_temperature));
    const Pair<F> score = half_logs(p, q, kLog);
    sum_p += p * score.p;
    sum_q += q * score.q;
  };
  for (int64_t start = 0; start < count; start += kChunk) {
    const int64_t size = std::min(kChunk, count - start);
    sum_p = sum_q = F{};
    for_each_block_pair(logits + start, ref_logits + start, size, T(-INFINITY),
                        [&](Block x, Block y, int64_t) {
                          add(x.a, y.a);
                          add(x.b, y.b);
                        });
    all.p += sum_of(sum_p);
    all.q += sum_of(sum_q);
  }
  return all;
}

template <bool kJensenShannon, bool kGrad, bool kGradRef, typename T>
void backward_of(const T* logits, const T* ref_logits, T* grad, T* grad_ref, int64_t count,
                 const PairGradient& gradient) {
  const auto of_vectors = [&](F x, F y) {
    const Pair<F> log = gradient.log_probs(x, y);
    const F p = probability(log.p), q = probability(log.q);
    if constexpr (kJensenShannon) return gradient.of_jensen_shannon(p, q, kLog);
    return gradient.of_kl(p, q, log);
  };
  const auto write = [&](T* out, int64_t i, Block x) {
    i + kBlock <= count ? store(out + i, x) : store_part(out + i, count - i, x);
  };
  for_each_block_pair(logits, ref_logits, count, T(0.0f), [&](Block x, Block y, int64_t i) {
    const Pair<F> a = of_vectors(x.a, y.a), b = of_vectors(x.b, y.b);
    if constexpr (kGrad) write(grad, i, {a.p, b.p});
    if constexpr (kGradRef) write(grad_ref, i, {a.q, b.q});
  });
}

// A gradient that nobody asked for is not computed either.
template <bool kJensenShannon, typename T>
void backward(const T* logits, const T* ref_logits, T* grad, T* grad_ref, int64_t count,
              PairGradient gradient) {
  const auto run = grad_ref == nullptr ? backward_of<kJensenShannon, true, false, T>
                   : grad == nullptr   ? backward_of<kJensenShannon, false, true, T>
                                       : backward_of<kJensenShannon, true, true, T>;
  run(logits, ref_logits, grad, grad_ref, count, gradient);
}

}  // namespace

template <typename T>
PairKernels<T> pair_kernels() {
  return {pair_part<T>, jensen_shannon_part<T>, backward<false, T>, backward<true, T>};
}

template PairKernels<float> pair_kernels();
template PairKernels<BFloat16> pair_kernels();
template PairKernels<Half> pair_kernels();

}  // namespace fusedrl::FUSEDRL_LEVEL
