#include "host/copy.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <system_error>
#include <thread>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fusedrl::channel {

namespace {

constexpr int64_t stretch_bytes = int64_t{1} << 20;
// Larger copies do not fit into caches, so that readers load them from memory anyway.
constexpr int64_t streamed_bytes = int64_t{8} << 20;

// A memcpy that bypasses the caches, which otherwise load what is about to be overwritten: this
// saves a third of the traffic. libc only does so for single copies of many megabytes.
void write(char* target, const char* source, int64_t bytes, bool streamed) {
#if defined(__SSE2__)
  if (streamed && reinterpret_cast<uintptr_t>(target) % 16 == 0) {
    const int64_t whole = bytes / 64 * 64;
    for (int64_t i = 0; i < whole; i += 64) {
      __m128i line[4];
      for (int j = 0; j < 4; ++j)
        line[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i) + j);
      for (int j = 0; j < 4; ++j)
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i) + j, line[j]);
    }
    _mm_sfence();
    std::memcpy(target + whole, source + whole, bytes - whole);
    return;
  }
#endif
  std::memcpy(target, source, bytes);
}

// Rounds to nearest, ties to even. Every NaN becomes the quiet NaN, as in torch.
inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t rounded = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  return value != value ? 0x7fc0 : rounded;
}

// With baseline x86 instructions, conversion is slower than memory.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("avx2", "default")))
#endif
void convert(const float* floats, uint16_t* halves, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) halves[i] = bfloat16_of(floats[i]);
}

void run(const Piece& piece, int64_t first, int64_t elements, bool streamed) {
  char* target = piece.target + first * piece.target_bytes;
  const char* source = piece.source + first * piece.source_bytes;
  if (piece.cast == Cast::none) {
    write(target, source, elements * piece.source_bytes, streamed);
    return;
  }
  const float* floats = reinterpret_cast<const float*>(source);
  alignas(64) uint16_t halves[2048];
  for (int64_t i = 0; i < elements; i += std::size(halves)) {
    const int64_t some = std::min<int64_t>(elements - i, std::size(halves));
    convert(floats + i, halves, some);
    write(target + i * 2, reinterpret_cast<const char*>(halves), some * 2, streamed);
  }
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
  int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.elements * piece.target_bytes;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < stretches.size();)
      run(*stretches[i].piece, stretches[i].first, stretches[i].elements, bytes > streamed_bytes);
  };
  std::vector<std::jthread> helpers;
  const size_t wanted = std::min<size_t>(threads, bytes / (2 * stretch_bytes) + 1);
  try {
    for (size_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads can be started: the existing ones do all the work.
  }
  work();
}

}  // namespace fusedrl::channel
