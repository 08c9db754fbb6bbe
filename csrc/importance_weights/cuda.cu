// CUDA op: its launch and registration. Nothing here waits for the device.
#include <tuple>

#include "common/cuda.h"
#include "importance_weights/kernels.h"
#include "importance_weights/results.h"

namespace fusedrl {
namespace {

constexpr int kThreads = 256;

std::tuple<Tensor, Tensor, Tensor> forward(Tensor log_probs, Tensor rollout_log_probs,
                                           std::optional<Tensor> mask,
                                           std::optional<Tensor> offsets, Tensor low, Tensor high,
                                           int64_t level, bool masks, bool nan_missing) {
  const OnDeviceOf device(log_probs);
  const SequenceBounds bounds = sequence_bounds(log_probs, offsets);
  const Results results(log_probs, bounds.sequences);
  const Scalar least = scalar_argument("low", low, log_probs);
  const Scalar most = scalar_argument("high", high, log_probs);
  if (bounds.sequences == 0) return {results.weights, results.counts, results.sums};
  dispatch_half_or_float(log_probs, "log_probs", [&]<typename T>() {
    const TokenRatios<T> ratios{data<T>(log_probs), data<T>(rollout_log_probs), data<bool>(mask)};
    device.launch(weigh_sequences<T>, bounds.sequences, kThreads, ratios, bounds,
                  static_cast<WeightLevel>(level), nan_missing, least, most, masks,
                  mutable_data<float>(results.weights), results.rows());
  });
  return {results.weights, results.counts, results.sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CUDA, m) { m.impl("importance_weights", TORCH_BOX(&forward)); }

}  // namespace fusedrl
