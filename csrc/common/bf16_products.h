// Products of bfloat16 matrices, summed in float32, on CPUs that have instructions for them.
#pragma once

#include <cstdint>

#include "common/bf16_rounding.h"
#include "common/cpu_level.h"

namespace fusedrl {

// A matrix [rows, depth] of bfloat16 in pairs along its depth, the first of a pair in the low half;
// of an odd depth the last pair ends with a zero. Where float32 was rounded to it, `rest` is what
// bfloat16 keeps of the difference, which makes 16 bits of 8; else null.
struct Pairs {
  const uint32_t *data, *rest;
  int64_t row, step;  // words between rows, and between pairs
};

// Words between rows of pairs, in odd numbers of cache lines: rows that are read together and lie
// multiples of 4096 bytes apart would take each other's place in the cache.
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

// Every element is summed in an order that depends on the depth alone.
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
  // The term up to which entries of a row of gradients may be rounded in its next tile, or
  // kKeepsAll; `norms` are those of the classes' weights. The sum of squares of the terms that are
  // rounded stays below 2^-12 of the largest's, but where it `rounds` what is finite: then no more
  // rests are kept than round_row takes.
  float (*limit_of_rests)(const float* from, const float* norms, int64_t columns, bool rounds,
                          RowScale& row);
  // Rounds a row to pairs along its columns. Returns the number of `rests` that have to be added,
  // at most kMostRests + 1: those of the terms above the limit, and one of what all others lose.
  int (*round_row)(uint32_t* to, const float* from, const float* norms, int64_t columns,
                   float limit, Rest* rests);
  // The same, with the rests of all entries as pairs.
  void (*split_row)(uint32_t* to, uint32_t* rest, const float* from, int64_t columns);
  // to [columns] += the product of the rests and the rows of b that they are at.
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

// Null where this level has none.
inline const Bf16Products* bf16_products(CpuLevel level) {
#if defined(FUSEDRL_BF16_PRODUCTS)
  if (level >= CpuLevel::avx512_bf16) {  // asked first: lower CPUs cannot run what fills the table
    static const Bf16Products products = avx512_bf16::bf16_products();
    return &products;
  }
#endif
  (void)level;
  return nullptr;
}

}  // namespace fusedrl
