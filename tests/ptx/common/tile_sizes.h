// Stands in for csrc/common/tile_sizes.h: tiles so small that every test has many, most not full.
#pragma once

#include <cstdint>

namespace fusedrl {

constexpr int64_t kTileElements = 64;
constexpr int64_t kGradientElements = 150;
constexpr int64_t kTermElements = 20;
constexpr int64_t kMostRows = 4;
constexpr int64_t kRowStep = 2;
constexpr int64_t kInvariantRows = 3;
constexpr int64_t kColumnStep = 4;
constexpr int kElementThreads = 32;

}  // namespace fusedrl
