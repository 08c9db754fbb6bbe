// Where the samples of a list lie, as the torch-free bindings tell the kernel of the CPU.
#pragma once

#include <cstdint>

namespace fusedrl {

enum class SampleDtype : int64_t { float32, bfloat16, float16, float64 };

// One sample, contiguous on the CPU. A reward has one value a token, or one for all of them.
struct SampleMemory {
  const void* log_probs;
  const void* ref_log_probs;
  const void* mask;    // null keeps all
  const void* reward;  // null for none
  int64_t tokens;
  int64_t rewards;
};

}  // namespace fusedrl
