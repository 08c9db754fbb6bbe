// How much of a head's logits exists at a time on CUDA. *Not yet verified* on a GPU.
#pragma once

#include <cstdint>

namespace fusedrl {

constexpr int64_t kTileElements = int64_t(64) << 20;  // 256 MiB of float32 products
constexpr int64_t kMostRows = 16384;                  // of a tile
constexpr int64_t kInvariantRows = 256;  // where a row's bits may not depend on how many there are
constexpr int64_t kColumnStep = 256;     // tiles are multiples of it, to suit the GEMMs

constexpr int kElementThreads = 256;  // of a block of elementwise kernels

}  // namespace fusedrl
