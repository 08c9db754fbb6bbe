#include "host/copy.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>

namespace fusedrl::channel {

namespace {

constexpr int64_t stretch_bytes = int64_t{1} << 20;

// Rounds to nearest, ties to even; every NaN becomes the quiet one, as torch has it.
uint16_t bfloat16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t rounded = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  return value != value ? 0x7fc0 : rounded;
}

void run(const Piece& piece, int64_t first, int64_t elements) {
  char* target = piece.target + first * piece.target_bytes;
  const char* source = piece.source + first * piece.source_bytes;
  if (piece.cast == Cast::none) {
    std::memcpy(target, source, elements * piece.source_bytes);
    return;
  }
  const float* floats = reinterpret_cast<const float*>(source);
  uint16_t* halves = reinterpret_cast<uint16_t*>(target);
  for (int64_t i = 0; i < elements; ++i) halves[i] = bfloat16_of(floats[i]);
}

struct Stretch {
  const Piece* piece;
  int64_t first, elements;
};

std::vector<Stretch> stretches_of(const std::vector<Piece>& pieces) {
  std::vector<Stretch> stretches;
  for (const Piece& piece : pieces) {
    const int64_t step = stretch_bytes / piece.source_bytes;
    for (int64_t first = 0; first < piece.elements; first += step)
      stretches.push_back({&piece, first, std::min(step, piece.elements - first)});
  }
  return stretches;
}

}  // namespace

void copy(const std::vector<Piece>& pieces, int threads) {
  const std::vector<Stretch> stretches = stretches_of(pieces);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < stretches.size();)
      run(*stretches[i].piece, stretches[i].first, stretches[i].elements);
  };
  std::vector<std::jthread> helpers;
  const size_t wanted = std::min<size_t>(threads, stretches.size() / 4 + 1);
  for (size_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
  work();
}

}  // namespace fusedrl::channel
