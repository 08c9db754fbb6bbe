// Copies many pieces of memory as one, with a single start and end of threads for all of them.
#pragma once

#include <cstdint>
#include <vector>

namespace fusedrl::channel {

enum class Cast { none, float_to_bfloat16 };

// Assumes that no piece overlaps another.
struct Piece {
  char* target;
  const char* source;
  int64_t elements;
  int64_t source_bytes, target_bytes;  // of an element
  Cast cast;
};

// Each thread takes the next stretch when it has finished one, so that a slow thread delays the
// others by no more than a stretch.
void copy(const std::vector<Piece>& pieces, int threads);

}  // namespace fusedrl::channel
