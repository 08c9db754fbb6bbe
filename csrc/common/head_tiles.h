// The parts of a head's logits and of their gradients that exist at a time on CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/tile_sizes.h"

namespace fusedrl {

struct Extent {
  int64_t rows, classes;
};

// Tiles of products, and blocks of gradients.
struct HeadTiles {
  struct Options {
    bool batch_invariant = false;  // results of a row must not depend on the number of rows
    bool one_a_block = false;      // each block is one tile
  };

  int64_t count = 0;  // of rows
  int64_t classes = 0;
  bool batch_invariant = false;
  int64_t padded = 0;  // rows, with the zeros that fill the last tile if tiles have a fixed size
  Extent tile{};       // of products
  Extent block{};      // of gradients: the tiles of one matrix product

  HeadTiles() = default;
  HeadTiles(int64_t count, int64_t classes, Options options)
      : count(count), classes(classes), batch_invariant(options.batch_invariant) {
    const int64_t all = (classes + kColumnStep - 1) / kColumnStep * kColumnStep;
    tile.rows = batch_invariant ? kInvariantRows : std::clamp<int64_t>(count, 1, kMostRows);
    padded = batch_invariant ? (count + tile.rows - 1) / tile.rows * tile.rows : count;
    tile.classes = std::min(all, room(kTileElements, tile.rows, kColumnStep));
    block = tile;
    if (options.one_a_block) return;
    // As many tiles as fit into the limit for gradients, first along classes, then along rows,
    // where the last may exceed it.
    block.classes = std::min(all, room(kGradientElements, tile.rows, tile.classes));
    const int64_t fit = kGradientElements / block.classes;
    block.rows = std::min(padded, room(fit + tile.rows - 1, 1, tile.rows));
  }

 private:
  // The largest multiple of `step` up to `most`, or `most` if it is smaller than `step`.
  static int64_t multiple(int64_t most, int64_t step) {
    return most < step ? most : most / step * step;
  }

  // The largest extent, a multiple of `step`, whose product with `others` is within the limit.
  static int64_t room(int64_t elements, int64_t others, int64_t step) {
    return std::max(multiple(elements / others, step), step);
  }
};

// Calls f(first_class, first_row) for every tile, block by block, and after(first_class, first_row)
// after the last tile of each block.
template <typename F, typename G>
void for_each_tile(const HeadTiles& tiles, F&& f, G&& after) {
  const int64_t count = tiles.count, classes = tiles.classes;
  if (count == 0) return;
  for (int64_t c = 0; c < classes; c += tiles.block.classes) {
    for (int64_t r = 0; r < count; r += tiles.block.rows) {
      const int64_t end_class = std::min(classes, c + tiles.block.classes);
      const int64_t end_row = std::min(count, r + tiles.block.rows);
      for (int64_t first = c; first < end_class; first += tiles.tile.classes) {
        for (int64_t row = r; row < end_row; row += tiles.tile.rows) f(first, row);
      }
      after(c, r);
    }
  }
}

template <typename F>
void for_each_tile(const HeadTiles& tiles, F&& f) {
  for_each_tile(tiles, f, [](int64_t, int64_t) {});
}

}  // namespace fusedrl
