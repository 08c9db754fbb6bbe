// Functions that the CPU kernels, the CUDA kernels and host tests share.
#pragma once

#if defined(__CUDACC__)
#define FUSEDRL_HD __host__ __device__ __forceinline__
#else
// Always inlined: an out-of-line copy compiled for one CPU level could be linked into another.
#define FUSEDRL_HD inline __attribute__((always_inline))
#endif
