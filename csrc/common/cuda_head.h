// The linear head of a language model on CUDA: tiles of its matrix products in float32, and its
// gradients from blocks of the products' gradients.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/cuda.h"
#include "common/cuda_gemm.h"
#include "common/head_kernels.h"
#include "common/head_tiles.h"
#include "common/rows.h"

namespace fusedrl {

inline Tensor rows_of(const Tensor& matrix, int64_t first, int64_t count) {
  Tensor copy = matrix;
  return torch::stable::narrow(copy, 0, first, count);
}

inline Tensor columns_of(const Tensor& matrix, int64_t count) {
  Tensor copy = matrix;
  return torch::stable::narrow(copy, 1, 0, count);
}

inline Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

inline Tensor new_matrix(const Tensor& like, int64_t rows, int64_t columns, ScalarType dtype) {
  return torch::stable::new_empty(like, std::vector<int64_t>{rows, columns}, dtype);
}

inline Tensor new_zeros(const Tensor& like, std::vector<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_zeros(like, sizes, dtype);
}

// The rows of a batch that are multiplied, and their tiles. If a mask drops rows, or a shift drops
// the first tokens of packed sequences, the host waits for the number of kept rows, unless `known`
// is the stored() of the same batch.
class HeadRows {
 public:
  HeadRows(const OnDeviceOf& device, const Tensor& hidden, const std::optional<Tensor>& mask,
           const std::optional<Tensor>& offsets, bool shift, const Tensor& temperature,
           int64_t classes, HeadTiles::Options options,
           const std::optional<Tensor>& known = std::nullopt)
      : rows{data<bool>(mask), row_map(hidden, offsets, shift), classes,
             scalar_argument("temperature", temperature, hidden)},
        index_(known.value_or(empty_vector(hidden, ScalarType::Long))) {
    const int64_t tokens = rows.map.tokens;
    kept = {rows.map, nullptr, tokens};
    if ((mask.has_value() || shift) && tokens > 0) {
      if (index_.numel() == 0) {
        index_ = mask.has_value() || offsets.has_value() ? flagged(device) : shifted(device);
      }
      kept = {rows.map, data<int64_t>(index_), index_.numel()};
    }
    tiles = HeadTiles(kept.count, classes, options);
  }

  // The indices of the kept tokens, as `known` for the backward pass; empty if storing is disabled
  // or all tokens are kept.
  Tensor stored(int64_t most_bytes) const {
    return most_bytes > 0 ? index_ : empty_vector(index_, ScalarType::Long);
  }

  KeptRows rows;
  Selection kept;
  HeadTiles tiles;

 private:
  Tensor flagged(const OnDeviceOf& device) const {
    const int64_t tokens = rows.map.tokens;
    const Tensor flags =
        torch::stable::new_empty(index_, std::vector<int64_t>{tokens}, ScalarType::Bool);
    device.launch(flag_rows, element_blocks(tokens), kElementThreads, rows,
                  mutable_data<bool>(flags));
    return torch::stable::contiguous(indices_of(flags));
  }

  Tensor shifted(const OnDeviceOf& device) const {
    const int64_t count = rows.map.tokens - rows.map.tokens / rows.map.period;
    Tensor index = torch::stable::new_empty(index_, std::vector<int64_t>{count});
    if (count > 0) {
      device.launch(list_shifted, element_blocks(count), kElementThreads, rows.map.period, count,
                    mutable_data<int64_t>(index));
    }
    return index;
  }

  Tensor index_;
};

// A head over the selected rows of a batch of hidden states. `map` has the strides of these, if
// they differ from those of the batch. `stored` has the logits, if they were stored.
template <typename T>
class CudaHead {
 public:
  CudaHead(const OnDeviceOf& device, const HeadRows& rows, const Tensor& hidden,
           const Tensor& weight, const std::optional<Tensor>& bias, double scale, double softcap,
           std::optional<RowMap> map = std::nullopt, int64_t vocab_offset = 0,
           const std::optional<Tensor>& stored = std::nullopt)
      : rows_(rows),
        hidden_(gathered(device, rows, map.value_or(rows.kept.map), hidden)),
        weight_(weight),
        holds_all_(stored.has_value() && stored->numel() > 0),
        products_(holds_all_ ? torch::stable::view(*stored,
                                                   {rows.tiles.tile.rows, rows.tiles.tile.classes})
                             : new_matrix(hidden, std::min(rows.tiles.tile.rows, rows.tiles.padded),
                                          rows.tiles.tile.classes, ScalarType::Float)),
        vocab_offset_(vocab_offset),
        shape_{data<T>(bias), static_cast<float>(scale), static_cast<float>(softcap)} {}

  Tensor hidden_rows(int64_t first, int64_t count) const { return rows_of(hidden_, first, count); }

  Tensor weight_rows(int64_t first, int64_t count) const { return rows_of(weight_, first, count); }

  float* products() const { return mutable_data<float>(products_); }

  // Whether the workspace holds all products, as there is only one tile.
  bool holds_all() const { return holds_all_; }

  // The products of some rows and classes, in a workspace that the next call overwrites unless it
  // holds all products.
  Tile<T> tile(int64_t first_class, int64_t first_row) {
    const int64_t rows = std::min(rows_.tiles.tile.rows, rows_.tiles.padded - first_row);
    const int64_t classes = std::min(rows_.tiles.tile.classes, rows_.rows.classes - first_class);
    if (!holds_all_) {
      multiply(columns_of(rows_of(products_, 0, rows), classes), hidden_rows(first_row, rows),
               transposed(weight_rows(first_class, classes)));
    }
    holds_all_ = rows == rows_.tiles.padded && classes == rows_.rows.classes;
    LogitShape<T> shape = shape_;
    if (shape.bias != nullptr) shape.bias += first_class;
    return {data<float>(products_),
            rows_.tiles.tile.classes,
            std::min(rows_.tiles.tile.rows, rows_.kept.count - first_row),
            first_row,
            classes,
            vocab_offset_ + first_class,
            shape};
  }

  // The logits, as `stored` for the backward pass; empty above `most_bytes`, or if they are more
  // than one tile, as with tiles of a fixed size.
  Tensor stored(int64_t most_bytes) const {
    const bool few = products_.numel() * int64_t(sizeof(float)) <= most_bytes;
    return holds_all_ && few && !rows_.tiles.batch_invariant
               ? torch::stable::view(products_, {products_.numel()})
               : empty_vector(products_, ScalarType::Float);
  }

 private:
  static Tensor gathered(const OnDeviceOf& device, const HeadRows& rows, const RowMap& map,
                         const Tensor& hidden) {
    const int64_t width = hidden.size(hidden.dim() - 1);
    // Not decided by the address of the index, which is null for an empty index too.
    const bool as_they_are = rows.kept.count == map.tokens && rows.tiles.padded == map.tokens;
    if (as_they_are && hidden.is_contiguous()) {
      return torch::stable::view(hidden, {rows.kept.count, width});
    }
    Tensor out = new_zeros(hidden, {rows.tiles.padded, width}, hidden.scalar_type());
    if (rows.kept.count > 0) {
      const Selection kept{map, rows.kept.tokens, rows.kept.count};
      device.launch(gather_rows<T>, kept.count, kElementThreads, kept, data<T>(hidden), width,
                    mutable_data<T>(out));
    }
    return out;
  }

  const HeadRows& rows_;
  Tensor hidden_, weight_;
  bool holds_all_;
  Tensor products_;
  int64_t vocab_offset_;
  LogitShape<T> shape_;
};

// A head's gradients, with one matrix product per block of tiles, as fewer sums over blocks are
// faster. Sums are float32.
template <typename T>
class CudaHeadGradient {
 public:
  CudaHeadGradient(const OnDeviceOf& device, const HeadRows& rows, const CudaHead<T>& head,
                   const Tensor& hidden, const Tensor& weight, bool of_hidden, bool of_weight,
                   bool of_bias)
      : device_(device),
        rows_(rows),
        head_(head),
        like_(hidden),
        width_(weight.size(1)),
        grads_(new_matrix(hidden, rows.tiles.block.rows, rows.tiles.block.classes,
                          hidden.scalar_type())) {
    const ScalarType dtype = weight.scalar_type();
    if (of_hidden) hidden_ = sums({rows.tiles.padded, width_}, ScalarType::Float);
    if (of_weight) weight_ = sums({weight.size(0), width_}, dtype);
    if (of_bias) bias_ = sums({1, weight.size(0)}, ScalarType::Float);
    // With a single block, products are rounded directly into the result.
    if (of_weight && rows.kept.count > rows.tiles.block.rows && dtype != ScalarType::Float) {
      weight_sum_ = new_matrix(weight, rows.tiles.block.classes, width_, ScalarType::Float);
    }
  }

  // The destination of the gradients of a tile's products.
  GradTile<T> grads(int64_t first_class, int64_t first_row) const {
    const int64_t start = first_row % rows_.tiles.block.rows * rows_.tiles.block.classes;
    return {mutable_data<T>(grads_) + start + first_class % rows_.tiles.block.classes,
            rows_.tiles.block.classes};
  }

  // The sums of the gradients of the selected hidden states so far, [rows, width].
  float* hidden_sums() const { return mutable_data<float>(*hidden_); }

  // Adds a block whose gradients are written.
  void add(int64_t first_class, int64_t first_row) {
    const int64_t classes = std::min(rows_.tiles.block.classes, rows_.rows.classes - first_class);
    const int64_t kept = std::min(rows_.tiles.block.rows, rows_.kept.count - first_row);
    const int64_t padded = std::min(rows_.tiles.block.rows, rows_.tiles.padded - first_row);
    if (padded > kept) {
      Tensor padding = rows_of(grads_, kept, padded - kept);
      torch::stable::zero_(padding);
    }
    const Tensor grads = columns_of(rows_of(grads_, 0, padded), classes);
    const bool first_rows = first_row == 0;
    if (hidden_.has_value()) {
      const int64_t step = rows_.tiles.batch_invariant ? rows_.tiles.tile.rows : padded;
      for (int64_t row = 0; row < padded; row += step) {
        add_product(rows_of(*hidden_, first_row + row, step), rows_of(grads, row, step),
                    head_.weight_rows(first_class, classes), first_class == 0);
      }
    }
    if (weight_.has_value()) {
      const Tensor part = rows_of(*weight_, first_class, classes);
      const Tensor sum = weight_sum_.has_value() ? rows_of(*weight_sum_, 0, classes) : part;
      add_product(sum, transposed(grads), head_.hidden_rows(first_row, padded), first_rows);
      if (weight_sum_.has_value() && first_row + kept == rows_.kept.count) copy(part, sum);
    }
    if (bias_.has_value()) {
      Tensor ones = new_matrix(like_, 1, padded, like_.scalar_type());
      torch::stable::fill_(ones, 1.0);
      add_product(torch::stable::narrow(*bias_, 1, first_class, classes), ones, grads, first_rows);
    }
  }

  // The gradients of hidden states (in their dtype or float32), weight and bias; empty if not
  // requested.
  std::tuple<Tensor, Tensor, Tensor> result(bool hidden_in_float = false) const {
    // Separate tensors, as outputs of an op must not share memory.
    Tensor hidden = none(), weight = none(), bias = none();
    if (hidden_.has_value()) hidden = hidden_in_float ? scattered<float>() : scattered<T>();
    if (weight_.has_value()) weight = *weight_;
    if (bias_.has_value()) {
      const Tensor sum = torch::stable::view(*bias_, {bias_->numel()});
      bias = torch::stable::to(sum, like_.scalar_type());
    }
    return {hidden, weight, bias};
  }

 private:
  Tensor none() const { return empty_vector(like_, like_.scalar_type()); }

  // The sums of the hidden states' gradients, each in its row of the batch.
  template <typename Out>
  Tensor scattered() const {
    const bool in_float = std::is_same_v<Out, float>;
    Tensor out = torch::stable::new_zeros(like_, like_.sizes(),
                                          in_float ? ScalarType::Float : like_.scalar_type());
    Selection dense = rows_.kept;
    dense.map.stride_row = width_;
    dense.map.stride_sequence = dense.map.period * width_;
    if (dense.count > 0) {
      device_.launch(scatter_rows<Out>, dense.count, kElementThreads, dense, data<float>(*hidden_),
                     width_, mutable_data<Out>(out));
    }
    return out;
  }

  // The sums that every block adds to; zeros without any block.
  Tensor sums(std::vector<int64_t> sizes, ScalarType dtype) const {
    return rows_.kept.count > 0 ? torch::stable::new_empty(like_, sizes, dtype)
                                : new_zeros(like_, sizes, dtype);
  }

  static void copy(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }

  // sums += a b, or sums = a b for the first block; rounded if they are half precision.
  void add_product(const Tensor& sums, const Tensor& a, const Tensor& b, bool starts) const {
    if (starts && sums.scalar_type() == ScalarType::Float) return multiply(sums, a, b);
    const int64_t most = std::max<int64_t>(kTermElements / sums.size(1), 1);
    for (int64_t first = 0; first < sums.size(0); first += most) {
      const int64_t count = std::min(most, sums.size(0) - first);
      const Tensor part = rows_of(sums, first, count);
      const Tensor term = new_matrix(like_, count, sums.size(1), ScalarType::Float);
      multiply(term, rows_of(a, first, count), b);
      if (starts) {
        copy(part, term);
      } else {
        device_.launch(add_elements, element_blocks(term.numel() / kPacksInFlight + 1),
                       kElementThreads, mutable_data<float>(part), data<float>(term), term.numel());
      }
    }
  }

  const OnDeviceOf& device_;
  const HeadRows& rows_;
  const CudaHead<T>& head_;
  Tensor like_;
  int64_t width_;
  Tensor grads_;
  std::optional<Tensor> hidden_, weight_, bias_, weight_sum_;
};

}  // namespace fusedrl
