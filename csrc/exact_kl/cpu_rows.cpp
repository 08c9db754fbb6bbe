// One pass over two rows, in chunks that stay in L1. The first chunk is short and finds its maxima
// before it exponentiates; later chunks are relative to these unless they rise too far above them.
// A mixture has a second pass, with the normalizers. Compiled once per CPU level. Every choice
// depends only on the two rows.
//
// Lambdas are always inlined: if called, they keep sums in memory, which doubles the instructions.
#include "exact_kl/cpu_rows.h"

#include <algorithm>

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

constexpr int64_t kFirstChunk = 512;
constexpr int64_t kChunk = 2048;

// The sums of a part, and how far its logits rise above its maxima, per lane.
struct Sums {
  F top_p = splat(-INFINITY), top_q = splat(-INFINITY);
  F sum_p{}, sum_q{}, cross{};

  void add(F dp, F dq, F p, F q) {
    top_p = max(dp, top_p);
    top_q = max(dq, top_q);
    sum_p += p;
    sum_q += q;
    const F term = p * (dp - dq);
    cross += p == F{} ? F{} : term;
  }
};

// The sums of the entropies: separate, as compilers keep a larger structure in memory.
struct Dots {
  F p{}, q{};

  void add(F dp, F dq, F of_p, F of_q) {
    const F term_p = of_p * dp, term_q = of_q * dq;
    p += of_p == F{} ? F{} : term_p;
    q += of_q == F{} ? F{} : term_q;
  }
};

// The part of these logits relative to `max_p` and `max_q`, and how far they rise above these, as
// exponents of 2: above kExp2Max the part is spoiled.
template <bool kEntropies, typename T>
PairPart<double> chunk_part(const T* logits, const T* ref_logits, int64_t count,
                            float inv_temperature, float max_p, float max_q, Pair<float>& rise) {
  const float scale = inv_temperature * kLog2E;
  const float base_p = max_p == -INFINITY ? 0.0f : max_p;
  const float base_q = max_q == -INFINITY ? 0.0f : max_q;
  Sums a, b;
  Dots dots_a, dots_b;
  const auto add = [=](Sums& sums, Dots& dots, F dp, F dq) __attribute__((always_inline)) {
    const F p = exp2_or_zero(dp, scale), q = exp2_or_zero(dq, scale);
    sums.add(dp, dq, p, q);
    if constexpr (kEntropies) dots.add(dp, dq, p, q);
  };
  for_each_block_pair(logits, ref_logits, count, T(-INFINITY),
                      [&](Block x, Block y, int64_t) __attribute__((always_inline)) {
                        add(a, dots_a, x.a - base_p, y.a - base_q);
                        add(b, dots_b, x.b - base_p, y.b - base_q);
                      });
  rise = {max_of(max(a.top_p, b.top_p)) * scale, max_of(max(a.top_q, b.top_q)) * scale};
  const auto sum = [](F x, F y) { return sum_of(x) + sum_of(y); };
  PairPart<double> part{max_p, max_q, sum(a.sum_p, b.sum_p), sum(a.sum_q, b.sum_q),
                        sum(a.cross, b.cross) * inv_temperature};
  if constexpr (kEntropies) {
    part.dot_p = sum(dots_a.p, dots_b.p) * inv_temperature;
    part.dot_q = sum(dots_a.q, dots_b.q) * inv_temperature;
  }
  return part;
}

template <bool kEntropies, typename T>
PairPart<double> pair_part(const T* logits, const T* ref_logits, int64_t count,
                           float inv_temperature) {
  PairPart<double> all;
  for (int64_t start = 0, size; start < count; start += size) {
    size = std::min(start == 0 ? kFirstChunk : kChunk, count - start);
    const T *x = logits + start, *y = ref_logits + start;
    PairPart<double> part;
    Pair<float> rise{INFINITY, INFINITY};
    // Chunks rarely rise far above earlier ones, so one read relative to the same logits suffices.
    if (all.max_p > -INFINITY && all.max_q > -INFINITY) {
      part = chunk_part<kEntropies>(x, y, size, inv_temperature, all.max_p, all.max_q, rise);
    }
    if (rises_too_far(rise.p, all.sum_p + part.sum_p) ||
        rises_too_far(rise.q, all.sum_q + part.sum_q)) {
      part = chunk_part<kEntropies>(x, y, size, inv_temperature, max_element(x, size),
                                    max_element(y, size), rise);
    }
    all = merge(all, part, inv_temperature);
  }
  return all;
}

inline F probability(F log_p) { return exp2_or_zero(log_p, kLog2E); }

// The `math` argument of log_ratios.
struct Math {
  FUSEDRL_HD static F inverse(F x) { return 1.0f / x; }
  FUSEDRL_HD static F log(F x, F less_one) { return log_of(x, less_one); }
};

template <typename T>
Pair<double> mixture_part(const T* logits, const T* ref_logits, int64_t count,
                          Pair<Normalizer> normalizers, Pair<float> shares, float inv_temperature) {
  F sum_p{}, sum_q{};
  Pair<double> all{};
  const auto add = [&](F x, F y) __attribute__((always_inline)) {
    const F p = probability(normalizers.p.log_p(x, inv_temperature));
    const F q = probability(normalizers.q.log_p(y, inv_temperature));
    const Pair<F> log = log_ratios(p, q, shares, Math());
    sum_p += p * log.p;
    sum_q += q * log.q;
  };
  for (int64_t start = 0; start < count; start += kChunk) {
    const int64_t size = std::min(kChunk, count - start);
    sum_p = sum_q = F{};
    for_each_block_pair(logits + start, ref_logits + start, size, T(-INFINITY),
                        [&](Block x, Block y, int64_t) __attribute__((always_inline)) {
                          add(x.a, y.a);
                          add(x.b, y.b);
                        });
    all.p += sum_of(sum_p);
    all.q += sum_of(sum_q);
  }
  return all;
}

template <bool kMixture, bool kEntropies, bool kGrad, bool kGradRef, typename T>
void backward_of(const T* logits, const T* ref_logits, T* grad, T* grad_ref, int64_t count,
                 const PairGradient& gradient) {
  const auto of_vectors = [&](F x, F y) __attribute__((always_inline)) {
    const Pair<F> log = gradient.log_probs(x, y);
    const F p = probability(log.p), q = probability(log.q);
    Pair<F> of_logits;
    if constexpr (kMixture) {
      of_logits = gradient.of_mixture(p, q, Math());
    } else {
      of_logits = gradient.of_kl(p, q, log);
    }
    if constexpr (kEntropies) {
      const Pair<F> of_entropies = gradient.of_entropies(p, q, log);
      of_logits = {of_logits.p + of_entropies.p, of_logits.q + of_entropies.q};
    }
    return of_logits;
  };
  const auto write = [&](T* out, int64_t i, Block x) __attribute__((always_inline)) {
    i + kBlock <= count ? store(out + i, x) : store_part(out + i, count - i, x);
  };
  for_each_block_pair(logits, ref_logits, count, T(0.0f),
                      [&](Block x, Block y, int64_t i) __attribute__((always_inline)) {
                        const Pair<F> a = of_vectors(x.a, y.a), b = of_vectors(x.b, y.b);
                        if constexpr (kGrad) write(grad, i, {a.p, b.p});
                        if constexpr (kGradRef) write(grad_ref, i, {a.q, b.q});
                      });
}

// Gradients that are not requested are not computed.
template <bool kMixture, bool kEntropies, typename T>
void backward(const T* logits, const T* ref_logits, T* grad, T* grad_ref, int64_t count,
              PairGradient gradient) {
  const auto run = grad_ref == nullptr ? backward_of<kMixture, kEntropies, true, false, T>
                   : grad == nullptr   ? backward_of<kMixture, kEntropies, false, true, T>
                                       : backward_of<kMixture, kEntropies, true, true, T>;
  run(logits, ref_logits, grad, grad_ref, count, gradient);
}

}  // namespace

template <typename T>
PairKernels<T> pair_kernels(bool mixture, bool entropies) {
  return {entropies ? pair_part<true, T> : pair_part<false, T>, mixture_part<T>,
          mixture ? (entropies ? backward<true, true, T> : backward<true, false, T>)
                  : (entropies ? backward<false, true, T> : backward<false, false, T>)};
}

template PairKernels<float> pair_kernels(bool, bool);
template PairKernels<BFloat16> pair_kernels(bool, bool);
template PairKernels<Half> pair_kernels(bool, bool);

}  // namespace fusedrl::FUSEDRL_LEVEL
