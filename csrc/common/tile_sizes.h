// How much of a head's logits exists at a time on CUDA. *Not yet verified* on a GPU.
#pragma once

#include <cstdint>

namespace fusedrl {

constexpr int64_t kTileElements = int64_t(64) << 20;  // 256 MiB of float32 products
constexpr int64_t kMostRows = 16384;                  // rows of a tile
constexpr int64_t kInvariantRows = 256;  // if a row's bits must not depend on the number of rows
constexpr int64_t kColumnStep = 256;     // tiles are multiples of it, to suit the GEMMs

constexpr int kElementThreads = 256;  // threads in a block of elementwise kernels

}  // namespace fusedrl
