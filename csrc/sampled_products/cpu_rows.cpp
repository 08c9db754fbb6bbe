// Compiled once a CPU level.
#include "sampled_products/cpu_rows.h"

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

template <typename T>
float dot(const T* x, const T* y, int64_t width) {
  F a{}, b{};
  for_each_block_pair(x, y, width, T(0.0f), [&](Block p, Block q, int64_t) {
    a += p.a * q.a;
    b += p.b * q.b;
  });
  return static_cast<float>(sum_of(a + b));
}

// kBlocks blocks of columns in registers, for all rows.
template <int kBlocks, typename T>
void sum_columns(const IndexedRows<T>& rows, int64_t first, const float* factors,
                 const int64_t* index, int64_t count, T* out) {
  Block sums[kBlocks] = {};
  for (int64_t i = 0; i < count; ++i) {
    const T* row = rows.row(index[i]) + first;
    for (int j = 0; j < kBlocks; ++j) {
      const Block x = load(row + j * kBlock);
      sums[j].a += factors[i] * x.a;
      sums[j].b += factors[i] * x.b;
    }
  }
  for (int j = 0; j < kBlocks; ++j) store(out + first + j * kBlock, sums[j]);
}

template <typename T>
void sum(const IndexedRows<T>& rows, const float* factors, const int64_t* index, int64_t count,
         T* out) {
  constexpr int kAtOnce = 4;
  int64_t i = 0;
  for (; i + kAtOnce * kBlock <= rows.width; i += kAtOnce * kBlock) {
    sum_columns<kAtOnce>(rows, i, factors, index, count, out);
  }
  for (; i + kBlock <= rows.width; i += kBlock) {
    sum_columns<1>(rows, i, factors, index, count, out);
  }
  if (i == rows.width) return;
  Block rest{};
  for (int64_t n = 0; n < count; ++n) {
    const Block x = load_part(rows.row(index[n]) + i, rows.width - i, T(0.0f));
    rest.a += factors[n] * x.a;
    rest.b += factors[n] * x.b;
  }
  store_part(out + i, rows.width - i, rest);
}

}  // namespace

template <typename T>
SampledKernels<T> sampled_kernels() {
  return {dot<T>, sum<T>};
}

template SampledKernels<float> sampled_kernels<float>();
template SampledKernels<BFloat16> sampled_kernels<BFloat16>();
template SampledKernels<Half> sampled_kernels<Half>();

}  // namespace fusedrl::FUSEDRL_LEVEL
