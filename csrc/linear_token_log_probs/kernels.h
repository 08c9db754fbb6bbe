// CUDA kernels that process one tile of a head's matrix products, one block per row.
#pragma once

#include "common/head_kernels.h"
#include "linear_token_log_probs/math.h"
#include "token_log_probs/kernels.h"

namespace fusedrl {

// Initialises the statistics of every token.
static __global__ void start_parts(KeptRows rows, const int64_t* tokens, bool whole_vocabulary,
                                   bool first_shard, VocabPart* parts) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < rows.map.tokens;
       n += stride) {
    const bool keep = rows.keeps(n);
    FUSEDRL_DEVICE_CHECK(!keep || !whole_vocabulary || (tokens[n] >= 0 && tokens[n] < rows.classes),
                         "tokens: expected values in [0, V); leave it out with mask");
    parts[n] = keep ? VocabPart() : dropped_part(first_shard);
  }
}

// Adds a tile's logits to their tokens' statistics: one block per row.
template <bool kEntropy, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    add_tile(Tile<T> tile, Selection kept, KeptRows rows, const int64_t* tokens, VocabPart* parts) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const float* row = tile.row(r);
    const SoftmaxPart<float> mine =
        thread_part<kEntropy, true>(row, tile.classes, inv_temperature, tile.shape);
    const auto merge_parts = [=](const SoftmaxPart<float>& x, const SoftmaxPart<float>& y) {
      return merge(x, y, inv_temperature);
    };
    const SoftmaxPart<float> part = reduce_block(mine, merge_parts);
    if (threadIdx.x != 0) continue;
    const int64_t n = kept.token(tile.first_row + r), target = tokens[n] - tile.first_class;
    VocabPart& all = parts[n];
    const SoftmaxPart<float> merged = merge({all.max, all.sum, all.dot}, part, inv_temperature);
    all.max = merged.max;
    all.sum = merged.sum;
    all.dot = merged.dot;
    if (target >= 0 && target < tile.classes) all.target = tile.shape(row[target], target);
  }
}

// Writes the gradients of a row of matrix products, in the dtype of the products' factors. `target`
// is relative to the tile.
template <typename T>
__device__ void differentiate_row(const Tile<T>& tile, const float* row, T* grad, int64_t target,
                                  const RowGradient& gradient, float target_log_prob) {
  const LogitGradients gradients{gradient, target, gradient.target(target_log_prob)};
  for_each_pack<kPacksInFlight>({row}, tile.classes, [&](auto& logits, int first) {
    tile.shape(logits[0].at, first);
    auto grads = logits[0];
    gradients(grads.at, first);
    tile.shape.chain(grads.at, logits[0].at);
    store(grad + first, grads.at);
  });
}

// Converts the logits of a tile to the factors of their classes in a row's sum of weights, relative
// to the largest logit so far, and rescales the sum so far: one block per row.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    weigh_tile(Tile<T> tile, Selection kept, KeptRows rows, const int64_t* tokens,
               const VocabPart* parts, float* relative_to, float* sums, int64_t width,
               GradTile<T> counts) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const int64_t n = kept.token(tile.first_row + r);
    const float max = parts[n].max;
    float& before = relative_to[tile.first_row + r];
    if (before != max && before > -INFINITY) {
      const float factor = expf((before - max) * inv_temperature);
      float* sum = sums + (tile.first_row + r) * width;
      for (int64_t k = threadIdx.x; k < width; k += blockDim.x) sum[k] *= factor;
    }
    differentiate_row(tile, tile.row(r), counts.row(r), tokens[n] - tile.first_class,
                      exponentials(max, inv_temperature), 0.0f);
    __syncthreads();
    if (threadIdx.x == 0) before = max;
  }
}

static __global__ void finish_parts(const VocabPart* parts, int64_t shards, int64_t tokens,
                                    Scalar temperature, float* log_probs, float* entropies,
                                    Normalizer* normalizers) {
  const float inv_temperature = static_cast<float>(1.0 / temperature.get());
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < tokens; n += stride) {
    const RowResult result = finish(parts + n, shards, tokens, inv_temperature);
    log_probs[n] = result.log_prob;
    normalizers[n] = result.normalizer;
    if (entropies != nullptr) entropies[n] = result.entropy;
  }
}

// The inputs of the gradients of every token's logits.
struct TokenGradients {
  const float* log_probs;  // upstream
  const float* entropies;  // upstream, null for none
  const float* log_prob;
  const float* entropy;
  const Normalizer* normalizers;

  __device__ RowGradient of(int64_t n, float inv_temperature) const {
    const bool of_entropy = entropies != nullptr;
    return {log_probs[n], of_entropy ? entropies[n] : 0.0f, of_entropy ? entropy[n] : 0.0f,
            normalizers[n], inv_temperature};
  }
};

// The gradients of a tile of matrix products.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    differentiate_tile(Tile<T> tile, Selection kept, KeptRows rows, const int64_t* tokens,
                       TokenGradients upstream, GradTile<T> grads) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const int64_t n = kept.token(tile.first_row + r);
    differentiate_row(tile, tile.row(r), grads.row(r), tokens[n] - tile.first_class,
                      upstream.of(n, inv_temperature), upstream.log_prob[n]);
  }
}

}  // namespace fusedrl
