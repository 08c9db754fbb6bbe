// Which tokens are a sequence, and where what is known of it goes.
#pragma once

#include "importance_weights/math.h"

namespace fusedrl {

// Sequences of packed values with offsets, the rows of padded values, or one.
struct SequenceBounds {
  const int64_t* offsets;  // null where all sequences are `length` long
  int64_t sequences;
  int64_t length;
  int64_t tokens;  // of all sequences

  FUSEDRL_HD int64_t begin(int64_t sequence) const {
    return offsets == nullptr ? sequence * length : offsets[sequence];
  }
  FUSEDRL_HD int64_t end(int64_t sequence) const { return begin(sequence + 1); }

  // Where this is true of every sequence, each token is of one.
  FUSEDRL_HD bool in_order(int64_t sequence) const {
    const int64_t first = begin(sequence), past = end(sequence);
    return 0 <= first && first <= past && past <= tokens && (sequence > 0 || first == 0) &&
           (sequence + 1 < sequences || past == tokens);
  }
};

constexpr int64_t kCounts = 2;  // known tokens, clipped tokens
constexpr int64_t kSums = 5;    // k1, k3, weights, their squares; the largest ratio

// Where the results of a sequence go.
struct MismatchRows {
  int64_t* counts;
  float* sums;

  FUSEDRL_HD void write(int64_t sequence, const Mismatch& mismatch) const {
    int64_t* count = counts + sequence * kCounts;
    count[0] = mismatch.tokens;
    count[1] = mismatch.clipped;
    float* sum = sums + sequence * kSums;
    sum[0] = static_cast<float>(mismatch.k1);
    sum[1] = static_cast<float>(mismatch.k3);
    sum[2] = static_cast<float>(mismatch.weights);
    sum[3] = static_cast<float>(mismatch.squares);
    sum[4] = mismatch.largest_ratio();
  }
};

}  // namespace fusedrl
