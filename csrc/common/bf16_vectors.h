// Vectors of the level avx512_bf16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace fusedrl::avx512_bf16 {

constexpr int kVector = 16;  // float32 elements of a register

inline __mmask16 first_lanes(int64_t count) {
  return count >= kVector ? __mmask16(0xffff) : __mmask16((1u << std::max<int64_t>(count, 0)) - 1);
}

}  // namespace fusedrl::avx512_bf16
