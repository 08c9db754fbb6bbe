// Float vectors of one CPU level, by the compiler's vector extensions.
//
// Compiled once per level: FUSEDRL_LEVEL names the namespace, FUSEDRL_VEC_BYTES the vector width.
// Elements are processed in blocks of two vectors. The order of elements inside a block depends on
// the type (a 32-bit word holds two bfloat16, split by a shift and an and), and load and store
// agree on it.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fusedrl::FUSEDRL_LEVEL {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

using F = float __attribute__((vector_size(FUSEDRL_VEC_BYTES)));
using U = uint32_t __attribute__((vector_size(FUSEDRL_VEC_BYTES)));

constexpr int kLanes = FUSEDRL_VEC_BYTES / sizeof(float);
constexpr int kBlock = 2 * kLanes;

struct Block {
  F a, b;
};

inline F splat(float x) { return F{} + x; }

// The second operand if either is NaN. One instruction, where a ternary is compiled to two.
inline F max(F x, F y) {
#if defined(__AVX512F__)
  return (F)_mm512_maskz_max_ps(0xffff, (__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

inline float max_of(F x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline double sum_of(F x) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

template <typename V>
inline V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Block load(const float* p) { return {load_raw<F>(p), load_raw<F>(p + kLanes)}; }

inline void store(float* p, Block x) { std::memcpy(p, &x, sizeof x); }

inline Block load(const BFloat16* p) {
  const U words = load_raw<U>(p);
  return {(F)(words << 16), (F)(words & 0xffff0000u)};
}

// Round to nearest even; NaN keeps its top bits and stays NaN.
inline U rounded_to_bfloat16(F x) {
  const U bits = (U)x;
  const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x != x ? (bits | 0x400000u) : rounded;
}

inline void store(BFloat16* p, Block x) {
  const U words = (rounded_to_bfloat16(x.a) >> 16) | (rounded_to_bfloat16(x.b) & 0xffff0000u);
  std::memcpy(p, &words, sizeof words);
}

#if defined(__AVX512F__)
inline F widen(const Half* p) { return (F)_mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(p)); }

inline __m256i narrow(F x) {
  return _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}

inline Block load(const Half* p) { return {widen(p), widen(p + kLanes)}; }

inline void store(Half* p, Block x) {
  const __m256i halves[] = {narrow(x.a), narrow(x.b)};
  std::memcpy(p, halves, sizeof halves);
}
#elif defined(__F16C__)
inline F widen(const Half* p) { return (F)_mm256_cvtph_ps(load_raw<__m128i>(p)); }

inline __m128i narrow(F x) { return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

inline Block load(const Half* p) { return {widen(p), widen(p + kLanes)}; }

inline void store(Half* p, Block x) {
  const __m128i halves[] = {narrow(x.a), narrow(x.b)};
  std::memcpy(p, halves, sizeof halves);
}
#else
inline Block load(const Half* p) {
  Block x;
  for (int i = 0; i < kLanes; ++i) {
    x.a[i] = static_cast<float>(p[i]);
    x.b[i] = static_cast<float>(p[i + kLanes]);
  }
  return x;
}

inline void store(Half* p, Block x) {
  for (int i = 0; i < kLanes; ++i) {
    p[i] = Half(x.a[i]);
    p[i + kLanes] = Half(x.b[i]);
  }
}
#endif

// The first `count` elements of a block that may end outside the row; the rest are `fill`.
template <typename T>
inline Block load_part(const T* p, int64_t count, T fill) {
  T buffer[kBlock];
  for (int i = 0; i < kBlock; ++i) buffer[i] = i < count ? p[i] : fill;
  return load(buffer);
}

template <typename T>
inline void store_part(T* p, int64_t count, Block x) {
  T buffer[kBlock];
  store(buffer, x);
  std::memcpy(p, buffer, count * sizeof(T));
}

// Prefetches ahead of the loads, as the hardware stops prefetching at the end of every page.
constexpr int64_t kPrefetchBytes = 2048;

// Calls f(block, start) for every block of `count` elements, the last one padded with `fill`.
template <typename T, typename Body>
inline void for_each_block(const T* p, int64_t count, T fill, Body&& f) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    __builtin_prefetch(reinterpret_cast<const char*>(p + i) + kPrefetchBytes);
    f(load(p + i), i);
  }
  if (i < count) f(load_part(p + i, count - i, fill), i);
}

// The same for two rows, with f(block, block of the second row, start).
template <typename T, typename Body>
inline void for_each_block_pair(const T* p, const T* q, int64_t count, T fill, Body&& f) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    __builtin_prefetch(reinterpret_cast<const char*>(p + i) + kPrefetchBytes);
    __builtin_prefetch(reinterpret_cast<const char*>(q + i) + kPrefetchBytes);
    f(load(p + i), load(q + i), i);
  }
  if (i < count) f(load_part(p + i, count - i, fill), load_part(q + i, count - i, fill), i);
}

// The largest element; NaN if the last element of a lane is NaN.
template <typename T>
inline float max_element(const T* p, int64_t count) {
  F max_a = splat(-INFINITY), max_b = max_a;
  for_each_block(p, count, T(-INFINITY), [&](Block x, int64_t) {
    max_a = max(x.a, max_a);
    max_b = max(x.b, max_b);
  });
  return max_of(max(max_a, max_b));
}

constexpr float kLog2E = 1.44269504f;

// 2^x in this range is a normal number.
constexpr float kExp2Min = -125.0f;
constexpr float kExp2Max = 125.0f;

// x, or `low` below it; NaN stays NaN.
inline F clamp_below(F x, float low) { return max(splat(low), x); }

// A power of two as factor * scale, so that a sum of powers takes one fused multiply-add each.
struct Power {
  F factor, scale;
};

// 2^(x * c) for x * c in [kExp2Min, kExp2Max], within 2 ulp: 2^n * 2^r with |r| <= 1/2 and a
// degree-5 polynomial fitted for the least relative error (9e-8). NaN stays NaN.
inline Power exp2_of_product(F x, float c) {
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves n, biased, in the low bits.
  constexpr float kRound = 12582912.0f + 127.0f;
  const F shifted = x * c + kRound;
  const F r = x * c - (shifted - kRound);
  F p = splat(0.001326459f);
  p = p * r + 0.00967162f;
  p = p * r + 0.05550735f;
  p = p * r + 0.24022241f;
  p = p * r + 0.693147f;
  p = p * r + 1.0f;
  return {p, (F)((U)shifted << 23)};
}

// 2^(x * c) for c > 0 and x * c up to kExp2Max; 0 below kExp2Min. NaN stays NaN.
inline F exp2_or_zero(F x, float c) {
  const Power e = exp2_of_product(x, c);
  const F power = e.factor * e.scale;
  return x < splat(kExp2Min / c) ? F{} : power;
}

// log x for positive normal x, by 2^n m with m in [sqrt(1/2), sqrt(2)) and the series of
// log m = 2 atanh((m - 1) / (m + 1)), cut where its next term is 2e-9 of it. `less_one` is x - 1
// with all its digits, which the result keeps where x is near 1. Some finite number for 0; NaN
// stays NaN.
inline F log_of(F x, F less_one) {
  using I = int32_t __attribute__((vector_size(FUSEDRL_VEC_BYTES)));
  constexpr uint32_t kRootHalf = 0x3f3504f3u;
  const U bits = (U)x - kRootHalf;
  const F n = __builtin_convertvector((I)bits >> 23, F);
  const F m = (F)((bits & 0x7fffffu) + kRootHalf);
  const F s = (n == F{} ? less_one : m - 1.0f) / (m + 1.0f), square = s * s;
  F series = square * (2.0f / 9) + 2.0f / 7;
  series = square * series + 2.0f / 5;
  series = square * series + 2.0f / 3;
  series = square * series * s + 2.0f * s;
  return x != x ? x : n * 0.693147181f + series;
}

}  // namespace fusedrl::FUSEDRL_LEVEL
