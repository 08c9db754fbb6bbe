// Elementwise passes over tiles of logits in cache. Compiled once per CPU level.
#include "common/cpu_rows.h"

#include "common/softcap.h"
#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

void put(float* p, int64_t count, int64_t at, Block x) {
  if (at + kBlock <= count) {
    store(p + at, x);
  } else {
    store_part(p + at, count - at, x);
  }
}

Block part_at(const float* p, int64_t count, int64_t at) {
  return at + kBlock <= count ? load(p + at) : load_part(p + at, count - at, 0.0f);
}

F capped(F x, float cap) {
  constexpr float kMost = 80.0f;
  return softcapped(x, cap, [](F u) {
    const Power e = exp2_of_product(-clamp_below(-clamp_below(u, -kMost), -kMost), kLog2E);
    return e.factor * e.scale;
  });
}

void shape(float* logits, const float* bias, int64_t count, float cap) {
  for_each_block(logits, count, 0.0f, [&](Block x, int64_t i) {
    if (bias != nullptr) {
      const Block b = part_at(bias, count, i);
      x = {x.a + b.a, x.b + b.b};
    }
    if (cap > 0) x = {capped(x.a, cap), capped(x.b, cap)};
    put(logits, count, i, x);
  });
}

void chain(const float* capped, float* grads, int64_t count, float cap) {
  for_each_block(capped, count, 0.0f, [&](Block y, int64_t i) {
    const Block g = part_at(grads, count, i);
    put(grads, count, i, {g.a * softcap_slope(y.a, cap), g.b * softcap_slope(y.b, cap)});
  });
}

}  // namespace

HeadKernels head_kernels() { return {shape, chain}; }

}  // namespace fusedrl::FUSEDRL_LEVEL
