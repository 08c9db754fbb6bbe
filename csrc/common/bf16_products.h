// Products of bfloat16 matrices with float32 sums, on CPUs with AVX512-BF16.
#pragma once

#include <cstdint>

#include "common/bf16_rounding.h"
#include "common/cpu_level.h"

namespace fusedrl {

// A bfloat16 matrix [rows, depth] as pairs along its depth, the first of a pair in the low half; an
// odd depth is padded with zero. For a rounded float32 matrix, `rest` has the residuals in
// bfloat16, which doubles the significant bits from 8 to 16; else it is null.
struct Pairs {
  const uint32_t *data, *rest;
  int64_t row, step;  // words between rows, and between pairs
};

// Words between rows of pairs: an odd number of cache lines, because rows at distances of multiples
// of 4096 bytes would evict each other from the cache.
inline int64_t pair_words(int64_t depth) {
  constexpr int64_t kLine = 16;
  return (((depth + 1) / 2 + kLine - 1) / kLine | 1) * kLine;
}

struct Bf16Matrix {
  const BFloat16* data;
  int64_t row;  // elements between rows
};

// out [rows, columns] in float32, `row` elements between its rows.
struct FloatMatrix {
  float* data;
  int64_t row;

  float* at(int64_t i, int64_t j) const { return data + i * row + j; }
};

struct ProductSizes {
  int64_t rows, columns, depth;
};

// The order of summation depends only on the depth.
struct Bf16Products {
  // out = factor a b, or out += factor a b, for b [depth, columns].
  void (*multiply)(FloatMatrix out, Pairs a, Bf16Matrix b, ProductSizes sizes, float factor,
                   bool add);
  // The same for b^T, where b is [columns, depth].
  void (*multiply_transposed)(FloatMatrix out, Pairs a, Bf16Matrix b, ProductSizes sizes,
                              float factor, bool add);
  // `from` [rows, columns] as pairs along its rows, [(rows + 1) / 2, columns] words each. Without
  // `rest` it is rounded.
  void (*pairs_of_rows)(uint32_t* to, uint32_t* rest, FloatMatrix from, int64_t rows,
                        int64_t columns);
  // The Euclidean norms of the rows of b [rows, columns].
  void (*norms_of_rows)(float* to, Bf16Matrix b, int64_t rows, int64_t columns);
  // The largest term of a gradient's entry that may be rounded in the next tile of its row, or
  // kKeepsAll; `norms` are those of the classes' weights. The sum of squares of the rounded terms
  // stays below 2^-12 of the largest one's, unless `rounds` is set and all terms are finite: then
  // only as many residuals are kept as fit into round_row's `rests`.
  float (*limit_of_rests)(const float* from, const float* norms, int64_t columns, bool rounds,
                          RowScale& row);
  // Rounds a row to pairs along its columns. Returns the number of `rests` to add, at most
  // kMostRests + 1: the residuals of terms above the limit, and one for all other terms.
  int (*round_row)(uint32_t* to, const float* from, const float* norms, int64_t columns,
                   float limit, Rest* rests);
  // The same, with the residuals of all entries as pairs.
  void (*split_row)(uint32_t* to, uint32_t* rest, const float* from, int64_t columns);
  // to [columns] += the products of the residuals and the rows of b at their indices.
  void (*add_rests)(float* to, const Rest* rests, int count, Bf16Matrix b, int64_t columns);
};

#if defined(FUSEDRL_BF16_PRODUCTS)
namespace avx512_bf16 {
Bf16Products bf16_products();
void norms_of_rows(float* to, Bf16Matrix b, int64_t rows, int64_t columns);
float limit_of_rests(const float* from, const float* norms, int64_t columns, bool rounds,
                     RowScale& row);
int round_row(uint32_t* to, const float* from, const float* norms, int64_t columns, float limit,
              Rest* rests);
void split_row(uint32_t* to, uint32_t* rest, const float* from, int64_t columns);
void add_rests(float* to, const Rest* rests, int count, Bf16Matrix b, int64_t columns);
void pairs_of_rows(uint32_t* to, uint32_t* rest, FloatMatrix from, int64_t rows, int64_t columns);
}  // namespace avx512_bf16
#endif

// Null if the CPU level has no bfloat16 instructions.
inline const Bf16Products* bf16_products(CpuLevel level) {
#if defined(FUSEDRL_BF16_PRODUCTS)
  if (level >= CpuLevel::avx512_bf16) {  // checked first: filling the table uses the instructions
    static const Bf16Products products = avx512_bf16::bf16_products();
    return &products;
  }
#endif
  (void)level;
  return nullptr;
}

}  // namespace fusedrl
