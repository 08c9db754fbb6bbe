// The driver of linear ops on the CPU: logits of kept rows, a tile at a time, go to a row kernel,
// which reduces them or turns them into their gradients. An op has one head, or two over the same
// tokens and classes.
#pragma once

#include <array>
#include <vector>

#include "common/cpu_head_gradient.h"

namespace fusedrl {

// A head and the logits of it that are stored, or none; and its gradient, null where none is
// wanted.
struct HeadOfRows {
  const CpuHead& head;
  StoredLogits stored;
  CpuHeadGradient* gradient = nullptr;
};

// The logits of a row, or their gradients, of each head.
template <size_t kHeads>
using RowOfEach = std::array<float*, kHeads>;

template <size_t kHeads>
RowOfEach<kHeads> row_of_each(const std::array<FloatMatrix, kHeads>& matrices, int64_t row) {
  RowOfEach<kHeads> rows;
  for (size_t k = 0; k < kHeads; ++k) rows[k] = matrices[k].at(row, 0);
  return rows;
}

// Calls f(room, block, tile) for all blocks of these rows and tiles of these classes, on torch's
// threads.
template <typename MakeRoom, typename F>
void for_each_tile(const CpuHead& head, Span rows, Span classes, const MakeRoom& make_room,
                   const F& f) {
  const Spans blocks = head.blocks(rows), tiles = head.tiles(classes);
  share(tiles.count() * blocks.count(), make_room, [&](auto& room, int64_t i) {
    f(room, blocks[i % blocks.count()], tiles[i / blocks.count()]);
  });
}

// Merges the parts of each of so many rows, segment by segment, into the first segment's.
template <typename Part, typename Merge>
void merge_segments(std::vector<Part>& parts, int64_t rows, const Merge& merge) {
  for (int64_t i = rows; i < static_cast<int64_t>(parts.size()); ++i) {
    Part& row = parts[i % rows];
    row = merge(row, parts[i]);
  }
  parts.resize(rows);
}

// Calls f(rows, tile, row, part) for the logits of every row in every tile, on torch's threads, and
// returns each row's parts, merged in the order of the classes. Logits that are stored are made
// where it `makes` them alone.
template <typename Part, size_t kHeads, typename F, typename Merge>
std::vector<Part> reduced(const std::array<HeadOfRows, kHeads>& heads, bool makes, const F& f,
                          const Merge& merge) {
  struct Room {
    CpuHead::Room of_head;
    Tensor tile;
  };
  const auto make_rooms = [&] {
    std::vector<Room> rooms;
    for (const HeadOfRows& one : heads) {
      rooms.push_back(
          {CpuHead::Room(one.head), new_floats(one.head.weight(), one.head.tile_floats())});
    }
    return rooms;
  };
  const CpuHead& head = heads[0].head;
  const Spans blocks = head.blocks();
  const Segments segments = head.segments();
  std::vector<Part> parts(segments.count() * head.rows());
  share(segments.count() * blocks.count(), make_rooms, [&](auto& rooms, int64_t i) {
    const int64_t segment = i / blocks.count();
    const Span block = blocks[i % blocks.count()];
    Part* of_block = parts.data() + segment * head.rows() + block.first;
    segments.for_each_tile(segment, [&](Span tile) {
      std::array<FloatMatrix, kHeads> logits;
      for (size_t k = 0; k < kHeads; ++k) {
        const FloatMatrix room{mutable_data<float>(rooms[k].tile), tile.count};
        logits[k] = heads[k].stored.of(block, tile, room);
        if (makes || heads[k].stored.empty()) {
          heads[k].head.logits(rooms[k].of_head, block, tile, logits[k]);
        }
      }
      for (int64_t r = 0; r < block.count; ++r) {
        f(row_of_each(logits, r), tile, block.first + r, of_block[r]);
      }
    });
  });
  merge_segments(parts, head.rows(), merge);
  return parts;
}

// Lets differentiate(rows, grads, tile, row) write the gradients of every row's logits in every
// tile, which may be where the logits are, and adds these up. The heads store logits both or not.
template <size_t kHeads, typename F>
void add_gradients(const std::array<HeadOfRows, kHeads>& heads, const F& differentiate) {
  const CpuHead& head = heads[0].head;
  const bool makes = heads[0].stored.empty();
  const GradientParts parts(head);
  std::array<Tensor, kHeads> floats;
  for (size_t k = 0; k < kHeads; ++k) {
    const bool some = makes || heads[k].gradient != nullptr;
    floats[k] = new_floats(head.weight(), some ? parts.floats(heads[k].head) : 0);
  }
  const auto make_rooms = [&] {
    std::vector<CpuHead::Room> rooms;
    for (const HeadOfRows& one : heads) rooms.emplace_back(one.head);
    return rooms;
  };
  parts.for_each([&](Span rows, Span classes) {
    const auto part_of = [&](size_t k) {
      return FloatMatrix{mutable_data<float>(floats[k]), classes.count};
    };
    for_each_tile(head, rows, classes, make_rooms, [&](auto& rooms, Span block, Span tile) {
      std::array<FloatMatrix, kHeads> logits, grads;
      for (size_t k = 0; k < kHeads; ++k) {
        const FloatMatrix part = part_of(k);
        grads[k] = {part.at(block.first - rows.first, tile.first - classes.first), part.row};
        logits[k] = heads[k].stored.of(block, tile, grads[k]);
        if (makes) heads[k].head.logits(rooms[k], block, tile, logits[k]);
      }
      for (int64_t r = 0; r < block.count; ++r) {
        differentiate(row_of_each(logits, r), row_of_each(grads, r), tile, block.first + r);
      }
    });
    for (size_t k = 0; k < kHeads; ++k) {
      if (heads[k].gradient != nullptr) heads[k].gradient->add(rows, classes, part_of(k));
    }
  });
}

}  // namespace fusedrl
