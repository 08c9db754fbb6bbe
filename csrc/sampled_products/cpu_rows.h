// The kernels of one entry and of one row of a gradient, for each CPU level.
#pragma once

#include <cstdint>

#include "common/cpu_level.h"
#include "sampled_products/indexed_rows.h"

namespace fusedrl {

template <typename T>
struct SampledKernels {
  float (*dot)(const T* x, const T* y, int64_t width);
  // out = sum_i factors[i] rows[index[i]], summed in float32 and rounded once.
  void (*sum)(const IndexedRows<T>& rows, const float* factors, const int64_t* index, int64_t count,
              T* out);
};

namespace portable {
template <typename T>
SampledKernels<T> sampled_kernels();
}
namespace avx2 {
template <typename T>
SampledKernels<T> sampled_kernels();
}
namespace avx512 {
template <typename T>
SampledKernels<T> sampled_kernels();
}

template <typename T>
SampledKernels<T> sampled_kernels(CpuLevel level) {
#if defined(FUSEDRL_X86_LEVELS)
  if (level >= CpuLevel::avx512) return avx512::sampled_kernels<T>();
  if (level == CpuLevel::avx2) return avx2::sampled_kernels<T>();
#endif
  return portable::sampled_kernels<T>();
}

}  // namespace fusedrl
