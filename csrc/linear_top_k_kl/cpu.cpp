// CPU ops: the head's logits of the kept rows, a tile at a time. What a tile has of a row's ids is
// taken out of it, and what is left goes through the row kernels of token_log_probs.
#include <algorithm>
#include <tuple>

#include "common/cpu_head_gradient.h"
#include "linear_token_log_probs/cpu_tiles.h"
#include "top_k_kl/ids.h"
#include "top_k_kl/math.h"

namespace fusedrl {
namespace {

struct Batch {
  RowMap map;
  std::vector<int64_t> tokens;  // the kept ones
  Ids ids;
  float inv_temperature;

  Batch(const Tensor& hidden, const Tensor& ids_of_tokens, const std::optional<Tensor>& mask,
        const std::optional<Tensor>& offsets, bool shift, const Tensor& temperature)
      : map(row_map(hidden, offsets, shift)),
        ids(ids_of_tokens),
        inv_temperature(inverse_temperature(temperature)) {
    check_offsets(offsets, map.tokens);
    tokens = kept_tokens(map, data<bool>(mask));
  }

  // Where a token's log-probs are.
  int64_t at(int64_t token) const { return token * (ids.k + 1); }

  // Of the kept tokens.
  std::vector<OrderedIds> ordered_ids(int64_t classes) const {
    std::vector<OrderedIds> of_tokens;
    of_tokens.reserve(tokens.size());
    for (const int64_t n : tokens) of_tokens.emplace_back(ids, n, classes);
    return of_tokens;
  }
};

// The statistics of each kept row's logits but those of its ids, which go to `of_ids`.
std::vector<SoftmaxPart<double>> split_rows(const CpuHead& head, const TileRows& tiles,
                                            const Batch& batch, const StoredLogits& stored,
                                            float* of_ids) {
  const auto part_of = row_kernels<float>(cpu_level()).part;
  const std::vector<OrderedIds> ids = batch.ordered_ids(head.classes());
  const auto merged = [&](const SoftmaxPart<double>& x, const SoftmaxPart<double>& y) {
    return merge(x, y, batch.inv_temperature);
  };
  return reduced<SoftmaxPart<double>>(
      head, {0, head.rows()}, [&] { return TileRoom(head); },
      [&](TileRoom& room, Span block, Span tile, SoftmaxPart<double>* rows) {
        const FloatMatrix logits =
            stored.of(block, tile, {mutable_data<float>(room.floats), tile.count});
        head.logits(room.of_head, block, tile, logits);
        for (int64_t r = 0; r < block.count; ++r) {
          const int64_t i = block.first + r, at = batch.at(batch.tokens[i]);
          float* x = logits.at(r, 0);
          tiles.shape(x, tile);
          ids[i].for_each_in(tile.first, tile.count, [&](int64_t j, int64_t place) {
            of_ids[at + j] = x[place];
            x[place] = -INFINITY;
          });
          rows[r] = merged(rows[r], part_of(x, tile.count, batch.inv_temperature));
          // What is stored is stored whole.
          ids[i].for_each_in(tile.first, tile.count,
                             [&](int64_t j, int64_t place) { x[place] = of_ids[at + j]; });
        }
      },
      merged);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight,
                                                   std::optional<Tensor> bias, Tensor ids,
                                                   std::optional<Tensor> mask,
                                                   std::optional<Tensor> offsets, bool shift,
                                                   Tensor temperature, double scale, double softcap,
                                                   bool batch_invariant, int64_t stored_bytes) {
  const Batch batch(hidden, ids, mask, offsets, shift, temperature);
  batch.ids.check_of(batch.tokens, weight.size(0));
  Tensor log_probs = empty_per_token(hidden, batch.ids.k + 1);
  Tensor normalizers = empty_per_token(hidden, 2);
  float* out = mutable_data<float>(log_probs);
  Normalizer* out_normalizers = mutable_data<Normalizer>(normalizers);
  std::fill_n(out, log_probs.numel(), 0.0f);
  std::fill_n(out_normalizers, batch.map.tokens, Normalizer{0.0f, 0.0f});

  const CpuHead head(hidden, elements_of(batch.map, batch.tokens), weight, bias,
                     static_cast<float>(scale), batch_invariant);
  const TileRows tiles(head, batch.inv_temperature, softcap);
  const StoredLogits stored(head, stored_bytes);
  const std::vector<SoftmaxPart<double>> rests = split_rows(head, tiles, batch, stored, out);
  for (size_t i = 0; i < rests.size(); ++i) {
    const int64_t n = batch.tokens[i];
    out_normalizers[n] = finish_top_k(rests[i], batch.ids.of(n), batch.ids.k, batch.inv_temperature,
                                      out + batch.at(n));
  }
  return {log_probs, normalizers, stored.tensor(), empty_vector(hidden, ScalarType::Long)};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor grad_log_probs, Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor ids,
    std::optional<Tensor> mask, std::optional<Tensor> offsets, bool shift, Tensor temperature,
    double scale, double softcap, Tensor log_probs, Tensor normalizers, Tensor logits,
    Tensor /*kept*/, bool batch_invariant, bool of_hidden, bool of_weight, bool of_bias,
    std::optional<Tensor> rounds_grads) {
  const Batch batch(hidden, ids, mask, offsets, shift, temperature);
  const float factor = static_cast<float>(scale), inv_temperature = batch.inv_temperature;
  const float* up = data<float>(grad_log_probs);
  const float* of_classes = data<float>(log_probs);
  std::vector<TopKGradient> of_rows;
  of_rows.reserve(batch.tokens.size());
  for (const int64_t n : batch.tokens) {
    const int64_t at = batch.at(n);
    of_rows.emplace_back(up + at, of_classes + at, batch.ids.of(n), batch.ids.k);
  }

  const CpuHead head(hidden, elements_of(batch.map, batch.tokens), weight, bias, factor,
                     batch_invariant);
  CpuHeadGradient gradient(head, hidden, weight, bias, of_hidden, of_weight, of_bias,
                           is_set(rounds_grads));
  const TileRows tiles(head, inv_temperature, softcap);
  for (size_t i = 0; softcap == 0 && i < batch.tokens.size(); ++i) {
    const int64_t n = batch.tokens[i], at = batch.at(n);
    for (int64_t j = 0; j < batch.ids.k; ++j) {
      const int64_t id = batch.ids.of(n)[j];
      if (id < 0) continue;
      gradient.expect(i, id, of_rows[i].of_id(up[at + j], of_classes[at + j], inv_temperature));
    }
  }
  const std::vector<OrderedIds> ordered_ids = batch.ordered_ids(head.classes());
  add_gradients(
      head, gradient, StoredLogits(head, logits),
      [&](float* x, Span tile) { tiles.shape(x, tile); },
      [&](const float* x, float* grads, Span tile, int64_t i) {
        const int64_t n = batch.tokens[i], at = batch.at(n);
        const auto of_rest = of_rows[i].of_rest(data<Normalizer>(normalizers)[n], inv_temperature);
        tiles.differentiate(x, grads, tile, of_rest, [&] {
          ordered_ids[i].for_each_in(tile.first, tile.count, [&](int64_t j, int64_t place) {
            grads[place] = of_rows[i].of_id(up[at + j], of_classes[at + j], inv_temperature);
          });
        });
      });
  return {gradient.hidden(batch.map, batch.tokens, factor), gradient.weight(),
          gradient.bias(factor)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedrl, CPU, m) {
  m.impl("linear_top_k_kl_log_probs", TORCH_BOX(&forward));
  m.impl("linear_top_k_kl_log_probs_backward", TORCH_BOX(&backward));
}

}  // namespace fusedrl
