// CUDA kernels that process one tile of two heads' matrix products, one block per row. Rows of both
// tiles are aligned to 16 bytes.
#pragma once

#include "common/head_kernels.h"
#include "exact_kl/kernels.h"

namespace fusedrl {

// Converts the products of a tile to logits, in place.
template <typename T>
__global__ void shape_tile(Tile<T> tile, float* products) {
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    for_each_pack<kPacksInFlight>({tile.row(r)}, tile.classes, [&](auto& elements, int first) {
      tile.shape(elements[0].at, first);
      store(products + r * tile.stride_row + first, elements[0].at);
    });
  }
}

// Adds a tile of logits to the statistics of its rows, or initialises them.
template <bool kEntropies, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    add_pair_tile(Tile<T> tile, Tile<T> ref_tile, KeptRows rows, bool first,
                  PairPart<float>* parts) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const PairPart<float> part =
        part_of<false, kEntropies>(tile.row(r), ref_tile.row(r), tile.classes, inv_temperature);
    if (threadIdx.x != 0) continue;
    PairPart<float>& all = parts[tile.first_row + r];
    all = first ? part : merge(all, part, inv_temperature);
  }
}

// The same for the sums of a mixture, once the statistics are complete.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    add_mixture_tile(Tile<T> tile, Tile<T> ref_tile, KeptRows rows, bool first, Pair<float> shares,
                     const PairPart<float>* parts, Pair<float>* sums) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const Pair<float> sum =
        sums_of(tile.row(r), ref_tile.row(r), tile.classes,
                {normalizers_of(parts[tile.first_row + r]), shares, inv_temperature});
    if (threadIdx.x != 0) continue;
    Pair<float>& all = sums[tile.first_row + r];
    all = first ? sum : Pair<float>{all.p + sum.p, all.q + sum.q};
  }
}

// `sums` is null without a mixture.
static __global__ void finish_pairs(Selection kept, const PairPart<float>* parts,
                                    const Pair<float>* sums, Pair<float> shares, PairOutputs out) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < kept.count; i += stride) {
    const PairPart<float>& part = parts[i];
    out.write(kept.token(i),
              sums == nullptr ? finish(part)
                              : finish(normalizers_of(part), entropies_of(part), sums[i], shares));
  }
}

// The gradients of both tiles of matrix products, either of which may be null.
template <bool kMixture, bool kEntropies, typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    differentiate_pair_tile(Tile<T> tile, Tile<T> ref_tile, Selection kept, KeptRows rows,
                            PairUpstream upstream, GradTile<T> grads, GradTile<T> ref_grads) {
  const float inv_temperature = rows.inverse_temperature();
  for (int64_t r = blockIdx.x; r < tile.rows; r += gridDim.x) {
    const int64_t n = kept.token(tile.first_row + r);
    const LogitPairGradients<kMixture, kEntropies> gradients{upstream.of_token(n, inv_temperature)};
    for_each_pack<kPairBatch<kMixture, float>>(
        {tile.row(r), ref_tile.row(r)}, tile.classes, [&](auto& logits, int first) {
          auto of_p = logits[0], of_q = logits[1];
#pragma unroll
          for (size_t j = 0; j < sizeof of_p / sizeof(float); ++j) {
            const Pair<float> of_class = gradients(of_p.at[j], of_q.at[j]);
            of_p.at[j] = of_class.p;
            of_q.at[j] = of_class.q;
          }
          if (grads.first != nullptr) {
            tile.shape.chain(of_p.at, logits[0].at);
            store(grads.row(r) + first, of_p.at);
          }
          if (ref_grads.first != nullptr) {
            ref_tile.shape.chain(of_q.at, logits[1].at);
            store(ref_grads.row(r) + first, of_q.at);
          }
        });
  }
}

}  // namespace fusedrl
