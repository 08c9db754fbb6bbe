// Copies many pieces of memory in one operation, which starts and joins its threads once.
#pragma once

#include <cstdint>
#include <vector>

namespace fusedrl::channel {

enum class Cast { none, float_to_bfloat16 };

// No piece may overlap another.
struct Piece {
  char* target;
  const char* source;
  int64_t elements;
  int64_t source_bytes, target_bytes;  // of an element
  Cast cast;
};

// A thread that has finished a stretch takes the next one, so that a slow thread delays the others
// by one stretch at most.
void copy(const std::vector<Piece>& pieces, int threads);

}  // namespace fusedrl::channel
