// Multiplies a block of rows of `a`, broadcast one pair at a time, by a panel of columns of `b`,
// interleaved in pairs: vdpbf16ps adds both products of a pair to a float32 sum in a register.
#include "common/bf16_products.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/bf16_vectors.h"

namespace fusedrl::avx512_bf16 {
namespace {

constexpr int kPanel = 2 * kVector;   // columns of a panel
constexpr int kRows = 14;             // with two registers of sums each, of 32 registers
constexpr int64_t kDepthPairs = 256;  // of a panel, which then takes 32 KiB

using Panel = uint32_t[kDepthPairs * kPanel];

__mmask32 first_halves(int64_t count) {
  return count >= 32 ? __mmask32(0xffffffff)
                     : __mmask32((uint32_t(1) << std::max<int64_t>(count, 0)) - 1);
}

struct Sums {
  float* out;
  int64_t row, columns;
  float factor;
  bool add;

  void store(int64_t i, __m512 low, __m512 high) const {
    store(out + i * row, low, first_lanes(columns));
    if (columns > kVector) store(out + i * row + kVector, high, first_lanes(columns - kVector));
  }

 private:
  void store(float* to, __m512 sum, __mmask16 lanes) const {
    const __m512 x = _mm512_set1_ps(factor);
    // An explicit FMA: contraction by the compiler would depend on the number of rows in a block.
    sum = add ? _mm512_fmadd_ps(sum, x, _mm512_maskz_loadu_ps(lanes, to)) : _mm512_mul_ps(sum, x);
    if (lanes == 0xffff) {
      _mm512_storeu_ps(to, sum);
    } else {
      _mm512_mask_storeu_ps(to, lanes, sum);
    }
  }
};

template <int Rows, bool Rest>
void multiply_block(Pairs a, const uint32_t* panel, int64_t pairs, Sums sums) {
  __m512 low[Rows], high[Rows];
  for (int i = 0; i < Rows; ++i) low[i] = high[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k) {
    const auto b_low = (__m512bh)_mm512_load_si512(panel + k * kPanel);
    const auto b_high = (__m512bh)_mm512_load_si512(panel + k * kPanel + kVector);
    const auto add = [&](int i, uint32_t pair) __attribute__((always_inline)) {
      const auto x = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
      low[i] = _mm512_dpbf16_ps(low[i], x, b_low);
      high[i] = _mm512_dpbf16_ps(high[i], x, b_high);
    };
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) add(i, a.data[i * a.row + k * a.step]);
    if constexpr (Rest) {
#pragma GCC unroll 14
      for (int i = 0; i < Rows; ++i) add(i, a.rest[i * a.row + k * a.step]);
    }
  }
  for (int i = 0; i < Rows; ++i) sums.store(i, low[i], high[i]);
}

template <bool Rest, size_t... Less>
constexpr auto blocks_of(std::index_sequence<Less...>) {
  return std::array{&multiply_block<static_cast<int>(Less) + 1, Rest>...};
}
constexpr auto kBlocks = blocks_of<false>(std::make_index_sequence<kRows>());
constexpr auto kBlocksWithRest = blocks_of<true>(std::make_index_sequence<kRows>());

// Columns of b [columns, depth]: 16 rows of 16 pairs are transposed at a time.
void transpose_into(uint32_t* panel, const BFloat16* b, int64_t row, int64_t columns,
                    int64_t depth) {
  for (int64_t k = 0; 2 * k < depth; k += kVector) {
    const __mmask32 halves = first_halves(depth - 2 * k);
    for (int first = 0; first < kPanel; first += kVector) {
      __m512i x[16], y[16];
      for (int i = 0; i < 16; ++i) {
        x[i] = first + i < columns ? _mm512_maskz_loadu_epi16(halves, b + (first + i) * row + 2 * k)
                                   : _mm512_setzero_si512();
      }
      for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
      }
      for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
      }
      // Part p of x[4 i + j] has step 4 p + j of rows 4 i to 4 i + 3.
      uint32_t* to = panel + k * kPanel + first;
      for (int j = 0; j < 4; ++j) {
        const __m512i even = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        const auto put = [=](int step, __m512i words) {
          _mm512_store_si512(to + step * kPanel, words);
        };
        put(j, _mm512_shuffle_i32x4(even, even_high, 0x88));
        put(4 + j, _mm512_shuffle_i32x4(odd, odd_high, 0x88));
        put(8 + j, _mm512_shuffle_i32x4(even, even_high, 0xdd));
        put(12 + j, _mm512_shuffle_i32x4(odd, odd_high, 0xdd));
      }
    }
  }
}

// Rows of b [depth, columns], two at a time.
void interleave_into(uint32_t* panel, const BFloat16* b, int64_t row, int64_t columns,
                     int64_t depth) {
  for (int64_t k = 0; 2 * k < depth; ++k) {
    for (int first = 0; first < kPanel; first += kVector) {
      const __mmask16 lanes = first_lanes(columns - first);
      const BFloat16* from = b + 2 * k * row + first;
      const auto words_of = [=](const BFloat16* halves) {
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, halves));
      };
      __m512i words = words_of(from);
      if (2 * k + 1 < depth) {
        words = _mm512_or_si512(words, _mm512_slli_epi32(words_of(from + row), 16));
      }
      _mm512_store_si512(panel + k * kPanel + first, words);
    }
  }
}

// Panels hold the columns of b from `column` on and the depth from `first` on: load(panel, first,
// depth, column, columns).
template <typename Load>
void multiply_panels(FloatMatrix out, Pairs a, ProductSizes sizes, float factor, bool add,
                     Load&& load) {
  alignas(64) Panel panel;
  const auto& blocks = a.rest == nullptr ? kBlocks : kBlocksWithRest;
  // The depth is the outer loop, so that all panels use the same part of `a` from the cache.
  for (int64_t first = 0; first < sizes.depth; first += 2 * kDepthPairs) {
    const int64_t depth = std::min(2 * kDepthPairs, sizes.depth - first);
    for (int64_t column = 0; column < sizes.columns; column += kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, sizes.columns - column);
      load(panel, first, depth, column, columns);
      for (int64_t i = 0; i < sizes.rows; i += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, sizes.rows - i);
        const int64_t at = i * a.row + first / 2 * a.step;
        const uint32_t* rest = a.rest == nullptr ? nullptr : a.rest + at;
        blocks[rows - 1]({a.data + at, rest, a.row, a.step}, panel, (depth + 1) / 2,
                         {out.at(i, column), out.row, columns, factor, add || first > 0});
      }
    }
  }
}

void multiply(FloatMatrix out, Pairs a, Bf16Matrix b, ProductSizes sizes, float factor, bool add) {
  multiply_panels(
      out, a, sizes, factor, add,
      [=](uint32_t* panel, int64_t first, int64_t depth, int64_t column, int64_t columns) {
        interleave_into(panel, b.data + first * b.row + column, b.row, columns, depth);
      });
}

void multiply_transposed(FloatMatrix out, Pairs a, Bf16Matrix b, ProductSizes sizes, float factor,
                         bool add) {
  multiply_panels(
      out, a, sizes, factor, add,
      [=](uint32_t* panel, int64_t first, int64_t depth, int64_t column, int64_t columns) {
        transpose_into(panel, b.data + column * b.row + first, b.row, columns, depth);
      });
}

}  // namespace

Bf16Products bf16_products() {
  return {multiply,       multiply_transposed, pairs_of_rows, norms_of_rows,
          limit_of_rests, round_row,           split_row,     add_rests};
}

}  // namespace fusedrl::avx512_bf16
