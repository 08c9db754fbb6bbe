// Gradients of a linear head from tiles of its logits' gradients. Everything is summed in float32
// and rounded to the gradient's dtype once.
#pragma once

#include <optional>
#include <vector>

#include "common/cpu_head.h"

namespace fusedrl {

class CpuHeadGradient {
 public:
  // The weight's gradient is of its dtype unless another is asked for.
  CpuHeadGradient(CpuHead& head, const Tensor& hidden, const Tensor& weight,
                  const std::optional<Tensor>& bias, bool of_hidden, bool of_weight, bool of_bias,
                  std::optional<ScalarType> weight_dtype = std::nullopt)
      : head_(head), hidden_like_(hidden) {
    const int64_t width = weight.size(1);
    if (of_hidden) hidden_ = zeros(hidden, {head.padded_rows(), width}, ScalarType::Float);
    if (of_weight) {
      const ScalarType dtype = weight_dtype.value_or(weight.scalar_type());
      weight_ = zeros(weight, weight.sizes(), dtype);
      if (dtype != ScalarType::Float) {
        upcast_.emplace(weight, head.most_classes() * width);
      }
    }
    if (of_bias) bias_sums_.resize(bias->numel());
  }

  // Adds what `grads`, the gradients of head.logits(first_row), contribute.
  void add(int64_t first_row, const Tensor& grads) {
    const Tensor block = head_.hidden_block(first_row);
    if (hidden_.has_value()) {
      Tensor out = rows_of(*hidden_, first_row, block.size(0));
      head_.multiply_rows(out, grads, head_.tile(), true);
    }
    if (weight_.has_value()) {
      Tensor out = weight_tile();
      if (first_row == 0) {
        multiply(out, transposed(grads), block);
      } else {
        multiply_add(out, transposed(grads), block);
      }
    }
    if (!bias_sums_.empty()) add_bias(grads);
  }

  // After the last block of a tile of classes.
  void finish_tile() {
    if (!upcast_.has_value()) return;
    Tensor out = rows_of(*weight_, head_.first_class(), head_.tile().size(0));
    torch::stable::copy_(out, weight_tile());
  }

  // Shaped like the hidden states, which these tokens read, and of their dtype unless another is
  // asked for; empty if none was asked for.
  Tensor hidden(const RowMap& map, const std::vector<int64_t>& tokens, float scale,
                std::optional<ScalarType> dtype = std::nullopt) const {
    if (!hidden_.has_value()) return empty_vector(hidden_like_, hidden_like_.scalar_type());
    const int64_t width = hidden_->size(1), count = tokens.size();
    Tensor out =
        zeros(hidden_like_, hidden_like_.sizes(), dtype.value_or(hidden_like_.scalar_type()));
    const float* from = data<float>(*hidden_);
    dispatch_half_or_float(out, "hidden", [&]<typename T>() {
      T* to = mutable_data<T>(out);
      torch::stable::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          T* row = to + map.row_of(tokens[r]) * width;
          for (int64_t i = 0; i < width; ++i) row[i] = T(scale * from[r * width + i]);
        }
      });
    });
    return out;
  }

  Tensor weight() const {
    return weight_.has_value() ? *weight_ : empty_vector(hidden_like_, hidden_like_.scalar_type());
  }

  // Of the dtype of the hidden states unless another is asked for.
  Tensor bias(float scale, std::optional<ScalarType> dtype = std::nullopt) const {
    const ScalarType type = dtype.value_or(hidden_like_.scalar_type());
    if (bias_sums_.empty()) return empty_vector(hidden_like_, hidden_like_.scalar_type());
    const Tensor out = torch::stable::new_empty(
        hidden_like_, std::vector<int64_t>{static_cast<int64_t>(bias_sums_.size())}, type);
    dispatch_half_or_float(out, "bias", [&]<typename T>() {
      T* to = mutable_data<T>(out);
      for (size_t v = 0; v < bias_sums_.size(); ++v) to[v] = T(scale * bias_sums_[v]);
    });
    return out;
  }

 private:
  static Tensor zeros(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                      ScalarType dtype) {
    return torch::stable::new_zeros(like, sizes, dtype);
  }

  Tensor weight_tile() const {
    const int64_t count = head_.tile().size(0);
    if (upcast_.has_value()) return upcast_->matrix(count, weight_->size(1));
    return rows_of(*weight_, head_.first_class(), count);
  }

  void add_bias(const Tensor& grads) {
    const int64_t rows = grads.size(0), count = grads.size(1);
    const float* from = data<float>(grads);
    double* sums = bias_sums_.data() + head_.first_class();
    torch::stable::parallel_for(0, count, 256, [=](int64_t begin, int64_t end) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t v = begin; v < end; ++v) sums[v] += from[r * count + v];
      }
    });
  }

  CpuHead& head_;
  Tensor hidden_like_;
  std::optional<Tensor> hidden_, weight_;
  std::optional<Workspace> upcast_;
  std::vector<double> bias_sums_;
};

}  // namespace fusedrl
