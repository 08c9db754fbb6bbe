// The linear head of a language model on the CPU, in float32: a tile of logits, of some rows and
// some classes, is all that ever exists of them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <vector>

#include "common/row_map.h"
#include "common/tensor.h"

namespace fusedrl {

// A tile has at most 4 MiB of logits, and 2 MiB of weights where these have to be converted. GEMMs
// run at full speed on tiles that the caches hold; larger ones only wait less often for each other.
constexpr int64_t kTileLogits = 1 << 20;
constexpr int64_t kTileWeights = 1 << 19;
constexpr int64_t kTileRows = 1024;
constexpr int64_t kTileClasses = 4096;
constexpr int64_t kTileStep = 256;

// Rows of one GEMM where the bits of a row may not depend on how many others there are.
constexpr int64_t kInvariantRows = 64;
// Below as many columns MKL sums a row in an order that depends on where the row stands.
constexpr int64_t kNarrowColumns = 16;

// out = a b
inline void multiply(Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out += a b
inline void multiply_add(Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

// out = a b, or out += a b, every element summed in the same order.
inline void multiply_in_order(Tensor& out, const Tensor& a, const Tensor& b, bool add) {
  const int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  const int64_t a_row = a.stride(0), a_step = a.stride(1);
  const int64_t b_step = b.stride(0), b_column = b.stride(1);
  const float *from_a = data<float>(a), *from_b = data<float>(b);
  float* to = mutable_data<float>(out);
  torch::stable::parallel_for(0, rows, 8, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin * columns; i < end * columns; ++i) {
      const int64_t row = i / columns, column = i % columns;
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += from_a[row * a_row + k * a_step] * from_b[k * b_step + column * b_column];
      }
      to[i] = add ? to[i] + sum : sum;
    }
  });
}

inline Tensor rows_of(const Tensor& matrix, int64_t first, int64_t count) {
  Tensor copy = matrix;
  return torch::stable::narrow(copy, 0, first, count);
}

inline Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

inline Tensor new_matrix(const Tensor& like, int64_t rows, int64_t columns) {
  return torch::stable::new_empty(like, std::vector<int64_t>{rows, columns}, ScalarType::Float);
}

// A float32 matrix whose number of rows and columns changes from tile to tile.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t most) : flat_(new_matrix(like, most, 1)) {}

  Tensor matrix(int64_t rows, int64_t columns, int64_t first = 0) const {
    return torch::stable::view(rows_of(flat_, first, rows * columns), {rows, columns});
  }

 private:
  Tensor flat_;
};

// Where the rows that these tokens read start.
inline std::vector<int64_t> elements_of(const RowMap& map, const std::vector<int64_t>& tokens) {
  std::vector<int64_t> elements;
  elements.reserve(tokens.size());
  for (const int64_t n : tokens) elements.push_back(map.element_of_row(map.row_of(n)));
  return elements;
}

// The hidden states at `rows` (element offsets), times `scale`, in float32. Zeros fill the last
// block.
inline Tensor gathered(const Tensor& hidden, const std::vector<int64_t>& rows, float scale,
                       int64_t block) {
  const int64_t width = hidden.size(hidden.dim() - 1), count = rows.size();
  const int64_t padded = (count + block - 1) / block * block;
  Tensor out = new_matrix(hidden, padded, width);
  float* to = mutable_data<float>(out);
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    const T* from = data<T>(hidden);
    torch::stable::parallel_for(0, padded, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t i = 0; i < width; ++i) {
          to[r * width + i] = r < count ? scale * static_cast<float>(from[rows[r] + i]) : 0.0f;
        }
      }
    });
  });
  return out;
}

// Rows of a GEMM.
inline int64_t block_rows(int64_t rows, bool batch_invariant) {
  return batch_invariant ? kInvariantRows : std::max<int64_t>(1, std::min(rows, kTileRows));
}

// Classes of a tile for so many rows.
inline int64_t tile_classes(const Tensor& weight, int64_t block) {
  int64_t most = std::min(kTileClasses, kTileLogits / block);
  if (weight.scalar_type() != ScalarType::Float) {
    most = std::min(most, kTileWeights / weight.size(1));
  }
  return std::min(std::max(most / kTileStep, int64_t(1)) * kTileStep, weight.size(0));
}

// Computes tiles of logits = scale (h W^T + b) over the kept rows.
class CpuHead {
 public:
  // With `whole_rows`, blocks have so many rows, and the logits of all their classes are held.
  CpuHead(const Tensor& hidden, const std::vector<int64_t>& rows, const Tensor& weight,
          const std::optional<Tensor>& bias, float scale, bool batch_invariant,
          int64_t most_classes, int64_t whole_rows = 0)
      : block_(whole_rows > 0 ? whole_rows : block_rows(rows.size(), batch_invariant)),
        most_classes_(most_classes),
        rows_(rows.size()),
        batch_invariant_(batch_invariant),
        holds_blocks_(whole_rows > 0),
        hidden_(gathered(hidden, rows, scale, batch_invariant ? block_ : 1)),
        weight_(weight),
        logits_(hidden, block_ * (holds_blocks_ ? weight.size(0) : most_classes)),
        upcast_(hidden, is_float() ? 0 : most_classes * weight.size(1)),
        tile_(weight) {
    if (!bias.has_value()) return;
    bias_.resize(weight.size(0));
    dispatch_half_or_float(*bias, "bias", [&]<typename T>() {
      const T* from = data<T>(*bias);
      for (size_t v = 0; v < bias_.size(); ++v) bias_[v] = scale * static_cast<float>(from[v]);
    });
  }

  int64_t most_classes() const { return most_classes_; }
  int64_t padded_rows() const { return hidden_.size(0); }
  int64_t classes() const { return weight_.size(0); }

  // Calls f(first, count) for every tile of classes, its weights at hand.
  template <typename F>
  void for_each_tile(F&& f) {
    if (rows_ == 0) return;
    for (int64_t first = 0; first < classes(); first += most_classes_) {
      const int64_t count = std::min(most_classes_, classes() - first);
      load(first, count);
      f(first, count);
    }
  }

  // Calls f(first, count) for every block of rows.
  template <typename F>
  void for_each_block(F&& f) const {
    for (int64_t first = 0; first < rows_; first += block_) {
      f(first, std::min(block_, rows_ - first));
    }
  }

  // Weights of the classes from `first` on, in float32.
  void load(int64_t first, int64_t count) {
    tile_ = rows_of(weight_, first, count);
    first_class_ = first;
    if (is_float()) return;
    Tensor upcast = upcast_.matrix(count, weight_.size(1));
    torch::stable::copy_(upcast, tile_);
    tile_ = upcast;
  }

  // The rows of a block and, where rows are padded, zeros after them.
  Tensor hidden_block(int64_t first) const {
    return rows_of(hidden_, first, std::min(block_, hidden_.size(0) - first));
  }

  // Where the logits [rows, classes] of a block of rows and the loaded classes belong: the next
  // tile overwrites them unless all of a block are held.
  Tensor place(int64_t first_row) const {
    const int64_t rows = hidden_block(first_row).size(0);
    return logits_.matrix(rows, tile_.size(0), holds_blocks_ ? rows * first_class_ : 0);
  }

  Tensor logits(int64_t first_row) const {
    Tensor out = place(first_row);
    multiply_rows(out, hidden_block(first_row), transposed(tile_), false);
    return out;
  }

  // out = a b, or out += a b, for a block's rows `a`.
  void multiply_rows(Tensor& out, const Tensor& a, const Tensor& b, bool add) const {
    if (batch_invariant_ && out.size(1) < kNarrowColumns) {
      multiply_in_order(out, a, b, add);
    } else if (add) {
      multiply_add(out, a, b);
    } else {
      multiply(out, a, b);
    }
  }

  // Null without a bias; the loaded classes'.
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data() + first_class_; }

  const Tensor& tile() const { return tile_; }
  int64_t first_class() const { return first_class_; }

 private:
  bool is_float() const { return weight_.scalar_type() == ScalarType::Float; }

  int64_t block_, most_classes_, rows_;
  bool batch_invariant_, holds_blocks_;
  Tensor hidden_, weight_;
  Workspace logits_, upcast_;
  Tensor tile_;
  int64_t first_class_ = 0;
  std::vector<float> bias_;
};

}  // namespace fusedrl
