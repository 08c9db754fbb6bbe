// The vector instructions that the CPU kernels use, chosen once per process.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fusedrl {

enum class CpuLevel { portable, avx2, avx512, avx512_bf16 };

constexpr CpuLevel kCpuLevels[] = {CpuLevel::portable, CpuLevel::avx2, CpuLevel::avx512,
                                   CpuLevel::avx512_bf16};

inline const char* name_of(CpuLevel level) {
  constexpr const char* names[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return names[static_cast<int>(level)];
}

inline CpuLevel best_cpu_level() {
#if defined(FUSEDRL_X86_LEVELS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
#if defined(FUSEDRL_BF16_PRODUCTS)
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return CpuLevel::avx512_bf16;
#endif
  if (avx512) return CpuLevel::avx512;
  if (avx2) return CpuLevel::avx2;
#endif
  return CpuLevel::portable;
}

// The best level of this CPU, or the lower one that FUSEDRL_CPU_LEVEL names.
inline CpuLevel chosen_cpu_level() {
  const CpuLevel best = best_cpu_level();
  const char* forced = std::getenv("FUSEDRL_CPU_LEVEL");
  if (forced == nullptr || *forced == '\0') return best;
  for (const CpuLevel level : kCpuLevels) {
    if (forced == std::string(name_of(level)) && level <= best) return level;
  }
  throw std::runtime_error(std::string("FUSEDRL_CPU_LEVEL: expected portable or a level up to ") +
                           name_of(best) + ", the best of this CPU, got '" + forced +
                           "'; unset it or name a lower level");
}

}  // namespace fusedrl
