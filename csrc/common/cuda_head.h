// The linear head of a language model on CUDA: tiles of its matrix products in float32, and its
// gradients from tiles of the products' gradients.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/cuda.h"
#include "common/cuda_gemm.h"
#include "common/head_kernels.h"
#include "common/rows.h"
#include "common/tile_sizes.h"

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

// The rows of a batch that are multiplied, and how many rows and classes a tile has: all classes of
// a few rows if whole rows are wanted. If a mask or a shift drops rows, the host waits for the
// device to tell how many are left.
class HeadRows {
 public:
  HeadRows(const OnDeviceOf& device, const Tensor& hidden, const std::optional<Tensor>& mask,
           const std::optional<Tensor>& offsets, bool shift, const Tensor& temperature,
           int64_t classes, bool batch_invariant, bool whole_rows = false)
      : rows{data<bool>(mask), row_map(hidden, offsets, shift), classes,
             scalar_argument("temperature", temperature, hidden)} {
    const int64_t tokens = rows.map.tokens;
    kept = {rows.map, nullptr, tokens};
    if ((mask.has_value() || shift) && tokens > 0) {
      const Tensor flags =
          torch::stable::new_empty(hidden, std::vector<int64_t>{tokens}, ScalarType::Bool);
      device.launch(flag_rows, element_blocks(tokens), kElementThreads, rows,
                    mutable_data<bool>(flags));
      index_ = torch::stable::contiguous(indices_of(flags));
      kept = {rows.map, data<int64_t>(index_), index_->numel()};
    }
    const int64_t all = (classes + kColumnStep - 1) / kColumnStep * kColumnStep;
    const int64_t most = whole_rows ? std::min(kMostRows, kTileElements / all) : kMostRows;
    block = batch_invariant ? kInvariantRows : std::max<int64_t>(1, std::min(kept.count, most));
    padded = batch_invariant ? (kept.count + block - 1) / block * block : kept.count;
    tile = whole_rows ? all
                      : std::min(all, std::max(kTileElements / block / kColumnStep * kColumnStep,
                                               kColumnStep));
  }

  KeptRows rows;
  Selection kept;
  int64_t block;   // rows of a tile
  int64_t padded;  // rows, with the zeros that fill the last block if blocks have a fixed size
  int64_t tile;    // classes of a tile

 private:
  std::optional<Tensor> index_;
};

// A head over the selected rows of a batch of hidden states. `map` has their strides, if these are
// not those of the batch that the rows were selected from.
template <typename T>
class CudaHead {
 public:
  CudaHead(const OnDeviceOf& device, const HeadRows& rows, const Tensor& hidden,
           const Tensor& weight, const std::optional<Tensor>& bias, double scale, double softcap,
           std::optional<RowMap> map = std::nullopt, int64_t vocab_offset = 0)
      : rows_(rows),
        hidden_(gathered(device, rows, map.value_or(rows.kept.map), hidden)),
        weight_(weight),
        products_(
            new_matrix(hidden, std::min(rows.block, rows.padded), rows.tile, ScalarType::Float)),
        vocab_offset_(vocab_offset),
        shape_{data<T>(bias), static_cast<float>(scale), static_cast<float>(softcap)} {}

  Tensor hidden_block(int64_t first) const {
    return rows_of(hidden_, first, std::min(rows_.block, rows_.padded - first));
  }

  Tensor weight_tile(int64_t first) const {
    return rows_of(weight_, first, std::min(rows_.tile, weight_.size(0) - first));
  }

  float* products() const { return mutable_data<float>(products_); }

  // The products of a block of rows and a tile of classes, in a workspace that the next call
  // overwrites.
  Tile<T> tile(int64_t first_class, int64_t first_row) const {
    const Tensor hidden = hidden_block(first_row), weights = weight_tile(first_class);
    const int64_t classes = weights.size(0);
    multiply(columns_of(rows_of(products_, 0, hidden.size(0)), classes), hidden,
             transposed(weights));
    LogitShape<T> shape = shape_;
    if (shape.bias != nullptr) shape.bias += first_class;
    return {data<float>(products_),
            rows_.tile,
            std::min(rows_.block, rows_.kept.count - first_row),
            first_row,
            classes,
            vocab_offset_ + first_class,
            shape};
  }

 private:
  static Tensor gathered(const OnDeviceOf& device, const HeadRows& rows, const RowMap& map,
                         const Tensor& hidden) {
    const int64_t width = hidden.size(hidden.dim() - 1);
    // Not decided by the index's address, as an index without elements has none either.
    const bool as_they_are = rows.kept.count == map.tokens && rows.padded == map.tokens;
    if (as_they_are && hidden.is_contiguous()) {
      return torch::stable::view(hidden, {rows.kept.count, width});
    }
    Tensor out = new_zeros(hidden, {rows.padded, width}, hidden.scalar_type());
    if (rows.kept.count > 0) {
      const Selection kept{map, rows.kept.tokens, rows.kept.count};
      device.launch(gather_rows<T>, kept.count, kElementThreads, kept, data<T>(hidden), width,
                    mutable_data<T>(out));
    }
    return out;
  }

  const HeadRows& rows_;
  Tensor hidden_, weight_, products_;
  int64_t vocab_offset_;
  LogitShape<T> shape_;
};

// Calls f(first_class, first_row) for every block of rows of every tile of classes, and
// after(first_class) after the last block of each.
template <typename F, typename G>
void for_each_tile(const HeadRows& rows, F&& f, G&& after) {
  if (rows.kept.count == 0) return;
  for (int64_t first_class = 0; first_class < rows.rows.classes; first_class += rows.tile) {
    for (int64_t row = 0; row < rows.kept.count; row += rows.block) f(first_class, row);
    after(first_class);
  }
}

// Sums a head's gradients in float32 over tiles and blocks.
template <typename T>
class CudaHeadGradient {
 public:
  CudaHeadGradient(const OnDeviceOf& device, const HeadRows& rows, const CudaHead<T>& head,
                   const Tensor& hidden, const Tensor& weight, bool of_hidden, bool of_weight,
                   bool of_bias, bool weight_in_float = false)
      : device_(device),
        rows_(rows),
        head_(head),
        like_(hidden),
        width_(weight.size(1)),
        grads_(new_matrix(hidden, std::min(rows.block, rows.padded), rows.tile,
                          hidden.scalar_type())) {
    if (of_hidden) hidden_ = new_zeros(hidden, {rows.padded, width_}, ScalarType::Float);
    const ScalarType dtype = weight_in_float ? ScalarType::Float : weight.scalar_type();
    if (of_weight) weight_ = new_zeros(weight, {weight.size(0), width_}, dtype);
    if (of_bias) bias_ = new_zeros(weight, {weight.size(0)}, ScalarType::Float);
    // The products of one block are rounded to their place.
    if (of_weight && rows.kept.count > rows.block && !weight_in_float) {
      weight_sum_ = new_matrix(weight, rows.tile, width_, ScalarType::Float);
    }
  }

  // The place where kernels write the gradients of a tile's products, with the tile's strides.
  T* grads() const { return mutable_data<T>(grads_); }

  void add(const Tile<T>& tile, int64_t first_class) {
    const Tensor block = head_.hidden_block(tile.first_row);
    if (block.size(0) > tile.rows) {  // rows that only fill the block
      Tensor padding = rows_of(grads_, tile.rows, block.size(0) - tile.rows);
      torch::stable::zero_(padding);
    }
    const Tensor grads = columns_of(rows_of(grads_, 0, block.size(0)), tile.classes);
    if (hidden_.has_value()) {
      const Tensor term = new_matrix(like_, block.size(0), width_, ScalarType::Float);
      multiply(term, grads, head_.weight_tile(first_class));
      add_to(rows_of(*hidden_, tile.first_row, block.size(0)), term);
    }
    if (weight_.has_value()) add_weight(tile, first_class, transposed(grads), block);
    if (bias_.has_value()) {
      device_.launch(add_columns<T>, element_blocks(tile.classes), kElementThreads,
                     mutable_data<float>(*bias_) + first_class, data<T>(grads_), tile.rows,
                     tile.stride_row, tile.classes);
    }
  }

  void finish_classes(int64_t first) {
    if (!weight_sum_.has_value()) return;
    const int64_t classes = head_.weight_tile(first).size(0);
    Tensor out = rows_of(*weight_, first, classes);
    torch::stable::copy_(out, rows_of(*weight_sum_, 0, classes));
  }

  // The gradients of hidden states and bias (in their dtype or float32) and of the weight; those
  // that are not wanted are empty.
  std::tuple<Tensor, Tensor, Tensor> result(bool hidden_in_float = false,
                                            bool bias_in_float = false) const {
    // Separate tensors, as outputs of an op must not share storage.
    Tensor hidden = none(), weight = none(), bias = none();
    if (hidden_.has_value()) hidden = hidden_in_float ? scattered<float>() : scattered<T>();
    if (weight_.has_value()) weight = *weight_;
    if (bias_.has_value()) {
      bias = bias_in_float ? *bias_ : torch::stable::to(*bias_, like_.scalar_type());
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

  void add_to(const Tensor& sums, const Tensor& terms) {
    device_.launch(add_elements, element_blocks(terms.numel()), kElementThreads,
                   mutable_data<float>(sums), data<float>(terms), terms.numel());
  }

  void add_weight(const Tile<T>& tile, int64_t first_class, const Tensor& grads,
                  const Tensor& block) {
    const Tensor sum = weight_sum_.has_value() ? rows_of(*weight_sum_, 0, tile.classes)
                                               : rows_of(*weight_, first_class, tile.classes);
    const bool starts = tile.first_row == 0;
    if (starts && sum.scalar_type() == ScalarType::Float) {
      multiply(sum, grads, block);
      return;
    }
    const int64_t most = std::max<int64_t>(kTileElements / width_, 1);
    for (int64_t first = 0; first < tile.classes; first += most) {
      const int64_t classes = std::min(most, tile.classes - first);
      const Tensor term = new_matrix(like_, classes, width_, ScalarType::Float);
      multiply(term, rows_of(grads, first, classes), block);
      Tensor part = rows_of(sum, first, classes);
      if (starts) {
        torch::stable::copy_(part, term);
      } else {
        add_to(part, term);
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
