// Divides work into parts for the threads of one parallel region.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
// Of MKL, where torch multiplies by it: on how many threads a product of the calling thread runs, 0
// for as many as torch has. Answers what was in force.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int threads);
#endif

namespace fusedrl {

// In its scope, products run on the thread that calls. Torch tells MKL not to look whether it is
// called in a parallel region, and there it still splits the sums of narrow products on Intel's
// CPUs into as many parts as torch has threads, so that bits would depend on their number.
class ProductsOnOneThread {
 public:
  ProductsOnOneThread() {
    torch::stable::get_num_threads();  // first in a thread, it tells MKL the number that torch has
    before_ = tell(1);
  }
  ~ProductsOnOneThread() { tell(before_); }
  ProductsOnOneThread(const ProductsOnOneThread&) = delete;
  ProductsOnOneThread& operator=(const ProductsOnOneThread&) = delete;

 private:
  static int tell([[maybe_unused]] int threads) {
#if defined(__linux__)
    if (MKL_Set_Num_Threads_Local != nullptr) return MKL_Set_Num_Threads_Local(threads);
#endif
    return 0;
  }
  int before_ = 0;
};

// Consecutive rows or classes.
struct Span {
  int64_t first, count;

  int64_t end() const { return first + count; }
  bool has(int64_t i) const { return first <= i && i < end(); }
  bool operator==(const Span&) const = default;
};

// A range in spans of `length`, of which the last may be shorter.
struct Spans {
  Span range;
  int64_t length;

  int64_t count() const { return (range.count + length - 1) / length; }
  Span operator[](int64_t i) const {
    return {range.first + i * length, std::min(length, range.count - i * length)};
  }
};

// Threads take a head's classes in segments of tiles. Their results for a row are merged in the
// order of the segments, so that no bit depends on the number of threads.
struct Segments {
  static constexpr int64_t kMost = 128;  // the results for a row then take 6 KiB at most
  Spans tiles;

  int64_t tiles_each() const { return (tiles.count() + kMost - 1) / kMost; }
  int64_t count() const { return (tiles.count() + tiles_each() - 1) / tiles_each(); }

  int64_t of_tile(Span tile) const { return tile.first / tiles.length / tiles_each(); }

  template <typename F>
  void for_each_tile(int64_t segment, F&& f) const {
    const int64_t first = segment * tiles_each();
    for (int64_t i = first; i < std::min(first + tiles_each(), tiles.count()); ++i) f(tiles[i]);
  }
};

// Calls f(room, i) for every i below `items`; whichever thread is free takes the next one, in a
// room of its own that make_room() returns. A thread that is descheduled delays no other.
template <typename MakeRoom, typename F>
void share(int64_t items, const MakeRoom& make_room, const F& f) {
  if (items == 0) return;
  std::atomic<int64_t> next{0};
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t item = next++;
    if (item >= items) return;
    const ProductsOnOneThread alone;
    auto room = make_room();
    for (; item < items; item = next++) f(room, item);
  });
}

}  // namespace fusedrl
