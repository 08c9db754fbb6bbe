// Lists of samples, one tensor a sample, as both devices take them.
#pragma once

#include <vector>

#include "common/tensor.h"

namespace fusedrl {

// Contiguous samples of one device. `mask` and `reward` are empty, or as many as the log-probs; a
// reward has one value a token of its sample, or one.
struct Samples {
  const std::vector<Tensor>& log_probs;
  const std::vector<Tensor>& ref_log_probs;
  const std::vector<Tensor>& mask;
  const std::vector<Tensor>& reward;

  size_t count() const { return log_probs.size(); }

  // Packed results of the samples: the KL, and the penalised rewards where there are rewards.
  Tensor empty_packed(int64_t tokens) const {
    return torch::stable::new_empty(log_probs[0], std::vector<int64_t>{tokens});
  }

  template <typename T>
  const T* reward_of(size_t s) const {
    return reward.empty() ? nullptr : data<T>(reward[s]);
  }

  const bool* mask_of(size_t s) const { return mask.empty() ? nullptr : data<bool>(mask[s]); }

  bool one_reward(size_t s) const {
    return !reward.empty() && reward[s].numel() != log_probs[s].numel();
  }
};

inline void check_column(const char* name, const std::vector<Tensor>& column,
                         const std::vector<Tensor>& log_probs, ScalarType dtype, bool one_value) {
  STD_TORCH_CHECK(column.size() == log_probs.size(), name, ": expected ", log_probs.size(),
                  " samples, got ", column.size());
  const Tensor& like = log_probs[0];
  for (size_t s = 0; s < column.size(); ++s) {
    const int64_t tokens = log_probs[s].numel(), got = column[s].numel();
    STD_TORCH_CHECK(got == tokens || (one_value && got == 1), name, ": sample ", s, ": expected ",
                    tokens, " elements as in log_probs, got ", got);
    STD_TORCH_CHECK(column[s].scalar_type() == dtype, name, ": sample ", s, ": expected ",
                    dtype == ScalarType::Bool ? "torch.bool" : "the dtype of the first log_probs",
                    "; convert it with .to()");
    STD_TORCH_CHECK(column[s].is_cpu() == like.is_cpu() &&
                        column[s].get_device_index() == like.get_device_index(),
                    name, ": sample ", s, ": expected the device of the first log_probs; ",
                    "move it with .to()");
    STD_TORCH_CHECK(column[s].is_contiguous(), name, ": sample ", s,
                    ": expected contiguous memory; copy it with .contiguous()");
  }
}

// Where the samples start in the packed results, and where the last one ends. Compiled graphs get
// here without the checks in Python, and kernels index by these lengths.
inline std::vector<int64_t> checked_starts(const Samples& samples) {
  const std::vector<Tensor>& log_probs = samples.log_probs;
  STD_TORCH_CHECK(!log_probs.empty(), "log_probs: expected at least one sample, got none");
  const ScalarType dtype = log_probs[0].scalar_type();
  check_column("log_probs", log_probs, log_probs, dtype, false);
  check_column("ref_log_probs", samples.ref_log_probs, log_probs, dtype, false);
  if (!samples.mask.empty()) {
    check_column("mask", samples.mask, log_probs, ScalarType::Bool, false);
  }
  if (!samples.reward.empty()) check_column("reward", samples.reward, log_probs, dtype, true);
  std::vector<int64_t> starts{0};
  starts.reserve(samples.count() + 1);
  for (const Tensor& sample : log_probs) starts.push_back(starts.back() + sample.numel());
  return starts;
}

}  // namespace fusedrl
