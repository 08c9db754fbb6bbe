// The mapping between tokens and rows of a batch.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/offsets.h"

namespace fusedrl {

// Maps tokens to the rows of logits that predict them; both have flat indices over the batch.
struct RowMap {
  int64_t tokens;           // in the batch
  int64_t period;           // tokens in a padded row; `tokens` when packed
  int64_t stride_sequence;  // elements between padded rows
  int64_t stride_row;       // elements between logits rows
  const int64_t* offsets;   // boundaries of packed sequences, or null
  int64_t sequences;        // offsets holds one more
  bool shift;               // token n reads row n - 1

  // Whether a token starts its sequence: with shift, no row predicts it.
  FUSEDRL_HD bool starts_sequence(int64_t token) const {
    if (offsets == nullptr) return token % period == 0;
    return offsets[sequence_of(token, offsets, sequences)] == token;
  }

  FUSEDRL_HD bool has_row(int64_t token) const {
    return !shift || (token > 0 && !starts_sequence(token));
  }

  FUSEDRL_HD int64_t row_of(int64_t token) const { return token - (shift ? 1 : 0); }

  FUSEDRL_HD int64_t token_of(int64_t row) const { return row + (shift ? 1 : 0); }

  FUSEDRL_HD int64_t element_of_row(int64_t row) const {
    return row / period * stride_sequence + row % period * stride_row;
  }
};

}  // namespace fusedrl
