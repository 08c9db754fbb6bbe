// One sequence in pieces that stay in L1, from its first token on, so that its bits depend on
// nothing else. Nothing in the loops branches, and sums run in as many lanes as the widest vectors
// have, so that compilers vectorise them. Compiled once a CPU level.
#include "importance_weights/cpu_rows.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

constexpr int64_t kPiece = 1024;
constexpr int64_t kLanes = 16;

// The tokens of a piece, and as many dropped ones as fill the last lanes.
struct Piece {
  float log_ratio[kPiece];  // 0 where it is not known
  int32_t kept[kPiece];     // 1 or 0
  int32_t known[kPiece];    // kept, and not missing
  float k3[kPiece], ratio[kPiece];
  int64_t lanes_end;
};

template <typename T>
void read(const TokenSequence<T>& sequence, int64_t begin, int64_t count, bool nan_missing,
          Piece& piece) {
  const T* p = sequence.log_probs + begin;
  const T* q = sequence.rollout_log_probs + begin;
  if (sequence.mask == nullptr) {
    for (int64_t i = 0; i < count; ++i) piece.kept[i] = 1;
  } else {
    const auto* mask = reinterpret_cast<const uint8_t*>(sequence.mask) + begin;
    for (int64_t i = 0; i < count; ++i) piece.kept[i] = mask[i] != 0;
  }
  const int32_t missing = nan_missing;
  // Values under the mask are loaded, and left out by selection.
  for (int64_t i = 0; i < count; ++i) {
    const float d = static_cast<float>(p[i]) - static_cast<float>(q[i]);
    const int32_t known = piece.kept[i] & (int32_t(d == d) | (missing ^ 1));
    piece.known[i] = known;
    piece.log_ratio[i] = known ? d : 0;
  }
  piece.lanes_end = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = count; i < piece.lanes_end; ++i) {
    piece.log_ratio[i] = 0;
    piece.kept[i] = piece.known[i] = 0;
  }
  for (int64_t i = 0; i < piece.lanes_end; ++i) {
    piece.k3[i] = k3_of(piece.log_ratio[i]);
    piece.ratio[i] = ratio_of(piece.log_ratio[i]);
  }
}

// The sum of of_token(i) over the tokens of a piece, in A.
template <typename A, typename F>
double sum(const Piece& piece, F&& of_token) {
  A lanes[kLanes] = {};
  for (int64_t i = 0; i < piece.lanes_end; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += of_token(i + j);
  }
  double total = 0;
  for (const A x : lanes) total += x;
  return total;
}

int64_t count(const Piece& piece, const int32_t* flags) {
  return static_cast<int64_t>(sum<int32_t>(piece, [=](int64_t i) { return flags[i]; }));
}

// The sums that every level takes. A token that is not known has log ratio 0, which adds nothing.
void add_divergence(const Piece& piece, Mismatch& sums) {
  const float *d = piece.log_ratio, *k3 = piece.k3;
  sums.k1 += sum<float>(piece, [=](int64_t i) { return 0 - d[i]; });
  sums.k3 += sum<float>(piece, [=](int64_t i) { return k3[i]; });
  sums.tokens += count(piece, piece.known);
}

// What tokens with ratios of their own are weighted with; 0 of those that are not known.
struct Weighed {
  float weight[kPiece];
  float ratio[kPiece];
  int32_t clipped[kPiece];
};

// Writes the weights of the kept tokens to `weights`, too, which has room for the last lanes.
void weigh(const Piece& piece, RatioBounds bounds, float* weights, Weighed& weighed) {
  for (int64_t i = 0; i < piece.lanes_end; ++i) {
    const float ratio = piece.ratio[i];
    const float weight = bounds.weight_of(ratio);
    const int32_t known = piece.known[i];
    weights[i] = piece.kept[i] ? weight : 0;
    weighed.weight[i] = known ? weight : 0;
    weighed.ratio[i] = known ? ratio : 0;
    weighed.clipped[i] = known & int32_t(bounds.outside(ratio));
  }
}

void add_weights(const Piece& piece, const Weighed& weighed, Mismatch& sums) {
  const float *weight = weighed.weight, *ratio = weighed.ratio;
  sums.weights += sum<float>(piece, [=](int64_t i) { return weight[i]; });
  sums.squares += sum<float>(piece, [=](int64_t i) { return weight[i] * weight[i]; });
  sums.clipped += count(piece, weighed.clipped);
  float largest[kLanes] = {};
  for (int64_t i = 0; i < piece.lanes_end; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      largest[j] = ratio[i + j] > largest[j] ? ratio[i + j] : largest[j];
    }
  }
  for (const float x : largest) sums.largest = x > sums.largest ? x : sums.largest;
}

template <typename T>
Mismatch sequence_weights(const TokenSequence<T>& sequence, const Weighting& weighting,
                          float* weights) {
  const bool of_token = weighting.level == WeightLevel::token;
  Mismatch sums;
  Piece piece;
  Weighed weighed;
  float of_piece[kPiece];
  for (int64_t begin = 0; begin < sequence.tokens; begin += kPiece) {
    const int64_t rest = sequence.tokens - begin, size = rest < kPiece ? rest : kPiece;
    read(sequence, begin, size, weighting.nan_missing, piece);
    add_divergence(piece, sums);
    if (!of_token) continue;
    weigh(piece, weighting.bounds, of_piece, weighed);
    add_weights(piece, weighed, sums);
    std::memcpy(weights + begin, of_piece, size * sizeof(float));
  }
  if (of_token) return sums;
  const float ratio = ratio_of_sequence(-sums.k1, sums.tokens, weighting.level);
  const float weight = weighting.bounds.weight_of(ratio);
  sums.give_all(ratio, weighting.bounds);
  const auto* mask = reinterpret_cast<const uint8_t*>(sequence.mask);
  for (int64_t i = 0; i < sequence.tokens; ++i) {
    weights[i] = mask == nullptr || mask[i] ? weight : 0;
  }
  return sums;
}

}  // namespace

template <typename T>
SequenceKernel<T> weigh_sequence() {
  return sequence_weights<T>;
}

template SequenceKernel<float> weigh_sequence<float>();
template SequenceKernel<torch::headeronly::BFloat16> weigh_sequence<torch::headeronly::BFloat16>();
template SequenceKernel<torch::headeronly::Half> weigh_sequence<torch::headeronly::Half>();

}  // namespace fusedrl::FUSEDRL_LEVEL
