// CPU op: sequences are independent, shared out among torch's threads.
#include <algorithm>
#include <tuple>

#include "common/cpu_ops.h"
#include "importance_weights/cpu_rows.h"
#include "importance_weights/results.h"

namespace fusedrl {
namespace {

constexpr int64_t kGrain = 131072;  // tokens, about 100 us: waking a thread costs half of that

std::tuple<Tensor, Tensor, Tensor> forward(Tensor log_probs, Tensor rollout_log_probs,
                                           std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, Tensor low, Tensor high,
                                           int64_t level, bool masks, bool nan_missing) {
  const int64_t tokens = log_probs.numel();
  check_offsets(offsets, tokens);
  const SequenceBounds bounds = sequence_bounds(log_probs, offsets);
  const Results results(log_probs, bounds.sequences);
  const Weighting weighting{
      static_cast<WeightLevel>(level),
      nan_missing,
      {static_cast<float>(*data<double>(low)), static_cast<float>(*data<double>(high)), masks}};
  const MismatchRows rows = results.rows();
  float* weights = mutable_data<float>(results.weights);
  const int64_t grain =
      std::max<int64_t>(kGrain * bounds.sequences / std::max<int64_t>(tokens, 1), 1);
  dispatch_half_or_float(log_probs, "log_probs", [&]<typename T>() {
    const SequenceKernel<T> kernel = weigh_sequence<T>(cpu_level());
    const T *p = data<T>(log_probs), *q = data<T>(rollout_log_probs);
    const bool* kept = data<bool>(mask);
    torch::stable::parallel_for(0, bounds.sequences, grain, [&](int64_t first, int64_t past) {
      for (int64_t b = first; b < past; ++b) {
        const int64_t n = bounds.begin(b);
        const TokenSequence<T> sequence{p + n, q + n, kept == nullptr ? nullptr : kept + n,
                                        bounds.end(b) - n};
        rows.write(b, kernel(sequence, weighting, weights + n));
      }
    });
  });
  return {results.weights, results.counts, results.sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) { m.impl("importance_weights", TORCH_BOX(&forward)); }

}  // namespace fusedrl
