// Divides work into parts for the threads of one parallel region.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
// MKL's thread count for products of the calling thread, if torch uses MKL; 0 means torch's count.
// Returns the previous value.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int threads);
#endif

namespace fusedrl {

// In its scope, products run on the calling thread. Torch disables MKL's check for parallel
// regions, so on Intel CPUs MKL would split the sums of narrow products into as many parts as torch
// has threads, and results would depend on that number.
class ProductsOnOneThread {
 public:
  ProductsOnOneThread() {
    torch::stable::get_num_threads();  // its first call in a thread sets MKL's number
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

// A range divided into spans of `length`; the last may be shorter.
struct Spans {
  Span range;
  int64_t length;

  int64_t count() const { return (range.count + length - 1) / length; }
  Span operator[](int64_t i) const {
    return {range.first + i * length, std::min(length, range.count - i * length)};
  }
};

// Divides a head's classes into segments of tiles, the tasks of threads. Results for a row are
// merged in the order of the segments, so that they do not depend on the number of threads.
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

// Calls f(room, i) for every i below `items`, with one make_room() per thread. Threads take the
// next item when they are free, so that a descheduled thread does not delay others.
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
