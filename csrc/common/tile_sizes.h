// How much of a head's logits exists at a time on CUDA.
#pragma once

#include <cstdint>

namespace fusedrl {

constexpr int64_t kTileElements = int64_t(64) << 20;       // 256 MiB of float32 products
constexpr int64_t kGradientElements = int64_t(256) << 20;  // 512 MiB of halves
constexpr int64_t kTermElements = int64_t(16) << 20;       // of a float32 product that is added
constexpr int64_t kMostRows = 16384;                       // rows of a tile
constexpr int64_t kInvariantRows = 256;  // if a row's bits must not depend on the number of rows
constexpr int64_t kColumnStep = 256;     // tiles of this, to suit the GEMMs

constexpr int kElementThreads = 256;  // threads in a block of elementwise kernels

}  // namespace fusedrl
