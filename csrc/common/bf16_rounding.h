// Converts float32 gradients of logits to factors of bfloat16 products: split into two numbers, or
// rounded, with the residuals of the entries that matter most.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace fusedrl {

using torch::headeronly::BFloat16;

// Running statistics of a row of gradients over its tiles. The term of a class is its gradient
// times the norm of its weights: its contribution to the hidden state's gradient.
struct RowScale {
  float largest = 0;  // term in the row, or a lower bound of it
  float dropped = 0;  // sum of squares of terms whose residual was dropped, over `largest`^2
};

// The rounding residual of an entry of a row.
struct Rest {
  int64_t at;
  float value;
};

// Entries of a row and tile whose residuals are kept individually; one more is for all others.
constexpr int kMostRests = 64;

// Instead of a limit: keep the residuals of all entries.
constexpr float kKeepsAll = -1;

}  // namespace fusedrl
