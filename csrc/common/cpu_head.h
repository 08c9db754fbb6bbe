// The linear head of a language model on the CPU, in float32: each thread computes one tile of
// logits, of some rows and some classes, at a time.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <vector>

#include "common/bf16_products.h"
#include "common/cpu_memory.h"
#include "common/cpu_ops.h"
#include "common/cpu_rows.h"
#include "common/cpu_share.h"
#include "common/row_map.h"
#include "common/tensor.h"

namespace fusedrl {

// Tiles of this size fit into the caches of a thread, and are large enough for fast products.
constexpr int64_t kTileLogits = 1 << 17;
constexpr int64_t kTileClasses = 1024;
constexpr int64_t kTileStep = 256;
constexpr int64_t kBlockRows = 512;

// Rows of one GEMM in batch-invariant mode.
constexpr int64_t kInvariantRows = 64;
// Below this many columns, MKL's order of summation depends on the position of a row.
constexpr int64_t kNarrowColumns = 16;

// A non-owning view of a matrix; `column` elements between its columns.
template <typename T>
struct Strided {
  const T* data;
  int64_t rows, columns, row, column = 1;

  Tensor tensor(ScalarType dtype = ScalarType::Float) const {
    return torch::stable::from_blob(const_cast<T*>(data), {rows, columns}, {row, column},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    dtype);
  }
  Strided transposed() const { return {data, columns, rows, column, row}; }
};
using Floats = Strided<float>;

// out = a b, or out += a b, on the calling thread.
inline void multiply(FloatMatrix out, const Floats& a, const Floats& b, bool add) {
  Tensor to = Floats{out.data, a.rows, b.columns, out.row}.tensor();
  const Tensor x = a.tensor(), y = b.tensor();
  if (add) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu_addmm_out(to.get(), to.get(), x.get(), y.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(to.get(), x.get(), y.get()));
  }
}

// The same, with the same order of summation for every row.
inline void multiply_in_order(FloatMatrix out, const Floats& a, const Floats& b, bool add) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < b.columns; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < a.columns; ++k) {
        sum += a.data[r * a.row + k * a.column] * b.data[k * b.row + c * b.column];
      }
      float& to = out.data[r * out.row + c];
      to = add ? to + sum : sum;
    }
  }
}

inline Tensor new_floats(const Tensor& like, int64_t count) {
  return new_uninitialised(like, std::vector<int64_t>{count}, ScalarType::Float);
}

// Element offsets of the rows that these tokens read.
inline std::vector<int64_t> elements_of(const RowMap& map, const std::vector<int64_t>& tokens) {
  std::vector<int64_t> elements;
  elements.reserve(tokens.size());
  for (const int64_t n : tokens) elements.push_back(map.element_of_row(map.row_of(n)));
  return elements;
}

// The hidden states at `elements`, times `factor`, as `To` [rows, width], padded with zeros.
template <typename To>
Tensor gathered(const Tensor& hidden, const std::vector<int64_t>& elements, float factor,
                int64_t rows, int64_t width, ScalarType dtype) {
  const int64_t columns = hidden.size(hidden.dim() - 1), count = elements.size();
  Tensor out = new_uninitialised(hidden, std::vector<int64_t>{rows, width}, dtype);
  To* to = mutable_data<To>(out);
  dispatch_half_or_float(hidden, "hidden", [&]<typename T>() {
    const T* from = data<T>(hidden);
    torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t i = 0; i < width; ++i) {
          const bool inside = r < count && i < columns;
          to[r * width + i] =
              To(inside ? factor * static_cast<float>(from[elements[r] + i]) : 0.0f);
        }
      }
    });
  });
  return out;
}

// Logits of the kept rows: scale (h W^T + b), then cap tanh(logits / cap) if the softcap is not 0.
class CpuHead {
 public:
  CpuHead(const Tensor& hidden, const std::vector<int64_t>& elements, const Tensor& weight,
          const std::optional<Tensor>& bias, double scale, double softcap, bool batch_invariant)
      : batch_invariant_(batch_invariant),
        scale_(static_cast<float>(scale)),
        cap_(static_cast<float>(softcap)),
        width_(weight.size(1)),
        blocks_{{0, static_cast<int64_t>(elements.size())},
                block_rows(elements.size(), batch_invariant)},
        weight_(weight),
        products_(in_bf16(hidden, weight) ? bf16_products(cpu_level()) : nullptr),
        factor_(products_ == nullptr ? 1.0f : scale_),
        hidden_(products_ == nullptr
                    ? gathered<float>(hidden, elements, scale_, padded_rows(), width_,
                                      ScalarType::Float)
                    : gathered<BFloat16>(hidden, elements, 1.0f, padded_rows(),
                                         pair_words(width_) * 2, ScalarType::BFloat16)) {
    if (!bias.has_value()) return;
    bias_.resize(weight.size(0));
    dispatch_half_or_float(*bias, "bias", [&]<typename T>() {
      const T* from = data<T>(*bias);
      for (size_t v = 0; v < bias_.size(); ++v) bias_[v] = scale_ * static_cast<float>(from[v]);
    });
  }

  bool batch_invariant() const { return batch_invariant_; }
  int64_t rows() const { return blocks_.range.count; }
  int64_t classes() const { return weight_.size(0); }
  int64_t width() const { return width_; }

  // Rows of one product.
  const Spans& blocks() const { return blocks_; }
  Spans blocks(Span rows) const { return {rows, blocks_.length}; }

  // Classes of one product.
  Spans tiles(Span classes) const {
    const int64_t steps = std::min(kTileClasses, kTileLogits / blocks_.length) / kTileStep;
    return {classes, std::max<int64_t>(steps, 1) * kTileStep};
  }
  Spans tiles() const { return tiles({0, classes()}); }
  Segments segments() const { return {tiles()}; }

  // Buffers in which one thread converts weights.
  class Room {
   public:
    explicit Room(const CpuHead& head)
        : weights_(new_floats(head.weight_, head.converts() ? kTileClasses * head.width_ : 0)) {}

   private:
    friend class CpuHead;
    Tensor weights_;
    Span classes_{0, 0}, columns_{0, 0};  // converted so far
  };

  // The number of floats in the logits of a block and a tile.
  int64_t tile_floats() const { return padded(blocks_.length) * tiles().length; }

  // Computes the logits of a block of rows and a tile of classes into `out`. In batch-invariant
  // mode a block is padded with rows beyond the head's, for which `out` has room.
  void logits(Room& room, Span rows, Span classes, FloatMatrix out) const {
    const int64_t count = padded(rows.count);
    if (products_ != nullptr) {
      products_->multiply_transposed(out, hidden_pairs(rows.first), weights_in_bf16(classes.first),
                                     {count, classes.count, width_}, factor_, false);
    } else {
      multiply_rows(out, hidden_floats({rows.first, count}),
                    weights_in_float(room, classes, {0, width_}).transposed(), false);
    }
    if (bias_.empty() && cap_ == 0) return;
    const float* bias = bias_.empty() ? nullptr : bias_.data() + classes.first;
    for (int64_t r = 0; r < rows.count; ++r) {
      kernels_.shape(out.at(r, 0), bias, classes.count, cap_);
    }
  }

  // Converts gradients of capped logits to those of the products, in place.
  void chain(const float* capped, float* grads, int64_t count) const {
    if (cap_ > 0) kernels_.chain(capped, grads, count, cap_);
  }
  bool is_capped() const { return cap_ > 0; }
  float scale() const { return scale_; }

  // out = a b, or out += a b, batch-invariant in the rows of `a` if required.
  void multiply_rows(FloatMatrix out, const Floats& a, const Floats& b, bool add) const {
    if (batch_invariant_ && b.columns < kNarrowColumns) {
      multiply_in_order(out, a, b, add);
    } else {
      multiply(out, a, b, add);
    }
  }

  const Tensor& weight() const { return weight_; }

  // Null for float32 products.
  const Bf16Products* products() const { return products_; }
  float factor() const { return factor_; }  // of bfloat16 products; float32 rows include it

  Floats hidden_floats(Span rows) const {
    return {data<float>(hidden_) + rows.first * width_, rows.count, width_, width_};
  }
  Bf16Matrix hidden_in_bf16(int64_t first_row) const {
    return {data<BFloat16>(hidden_) + first_row * pair_words(width_) * 2, pair_words(width_) * 2};
  }
  Bf16Matrix weights_in_bf16(int64_t first_class) const {
    return {data<BFloat16>(weight_) + first_class * weight_.stride(0), weight_.stride(0)};
  }
  Floats weights_in_float(Room& room, Span classes, Span columns) const {
    const int64_t row = weight_.stride(0), column = weight_.stride(1);
    const int64_t first = classes.first * row + columns.first * column;
    if (!converts()) {
      return {data<float>(weight_) + first, classes.count, columns.count, row, column};
    }
    float* to = mutable_data<float>(room.weights_);
    const Floats converted{to, classes.count, columns.count, columns.count};
    if (room.classes_ != classes || room.columns_ != columns) {
      // Not a view of the weight, which may require gradients: grad mode is on in other threads.
      const auto* half = static_cast<const BFloat16*>(weight_.const_data_ptr()) + first;
      Tensor out = converted.tensor();
      torch::stable::copy_(
          out, Strided<BFloat16>{half, classes.count, columns.count, row, column}.tensor(
                   weight_.scalar_type()));
      room.classes_ = classes;
      room.columns_ = columns;
    }
    return converted;
  }

  // The number of rows after padding for batch-invariant products.
  int64_t padded(int64_t rows) const {
    return batch_invariant_ && products_ == nullptr
               ? (rows + kInvariantRows - 1) / kInvariantRows * kInvariantRows
               : rows;
  }

 private:
  static int64_t block_rows(int64_t rows, bool batch_invariant) {
    if (batch_invariant) return kInvariantRows;
    const int64_t blocks = std::max<int64_t>((rows + kBlockRows - 1) / kBlockRows, 1);
    return std::max<int64_t>((rows + blocks - 1) / blocks, 1);
  }
  static bool in_bf16(const Tensor& hidden, const Tensor& weight) {
    return hidden.scalar_type() == ScalarType::BFloat16 &&
           weight.scalar_type() == ScalarType::BFloat16 &&
           (weight.stride(1) == 1 || weight.size(1) == 1);
  }
  bool converts() const {
    return products_ == nullptr && weight_.scalar_type() != ScalarType::Float;
  }
  int64_t padded_rows() const { return padded(rows()); }
  Pairs hidden_pairs(int64_t first_row) const {
    return {static_cast<const uint32_t*>(hidden_.const_data_ptr()) + first_row * pair_words(width_),
            nullptr, pair_words(width_), 1};
  }

  bool batch_invariant_;
  float scale_, cap_;
  HeadKernels kernels_ = head_kernels(cpu_level());
  int64_t width_;
  Spans blocks_;
  Tensor weight_;
  const Bf16Products* products_;
  float factor_;
  Tensor hidden_;
  std::vector<float> bias_;
};

// Float32 logits of all rows and classes that a forward pass stores for its backward pass; empty if
// the backward pass recomputes them.
class StoredLogits {
 public:
  // Empty if the logits of all heads would exceed the limit, or in batch-invariant mode.
  StoredLogits(const CpuHead& head, int64_t most_bytes, int64_t heads = 1)
      : row_(row_floats(head)),
        logits_(
            new_floats(head.weight(), stores(head, most_bytes / heads) ? head.rows() * row_ : 0)) {
    float* rows = mutable_data<float>(logits_);
    for (int64_t i = 0; i < logits_.numel(); i += row_) {
      std::fill(rows + i + head.classes(), rows + i + row_, 0.0f);
    }
  }
  StoredLogits(const CpuHead& head, const Tensor& logits)
      : row_(row_floats(head)), logits_(logits) {}

  const Tensor& tensor() const { return logits_; }
  bool empty() const { return logits_.numel() == 0; }

  // The logits of a block of rows and a tile of classes, or `other` if none are stored.
  FloatMatrix of(Span block, Span tile, FloatMatrix other) const {
    if (empty()) return other;
    return {mutable_data<float>(logits_) + block.first * row_ + tile.first, row_};
  }

 private:
  // An odd number of cache lines, as for rows of pairs.
  static int64_t row_floats(const CpuHead& head) { return pair_words(2 * head.classes()); }
  static bool stores(const CpuHead& head, int64_t most_bytes) {
    const int64_t bytes = head.rows() * row_floats(head) * int64_t(sizeof(float));
    return !head.batch_invariant() && bytes <= most_bytes;
  }

  int64_t row_;
  Tensor logits_;
};

// A row's logits in a tile; if `kept`, they survive when its gradients are written.
class LogitsOfTile {
 public:
  LogitsOfTile(const float* x, const float* grads, int64_t count, bool kept) : data_(x) {
    if (!kept || x != grads) return;
    std::copy_n(x, count, copy_);
    data_ = copy_;
  }
  LogitsOfTile(const LogitsOfTile&) = delete;
  LogitsOfTile& operator=(const LogitsOfTile&) = delete;

  const float* data() const { return data_; }

 private:
  float copy_[kTileClasses];
  const float* data_;
};

}  // namespace fusedrl
