// Gradients of logits, in float32, as factors of products in bfloat16: in pairs of numbers, or
// rounded, with what rounding leaves of the entries that it matters for.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace fusedrl {

using torch::headeronly::BFloat16;

// What has been seen of a row of gradients, a tile of its classes at a time. A class's term is its
// gradient times the norm of its weights: how much it adds to the hidden state's gradient.
struct RowScale {
  float largest = 0;  // term in the row, or a lower bound of it
  float dropped = 0;  // squares of the terms whose rests were dropped, in squares of `largest`
};

// What bfloat16 leaves of an entry of a row.
struct Rest {
  int64_t at;
  float value;
};

// Entries of a row and tile whose rests are kept one by one, beside one that is for all others.
constexpr int kMostRests = 64;

// Instead of a limit: the rests of all entries are kept.
constexpr float kKeepsAll = -1;

}  // namespace fusedrl
