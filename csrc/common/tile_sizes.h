// Limits for the logits of a head that exist at a time on CUDA.
#pragma once

#include <cstdint>

namespace fusedrl {

constexpr int64_t kTileElements = int64_t(64) << 20;       // 256 MiB of float32 products
constexpr int64_t kGradientElements = int64_t(256) << 20;  // 512 MiB of halves
constexpr int64_t kTermElements = int64_t(16) << 20;       // of a float32 product that is added
constexpr int64_t kMostRows = 16384;                       // rows of a tile
constexpr int64_t kInvariantRows = 256;                    // for batch-invariant results
constexpr int64_t kColumnStep = 256;  // tile widths are multiples of it, for fast GEMMs

constexpr int kElementThreads = 256;  // threads in a block of elementwise kernels

}  // namespace fusedrl
