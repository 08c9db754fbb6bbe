// Stands in for csrc/common/tile_sizes.h: tiles so small that every test has many, most not full.
// A test may ask for larger ones, where a thread has several packs of a row.
#pragma once

#include <cstdint>

namespace fusedrl {

extern "C" {
__attribute__((visibility("default"))) inline int64_t tile_elements = 64;
}
inline int64_t &kTileElements = tile_elements, &kTermElements = tile_elements;

constexpr int64_t kGradientElements = 150;
constexpr int64_t kMostRows = 4;
constexpr int64_t kInvariantRows = 3;
constexpr int64_t kColumnStep = 4;
constexpr int kElementThreads = 32;

}  // namespace fusedrl
