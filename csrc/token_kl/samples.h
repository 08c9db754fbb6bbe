// What both devices take: lists of samples, one tensor a sample, and upstream gradients.
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

inline bool is_one_value_a_row(const Tensor& tensor) {
  return tensor.dim() == 1 || (tensor.dim() == 2 && tensor.size(1) == 1);
}

// Refuses a sample that does not lie beside the log-probs `like` of the same sample. A reward may
// have one value only, and a trailing dimension of one.
inline void check_sample(const char* name, size_t s, const Tensor& sample, const Tensor& like,
                         ScalarType dtype, bool is_reward) {
  const int64_t tokens = like.numel(), got = sample.numel();
  const bool fits = is_reward ? is_one_value_a_row(sample) && (got == tokens || got == 1)
                              : sample.dim() == 1 && got == tokens;
  check(fits, name, ": sample ", s, ": expected shape [", tokens, "]",
        is_reward ? ", with a trailing 1 or with one value" : "", ", got ", got, " elements in ",
        sample.dim(), " dimensions; give one value for each token");
  check(sample.scalar_type() == dtype, name, ": sample ", s, ": expected ",
        dtype == ScalarType::Bool ? "torch.bool" : "the dtype of log_probs: sample 0",
        ", got another; convert it with .to()");
  check(sample.is_contiguous(), name, ": sample ", s,
        ": expected contiguous memory, got a view with gaps; copy it with .contiguous()");
}

// `dtype` is that of the whole column.
inline void check_column(const char* name, const std::vector<Tensor>& column,
                         const std::vector<Tensor>& log_probs, ScalarType dtype,
                         bool is_reward = false) {
  check(column.size() == log_probs.size(), name, ": expected ", log_probs.size(), " samples, got ",
        column.size(), "; give one tensor for each sample");
  const Tensor& first = log_probs[0];
  for (size_t s = 0; s < column.size(); ++s) {
    check_sample(name, s, column[s], log_probs[s], dtype, is_reward);
    check(column[s].is_cpu() == first.is_cpu() &&
              column[s].get_device_index() == first.get_device_index(),
          name, ": sample ", s,
          ": expected the device of log_probs: sample 0, got another; move it with .to()");
  }
}

// Where the samples start in the packed results, and where the last one ends. Compiled graphs get
// here without the checks in Python, and kernels index by these lengths.
inline std::vector<int64_t> checked_starts(const Samples& samples) {
  const std::vector<Tensor>& log_probs = samples.log_probs;
  check(!log_probs.empty(),
        "log_probs: expected at least one sample, got none; skip empty batches");
  const ScalarType dtype = log_probs[0].scalar_type();
  check_column("log_probs", log_probs, log_probs, dtype);
  check_column("ref_log_probs", samples.ref_log_probs, log_probs, dtype);
  if (!samples.mask.empty()) check_column("mask", samples.mask, log_probs, ScalarType::Bool);
  if (!samples.reward.empty()) check_column("reward", samples.reward, log_probs, dtype, true);
  std::vector<int64_t> starts{0};
  starts.reserve(samples.count() + 1);
  for (const Tensor& sample : log_probs) starts.push_back(starts.back() + sample.numel());
  return starts;
}

inline void check_upstream(bool of_kl, bool of_reward) {
  check(of_kl || of_reward,
        "grad_kl: expected the upstream gradient of the KL, of the reward or of both, got neither; "
        "pass one of them");
}

}  // namespace fusedrl
