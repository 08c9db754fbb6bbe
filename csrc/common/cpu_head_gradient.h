// Gradients of a linear head from those of its logits, which come in parts of some rows and
// classes. All sums are float32 and rounded to the gradient's dtype once.
#pragma once

#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "common/cpu_head.h"

namespace fusedrl {

// The part of rows and classes whose logits' gradients exist at a time: 4 MiB, so that threads
// rarely wait for each other, or enough tiles for eight threads.
struct GradientParts {
  explicit GradientParts(const CpuHead& head)
      : rows{{0, head.rows()}, head.batch_invariant() ? kInvariantRows : kMostRows},
        classes{{0, head.classes()}, 0} {
    const int64_t most_rows = rows_at_most(head);
    const int64_t step = head.tiles().length;
    // Limits the unrounded sums that wait for more rows.
    const int64_t most_sums = head.batch_invariant() || rows.count() > 1 ? kMost : INT64_MAX;
    const int64_t most = std::min(kMost / most_rows, most_sums / head.width());
    classes.length = std::max<int64_t>(most / step, 8) * step;
  }

  // The size of the largest part, for any head with as many rows and classes.
  int64_t floats(const CpuHead& head) const {
    return head.padded(rows_at_most(head)) * std::min(classes.length, head.classes());
  }

  // Calls f(rows, classes), with the rows as the inner loop.
  template <typename F>
  void for_each(F&& f) const {
    for (int64_t c = 0; c < classes.count(); ++c) {
      for (int64_t r = 0; r < rows.count(); ++r) f(rows[r], classes[c]);
    }
  }

  static constexpr int64_t kMostRows = 1024, kMost = int64_t(1) << 20;
  Spans rows, classes;

 private:
  int64_t rows_at_most(const CpuHead& head) const {
    return std::min(rows.length, std::max<int64_t>(head.rows(), 1));
  }
};

class CpuHeadGradient {
 public:
  // For bfloat16 products, `rounds` allows rounding the gradients of logits to bfloat16.
  CpuHeadGradient(const CpuHead& head, const Tensor& hidden, const Tensor& weight,
                  const std::optional<Tensor>& bias, bool of_hidden, bool of_weight, bool of_bias,
                  bool rounds)
      : head_(head), rounds_(rounds), hidden_like_(hidden) {
    if (of_hidden) {
      hidden_ = torch::stable::new_zeros(hidden, {head.padded(head.rows()), head.width()},
                                         ScalarType::Float);
      if (head.products() != nullptr) find_norms();
    }
    if (of_weight) {
      const ScalarType dtype = weight.scalar_type();
      // The first rows overwrite it.
      weight_ = head.rows() > 0 ? new_uninitialised(weight, weight.sizes(), dtype)
                                : torch::stable::new_zeros(weight, weight.sizes(), dtype);
    }
    if (of_bias) bias_sums_.resize(bias->numel());
  }

  // Announces the gradient of one logit of this row before it is added, as smaller ones can then be
  // rounded more. The weights of a class in another shard are assumed to have the mean norm.
  void expect(int64_t row, int64_t of_class, float grad) {
    if (scales_.empty()) return;
    const bool here = of_class >= 0 && of_class < head_.classes();
    const float term = std::fabs(grad) * (here ? norms_[of_class] : mean_norm_);
    scales_[row].largest = std::fmax(scales_[row].largest, term);
  }

  // Scales the hidden state's gradient of a row so far, and the announced gradient.
  void rescale(int64_t row, float factor) {
    float* sums = mutable_data<float>(*hidden_) + row * head_.width();
    for (int64_t i = 0; i < head_.width(); ++i) sums[i] *= factor;
    if (!scales_.empty()) scales_[row].largest *= factor;
  }

  // Adds the contribution of `grads`, the gradients of the logits of these rows and classes. All
  // rows of a class have to come, in order, before the next classes.
  void add(Span rows, Span classes, FloatMatrix grads) {
    const Spans blocks = head_.blocks(rows), tiles = head_.tiles(classes);
    const Spans columns = columns_of(blocks.count());
    const int64_t of_hidden = hidden_.has_value() ? blocks.count() * columns.count() : 0;
    const int64_t of_classes = weight_.has_value() || !bias_sums_.empty() ? tiles.count() : 0;
    if (waits_for_more_rows(rows) && rows.first == 0) {
      sums_.emplace(new_floats(hidden_like_, classes.count * head_.width()));
    }
    if (!scales_.empty()) find_limits(rows, classes, grads);
    const auto make_room = [&] { return Room(*this); };
    share(of_hidden + of_classes, make_room, [&](Room& room, int64_t i) {
      if (i < of_hidden) {
        const Span block = blocks[i / columns.count()];
        const FloatMatrix of_block{grads.at(block.first - rows.first, 0), grads.row};
        const Span of_columns = columns[i % columns.count()];
        if (head_.products() != nullptr) {
          add_hidden_in_bf16(room, block, block.first - rows.first, classes, of_columns, of_block);
        } else {
          add_hidden(room, block, classes, of_columns, of_block);
        }
      } else {
        const Span tile = tiles[i - of_hidden];
        const FloatMatrix part{grads.data + tile.first - classes.first, grads.row};
        if (weight_.has_value()) add_weight(room, rows, tile, tile.first - classes.first, part);
        if (!bias_sums_.empty()) add_bias(rows, tile, part);
      }
    });
  }

  // The gradient of the hidden states, in their dtype unless another is requested; empty if not
  // requested.
  Tensor hidden(const RowMap& map, const std::vector<int64_t>& tokens,
                std::optional<ScalarType> dtype = std::nullopt) const {
    if (!hidden_.has_value()) return empty_vector(hidden_like_, hidden_like_.scalar_type());
    const int64_t width = hidden_->size(1), count = tokens.size();
    Tensor out = torch::stable::new_zeros(hidden_like_, hidden_like_.sizes(),
                                          dtype.value_or(hidden_like_.scalar_type()));
    const float* from = data<float>(*hidden_);
    dispatch_half_or_float(out, "hidden", [&]<typename T>() {
      T* to = mutable_data<T>(out);
      torch::stable::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          T* row = to + map.row_of(tokens[r]) * width;
          for (int64_t i = 0; i < width; ++i) row[i] = T(head_.scale() * from[r * width + i]);
        }
      });
    });
    return out;
  }

  Tensor weight() const {
    return weight_.has_value() ? *weight_ : empty_vector(hidden_like_, hidden_like_.scalar_type());
  }

  // In the dtype of the hidden states.
  Tensor bias() const {
    const ScalarType type = hidden_like_.scalar_type();
    if (bias_sums_.empty()) return empty_vector(hidden_like_, hidden_like_.scalar_type());
    const Tensor out = torch::stable::new_empty(
        hidden_like_, std::vector<int64_t>{static_cast<int64_t>(bias_sums_.size())}, type);
    dispatch_half_or_float(out, "bias", [&]<typename T>() {
      T* to = mutable_data<T>(out);
      for (size_t v = 0; v < bias_sums_.size(); ++v) to[v] = T(head_.scale() * bias_sums_[v]);
    });
    return out;
  }

 private:
  static constexpr int64_t kColumns = 256;  // of the hidden states' gradient, to fit into the cache

  // Columns of the hidden states' gradient per thread and block of rows. Results do not depend on
  // it, but the gradients of logits are rounded again for each part.
  Spans columns_of(int64_t blocks) const {
    const Span all{0, head_.width()};
    if (head_.products() == nullptr) return {all, kColumns};
    const int64_t spans = Spans{all, kColumns}.count();
    const int64_t shares = (int64_t(torch::stable::get_num_threads()) + blocks - 1) / blocks;
    return {all, (spans + shares - 1) / shares * kColumns};
  }

  bool sums_in_half() const {
    return weight_.has_value() && weight_->scalar_type() != ScalarType::Float;
  }
  bool waits_for_more_rows(Span rows) const { return sums_in_half() && rows.count < head_.rows(); }

  // The buffers of one thread.
  struct Room {
    explicit Room(const CpuHeadGradient& gradient)
        : of_head(gradient.head_),
          high(pairs_of(gradient)),
          rest(pairs_of(gradient)),
          of_rests(gradient.scales_.empty()
                       ? nullptr
                       : std::make_unique_for_overwrite<float[]>(kBlockRows * kColumns)),
          sums(new_floats(gradient.hidden_like_,
                          gradient.sums_in_half()
                              ? gradient.head_.tiles().length * gradient.head_.width()
                              : 0)) {}

    static std::unique_ptr<uint32_t[]> pairs_of(const CpuHeadGradient& gradient) {
      if (gradient.head_.products() == nullptr) return nullptr;
      return std::make_unique_for_overwrite<uint32_t[]>(kBlockRows * pair_words(kTileClasses));
    }

    CpuHead::Room of_head;
    std::unique_ptr<uint32_t[]> high, rest;  // of gradients, in bfloat16
    std::unique_ptr<float[]> of_rests;       // contribution of the residuals of split rows
    std::vector<int64_t> split;              // rows of a block
    Tensor sums;
  };

  void find_norms() {
    scales_.resize(head_.rows());
    norms_.resize(head_.classes());
    torch::stable::parallel_for(0, head_.classes(), 256, [&](int64_t begin, int64_t end) {
      head_.products()->norms_of_rows(norms_.data() + begin, head_.weights_in_bf16(begin),
                                      end - begin, head_.width());
    });
    mean_norm_ = std::accumulate(norms_.begin(), norms_.end(), 0.0) / norms_.size();
  }

  // Computes the limits of all residuals, row by row, with the tiles in order.
  void find_limits(Span rows, Span classes, FloatMatrix grads) {
    const Spans tiles{classes, kTileClasses};
    limits_.resize(tiles.count() * rows.count);
    torch::stable::parallel_for(0, rows.count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t i = 0; i < tiles.count(); ++i) {
          const Span tile = tiles[i];
          limits_[i * rows.count + r] = head_.products()->limit_of_rests(
              grads.at(r, tile.first - classes.first), norms_.data() + tile.first, tile.count,
              rounds_, scales_[rows.first + r]);
        }
      }
    });
  }

  FloatMatrix of_hidden(Span block, Span columns) const {
    return {mutable_data<float>(*hidden_) + block.first * head_.width() + columns.first,
            head_.width()};
  }

  // `grads` are those of a block of rows.
  void add_hidden(Room& room, Span block, Span classes, Span columns, FloatMatrix grads) const {
    const Spans tiles{classes, kTileClasses};
    for (int64_t i = 0; i < tiles.count(); ++i) {
      const Span tile = tiles[i];
      head_.multiply_rows(of_hidden(block, columns),
                          Floats{grads.at(0, tile.first - classes.first), head_.padded(block.count),
                                 tile.count, grads.row},
                          head_.weights_in_float(room.of_head, tile, columns), true);
    }
  }

  // The same with rounded gradients. The residuals of large entries are added individually or, if a
  // row and tile has many of them, by a product over all such rows.
  void add_hidden_in_bf16(Room& room, Span block, int64_t first_row, Span classes, Span columns,
                          FloatMatrix grads) const {
    const Bf16Products& products = *head_.products();
    const FloatMatrix out = of_hidden(block, columns);
    const Spans tiles{classes, kTileClasses};
    const int64_t part_rows = static_cast<int64_t>(limits_.size()) / tiles.count();
    Rest rests[kMostRests + 1];
    for (int64_t i = 0; i < tiles.count(); ++i) {
      const Span tile = tiles[i];
      const int64_t words = pair_words(tile.count);
      const float* limits = limits_.data() + i * part_rows + first_row;
      Bf16Matrix weights = head_.weights_in_bf16(tile.first);
      weights.data += columns.first;
      room.split.clear();
      for (int64_t r = 0; r < block.count; ++r) {
        const float* row = grads.at(r, tile.first - classes.first);
        uint32_t* high = room.high.get() + r * words;
        if (limits[r] == kKeepsAll) {
          products.split_row(high, room.rest.get() + room.split.size() * words, row, tile.count);
          room.split.push_back(r);
        } else {
          const int count = products.round_row(high, row, norms_.data() + tile.first, tile.count,
                                               limits[r], rests);
          products.add_rests(out.at(r, 0), rests, count, weights, columns.count);
        }
      }
      products.multiply(out, {room.high.get(), nullptr, words, 1}, weights,
                        {block.count, columns.count, tile.count}, 1.0f, true);
      if (!room.split.empty()) add_split_rows(room, out, weights, columns.count, tile.count);
    }
  }

  void add_split_rows(Room& room, FloatMatrix out, Bf16Matrix weights, int64_t columns,
                      int64_t depth) const {
    const int64_t rows = room.split.size();
    const Spans parts{{0, columns}, kColumns};
    for (int64_t i = 0; i < parts.count(); ++i) {
      const Span part = parts[i];
      const FloatMatrix sums{room.of_rests.get(), part.count};
      head_.products()->multiply(sums, {room.rest.get(), nullptr, pair_words(depth), 1},
                                 {weights.data + part.first, weights.row},
                                 {rows, part.count, depth}, 1.0f, false);
      for (int64_t r = 0; r < rows; ++r) {
        float* to = out.at(room.split[r], part.first);
        for (int64_t c = 0; c < part.count; ++c) to[c] += *sums.at(r, c);
      }
    }
  }

  // `grads` are those of a tile that begins `offset` classes after the first class of the sums.
  void add_weight(Room& room, Span rows, Span tile, int64_t offset, FloatMatrix grads) const {
    const int64_t width = head_.width();
    const bool in_half = sums_in_half();
    const FloatMatrix out{!in_half ? mutable_data<float>(*weight_) + tile.first * width
                          : waits_for_more_rows(rows) ? mutable_data<float>(*sums_) + offset * width
                                                      : mutable_data<float>(room.sums),
                          width};
    if (const Bf16Products* products = head_.products()) {
      const Spans blocks = head_.blocks(rows);
      for (int64_t i = 0; i < blocks.count(); ++i) {
        const Span block = blocks[i];
        const FloatMatrix part{grads.data + (block.first - rows.first) * grads.row, grads.row};
        uint32_t* rest = rounds_ ? nullptr : room.rest.get();
        products->pairs_of_rows(room.high.get(), rest, part, block.count, tile.count);
        products->multiply(out, {room.high.get(), rest, 1, tile.count},
                           head_.hidden_in_bf16(block.first), {tile.count, width, block.count},
                           head_.factor(), block.first > 0);
      }
    } else {
      multiply(out, Floats{grads.data, rows.count, tile.count, grads.row}.transposed(),
               head_.hidden_floats(rows), rows.first > 0);
    }
    if (!in_half || rows.end() < head_.rows()) return;
    // Not a view of the gradient, which may be an inference tensor: other threads are not in
    // inference mode and cannot write to it.
    auto* half = static_cast<BFloat16*>(weight_->mutable_data_ptr()) + tile.first * width;
    Tensor rounded =
        Strided<BFloat16>{half, tile.count, width, width}.tensor(weight_->scalar_type());
    torch::stable::copy_(rounded, Floats{out.data, tile.count, width, width}.tensor());
  }

  void add_bias(Span rows, Span tile, FloatMatrix grads) {
    double* sums = bias_sums_.data() + tile.first;
    for (int64_t r = 0; r < rows.count; ++r) {
      for (int64_t v = 0; v < tile.count; ++v) sums[v] += grads.data[r * grads.row + v];
    }
  }

  const CpuHead& head_;
  bool rounds_;
  Tensor hidden_like_;
  std::optional<Tensor> hidden_, weight_, sums_;
  std::vector<double> bias_sums_;
  std::vector<RowScale> scales_;  // of each row of a product in bfloat16
  std::vector<float> norms_;      // of each class's weights, likewise
  float mean_norm_ = 0;
  std::vector<float> limits_;  // of the current part, tile by tile
};

}  // namespace fusedrl
