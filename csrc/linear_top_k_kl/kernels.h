// CUDA kernels: what becomes of a tile of a head's matrix products, one block a row. Rows of a tile
// start on 16-byte boundaries.
#pragma once

#include "common/head_kernels.h"
#include "linear_token_log_probs/kernels.h"
#include "top_k_kl/kernels.h"

namespace fusedrl {

// The statistics of every token before any of its logits.
static __global__ void start_rests(SoftmaxPart<float>* rest, int64_t tokens) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < tokens; n += stride) {
    rest[n] = SoftmaxPart<float>();
  }
}

// Takes the logits of the ids from a tile, and adds all others to their tokens' statistics. In the
// registers that leave room for two blocks, bits and softcap do not fit.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    split_tile(Tile<T> tile, Selection kept, KeptRows rows, TopKOutputs out) {
  __shared__ uint32_t taken[kWindowWords];
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const int64_t n = kept.token(tile.first_row + r);
    const float* row = tile.row(r);
    const SoftmaxPart<float> mine = rest_part<true>(row, tile.first_class, tile.classes, out.ids, n,
                                                    inv_temperature, taken, tile.shape);
    const SoftmaxPart<float> rest = reduce_parts(mine, inv_temperature);
    if (threadIdx.x == 0) out.rest[n] = merge(out.rest[n], rest, inv_temperature);
    out.ids.for_each_in(n, tile.first_class, tile.classes, [&](int64_t j, int64_t place) {
      out.row(n)[j] = tile.shape(row[place], place);
    });
  }
}

// The gradients of a tile of matrix products.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    differentiate_top_k_tile(Tile<T> tile, Selection kept, KeptRows rows, TopKUpstream upstream,
                             GradTile<T> grads) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const int64_t n = kept.token(tile.first_row + r);
    const float* row = tile.row(r);
    T* grad = grads.row(r);
    differentiate_row(tile, row, grad, -1, upstream.of_rest(n, inv_temperature), 0.0f);
    __syncthreads();
    upstream.for_each_in(n, tile.first_class, tile.classes, inv_temperature,
                         [&](int64_t place, float gradient) {
                           const float logit[] = {tile.shape(row[place], place)};
                           float of_product[] = {gradient};
                           tile.shape.chain(of_product, logit);
                           grad[place] = T(of_product[0]);
                         });
  }
}

}  // namespace fusedrl
