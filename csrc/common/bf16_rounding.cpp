// Rounds float32 to bfloat16, 16 elements at a time, with error diffusion: equal rounding errors of
// many classes would add up along the common part of their weights, so the error of an entry is
// carried to the next one of its lane, unless the weights there are much larger.
#include "common/bf16_rounding.h"

#include <immintrin.h>

#include <cfloat>
#include <cmath>

#include "common/bf16_products.h"
#include "common/bf16_vectors.h"

namespace fusedrl::avx512_bf16 {
namespace {

constexpr float kSmall = 0x1p-11f;        // of a row's largest term: smaller residuals are dropped
constexpr float kMostDropped = 0x1p-12f;  // squares of them, in squares of the largest term
constexpr float kMostRounded = 0x1p127f;  // larger entries may round to infinity
constexpr float kMostGrowth = 2;          // of the norm that what rounding takes is multiplied by

__m512 widened(__m256i halves) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

// x rounded to bfloat16, and its residual; 0 for infinities. Finite values stay finite.
struct Split {
  __m256i high, rest;

  explicit Split(__m512 x) : high((__m256i)_mm512_cvtneps_pbh(bounded(x))) {
    const __m512 less = _mm512_sub_ps(x, widened(high));
    const __mmask16 finite = _mm512_cmp_ps_mask(less, less, _CMP_ORD_Q);
    rest = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(finite, less));
  }

 private:
  static __m512 bounded(__m512 x) {
    const __m512 magnitude = _mm512_abs_ps(x), most = _mm512_set1_ps(0x1.fep127f);
    const __mmask16 finite = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(finite, magnitude, most, _CMP_GT_OQ);
    const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_mask_or_ps(x, above, sign, most);
  }
};

void store_words(uint32_t* row, int64_t i, int64_t columns, __m256i halves) {
  const auto lanes = __mmask8(first_lanes((columns + 1) / 2 - i / 2));
  _mm256_mask_storeu_epi32(row + i / 2, lanes, halves);
}

// The magnitudes of a row's terms in 16 classes.
__m512 terms_of(__m512 entries, const float* norms, __mmask16 lanes) {
  return _mm512_abs_ps(_mm512_mul_ps(entries, _mm512_maskz_loadu_ps(lanes, norms)));
}

struct Extent {
  float largest;  // term that is a number
  bool finite;    // all terms, and entries rounded, too
};

Extent extent_of(const float* from, const float* norms, int64_t columns) {
  __m512 largest = _mm512_setzero_ps(), largest_entry = largest;
  __mmask16 numbers = 0xffff;
  for (int64_t i = 0; i < columns; i += kVector) {
    const __mmask16 lanes = first_lanes(columns - i);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, from + i), term = terms_of(x, norms + i, lanes);
    numbers &= _mm512_cmp_ps_mask(term, term, _CMP_ORD_Q);
    largest = _mm512_max_ps(term, largest);  // this operand order skips NaN
    largest_entry = _mm512_max_ps(_mm512_abs_ps(x), largest_entry);
  }
  const float most = _mm512_reduce_max_ps(largest);
  const bool rounds = _mm512_reduce_max_ps(largest_entry) < kMostRounded;
  return {most, numbers == 0xffff && most < INFINITY && rounds};
}

// The sum of squares of terms up to a limit, and the number of terms above it.
struct Small {
  float squares;  // in units of their size
  int others = 0;

  Small(const float* from, const float* norms, int64_t columns, float limit, float unit) {
    const __m512 limits = _mm512_set1_ps(limit), units = _mm512_set1_ps(unit);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < columns; i += kVector) {
      const __mmask16 lanes = first_lanes(columns - i);
      const __m512 term = terms_of(_mm512_maskz_loadu_ps(lanes, from + i), norms + i, lanes);
      const __mmask16 small = _mm512_cmp_ps_mask(term, limits, _CMP_LE_OQ);
      const __m512 share = _mm512_maskz_mul_ps(small, term, units);
      sum = _mm512_fmadd_ps(share, share, sum);
      others += kVector - __builtin_popcount(small);
    }
    squares = _mm512_reduce_add_ps(sum);
  }
};

}  // namespace

void norms_of_rows(float* to, Bf16Matrix b, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    __m512d sum = _mm512_setzero_pd();  // of squares that float32 may not hold
    for (int64_t i = 0; i < columns; i += kVector) {
      const __mmask16 lanes = first_lanes(columns - i);
      const __m512 x = widened(_mm256_maskz_loadu_epi16(lanes, b.data + r * b.row + i));
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
      sum = _mm512_fmadd_pd(low, low, _mm512_fmadd_pd(high, high, sum));
    }
    to[r] = static_cast<float>(std::sqrt(_mm512_reduce_add_pd(sum)));
  }
}

float limit_of_rests(const float* from, const float* norms, int64_t columns, bool rounds,
                     RowScale& row) {
  const Extent extent = extent_of(from, norms, columns);
  const float largest = std::fmax(row.largest, extent.largest);
  const float unit = largest > 0 ? 1 / largest : 0.0f, shrunk = row.largest * unit;
  float limit = kSmall * largest;
  Small small(from, norms, columns, limit, unit);
  const float before = row.dropped * shrunk * shrunk, dropped = before + small.squares;
  const bool drops = extent.finite && small.others <= kMostRests && dropped <= kMostDropped;
  row = {largest, drops ? dropped : before};
  if (!drops && !(rounds && extent.finite)) return kKeepsAll;
  while (small.others > kMostRests) {
    limit = std::fmax(2 * limit, FLT_MIN);  // it may have been rounded to 0
    small = Small(from, norms, columns, limit, unit);
  }
  return limit;
}

int round_row(uint32_t* to, const float* from, const float* norms, int64_t columns, float limit,
              Rest* rests) {
  constexpr int kChains = 4;  // independent chains of lanes, to hide the latency of rounding
  const __m512 limits = _mm512_set1_ps(limit), growth = _mm512_set1_ps(kMostGrowth);
  __m512 lost[kChains], most_norms[kChains];  // carried errors, and the norms of the next classes
  for (__m512& x : lost) x = _mm512_setzero_ps();
  for (__m512& x : most_norms) x = _mm512_setzero_ps();
  int count = 0;
  for (int64_t first = 0; first < columns; first += kChains * kVector) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) {
      const int64_t i = first + chain * kVector;
      if (i >= columns) break;
      const __mmask16 lanes = first_lanes(columns - i);
      const __m512 x = _mm512_maskz_loadu_ps(lanes, from + i);
      const __m512 norm = _mm512_maskz_loadu_ps(lanes, norms + i);
      // Zeros stay zero, as their class may have weights of any size.
      const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __mmask16 takes = _mm512_mask_cmp_ps_mask(some, norm, most_norms[chain], _CMP_LE_OQ);
      const __m512 term = _mm512_abs_ps(_mm512_mul_ps(x, norm));
      const __mmask16 large = _mm512_cmp_ps_mask(term, limits, _CMP_NLE_UQ);
      const __m512 whole = _mm512_mask_add_ps(x, takes, x, lost[chain]);
      const auto rounded = (__m256i)_mm512_cvtneps_pbh(whole);
      store_words(to, i, columns, rounded);
      const __m512 rest = _mm512_sub_ps(whole, widened(rounded));
      lost[chain] = _mm512_mask_mov_ps(lost[chain], some, rest);
      most_norms[chain] = _mm512_mask_mul_ps(most_norms[chain], some, norm, growth);
      if (large == 0) continue;
      lost[chain] = _mm512_mask_mov_ps(lost[chain], large, _mm512_setzero_ps());
      alignas(64) float values[kVector];
      _mm512_store_ps(values, rest);
      for (unsigned lanes = large; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        rests[count++] = {i + lane, values[lane]};
      }
    }
  }
  int64_t last = columns - 1;
  while (last >= 0 && from[last] == 0) --last;
  if (last < 0) return count;
  __m512 sum = _mm512_setzero_ps();
  for (int chain = 0; chain < kChains; ++chain) {
    const __mmask16 takes =
        _mm512_cmp_ps_mask(_mm512_set1_ps(norms[last]), most_norms[chain], _CMP_LE_OQ);
    sum = _mm512_mask_add_ps(sum, takes, sum, lost[chain]);
  }
  rests[count++] = {last, _mm512_reduce_add_ps(sum)};
  return count;
}

void split_row(uint32_t* to, uint32_t* rest, const float* from, int64_t columns) {
  for (int64_t i = 0; i < columns; i += kVector) {
    const Split x(_mm512_maskz_loadu_ps(first_lanes(columns - i), from + i));
    store_words(to, i, columns, x.high);
    store_words(rest, i, columns, x.rest);
  }
}

void add_rests(float* to, const Rest* rests, int count, Bf16Matrix b, int64_t columns) {
  for (int64_t i = 0; i < columns; i += kVector) {
    const __mmask16 lanes = first_lanes(columns - i);
    __m512 sum = _mm512_maskz_loadu_ps(lanes, to + i);
    for (int k = 0; k < count; ++k) {
      const __m512 row = widened(_mm256_maskz_loadu_epi16(lanes, b.data + rests[k].at * b.row + i));
      sum = _mm512_fmadd_ps(_mm512_set1_ps(rests[k].value), row, sum);
    }
    _mm512_mask_storeu_ps(to + i, lanes, sum);
  }
}

void pairs_of_rows(uint32_t* to, uint32_t* rest, FloatMatrix from, int64_t rows, int64_t columns) {
  const auto interleaved = [](__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  };
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t i = 0; i < columns; i += kVector) {
      const __mmask16 lanes = first_lanes(columns - i);
      const Split x(_mm512_maskz_loadu_ps(lanes, from.at(r, i)));
      const Split y(r + 1 < rows ? _mm512_maskz_loadu_ps(lanes, from.at(r + 1, i))
                                 : _mm512_setzero_ps());
      const int64_t at = r / 2 * columns + i;
      _mm512_mask_storeu_epi32(to + at, lanes, interleaved(x.high, y.high));
      if (rest != nullptr) {
        _mm512_mask_storeu_epi32(rest + at, lanes, interleaved(x.rest, y.rest));
      }
    }
  }
}

}  // namespace fusedrl::avx512_bf16
