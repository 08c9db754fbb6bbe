// Allocates large tensors on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "common/tensor.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fusedrl {

// An uninitialised tensor in huge pages if possible: page faults of small pages take up to a fifth
// of the time of the matrix product that fills it.
inline Tensor new_uninitialised(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                ScalarType dtype) {
  const Tensor out = torch::stable::new_empty(like, sizes, dtype);
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t(2) << 20;
  const uintptr_t first = reinterpret_cast<uintptr_t>(out.const_data_ptr());
  const uintptr_t end = first + static_cast<uintptr_t>(out.numel()) * out.element_size();
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage;
  if (end > begin + kHugePage) {  // only a hint
    (void)madvise(reinterpret_cast<void*>(begin), (end - begin) / kHugePage * kHugePage,
                  MADV_HUGEPAGE);
  }
#endif
  return out;
}

}  // namespace fusedrl
