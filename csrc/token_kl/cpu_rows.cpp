// One elementwise pass over a piece of tokens. Estimator and flags are compile-time constants, and
// loops have no branches, so that compilers vectorise them. Compiled once per CPU level.
#include "token_kl/cpu_rows.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

// Tokens per step. The last step is padded, so that the result of a token does not depend on its
// position.
constexpr int64_t kTogether = 32;

// Elements of a buffer. Not a multiple of a page: loads would wait for stores to another buffer at
// the same page offset.
constexpr int64_t kApart = kTokenPiece + kTogether;

// As wide as the values that it selects, as loops over mixed widths are not vectorised well.
template <typename A>
using Flag = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

template <typename T>
using Wide = typename Accumulate<T>::type;

// The number of tokens including the padding of the last step.
inline int64_t whole(int64_t tokens) { return (tokens + kTogether - 1) / kTogether * kTogether; }

inline void widen(const BFloat16* from, int64_t tokens, float* to) {
#pragma GCC ivdep
  for (int64_t i = 0; i < tokens; ++i) {
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i].x) << 16);
  }
}

inline void widen(const Half* from, int64_t tokens, float* to) {
  for (int64_t i = 0; i < tokens; i += kBlock) store(to + i, load(from + i));
}

// Round to nearest even; NaN keeps its top bits and stays NaN.
inline void narrow(const float* from, int64_t tokens, BFloat16* to) {
#pragma GCC ivdep
  for (int64_t i = 0; i < tokens; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    to[i].x = static_cast<uint16_t>((from[i] != from[i] ? bits | 0x400000u : rounded) >> 16);
  }
}

inline void narrow(float* from, int64_t tokens, Half* to) {
  for (int64_t i = 0; i < tokens; i += kBlock) store(to + i, load(from + i));
}

// The input of a loop: used in place if it has the type of the computation and needs no padding,
// else copied here and padded with zeros.
template <typename T>
class Input {
 public:
  const Wide<T>* of(const T* values, int64_t tokens) {
    if (values == nullptr) return nullptr;
    if (tokens < kTogether) {
      std::fill(std::copy_n(values, tokens, last_), last_ + kTogether, T(0));
      values = last_;
    }
    if constexpr (std::is_same_v<T, Wide<T>>) return values;
    if constexpr (!std::is_same_v<T, Wide<T>>) widen(values, whole(tokens), wide_);
    return wide_;
  }

 private:
  T last_[kTogether];
  Wide<T> wide_[kApart];
};

// The output of a loop, and its copy to the destination.
template <typename T>
class Output {
 public:
  Output(T* values, int64_t tokens) : values_(values), tokens_(tokens) {}

  Wide<T>* place() {
    if constexpr (std::is_same_v<T, Wide<T>>) return tokens_ < kTogether ? wide_ : values_;
    return wide_;
  }

  void finish() {
    if constexpr (std::is_same_v<T, Wide<T>>) {
      if (tokens_ < kTogether) std::copy_n(wide_, tokens_, values_);
    } else if (tokens_ < kTogether) {
      T last[kTogether];
      narrow(wide_, kTogether, last);
      std::copy_n(last, tokens_, values_);
    } else {
      narrow(wide_, tokens_, values_);
    }
  }

 private:
  T* values_;
  int64_t tokens_;
  Wide<T> wide_[kApart];
};

// Calls body(d, dropped, drops) with the differences of log-probs and, where `drops`, a flag for
// each token. Values under a mask are loaded, and left out by selection.
template <typename T, typename Body>
void with_differences(const TokenPiece<T>& piece, int64_t tokens, Body&& body) {
  using A = Wide<T>;
  Input<T> policy, reference;
  const A* p = policy.of(piece.log_probs, tokens);
  const A* q = reference.of(piece.ref_log_probs, tokens);
  const auto d = [=](int64_t i) { return q[i] - p[i]; };
  if (piece.mask == nullptr && !piece.nan_missing) return body(d, nullptr, std::false_type());
  Flag<A> dropped[kApart];
  const int64_t count = whole(tokens);
  if (piece.mask == nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) dropped[i] = (p[i] != p[i]) | (q[i] != q[i]);
    return body(d, dropped, std::true_type());
  }
  std::fill(dropped + tokens, dropped + count, 0);
  const auto* mask = reinterpret_cast<const uint8_t*>(piece.mask);
#pragma GCC ivdep
  for (int64_t i = 0; i < tokens; ++i) dropped[i] = mask[i] == 0;
  if (piece.nan_missing) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) dropped[i] |= (p[i] != p[i]) | (q[i] != q[i]);
  }
  body(d, dropped, std::true_type());
}

template <Estimator kind, typename T>
void forward(const TokenPiece<T>& piece, int64_t tokens, Wide<T> weight) {
  using A = Wide<T>;
  const int64_t count = whole(tokens);
  Output<T> kl_out(piece.out, tokens), reward_out(piece.penalised, tokens);
  A *kl = kl_out.place(), *after = reward_out.place();
  Input<T> reward_in;
  const A* before = reward_in.of(piece.reward, tokens);
  with_differences(piece, tokens, [=](auto d, const Flag<A>* dropped, auto drops) {
    const auto kl_at = [=](int64_t i) {
      const A value = kl_of(d(i), kind);
      if constexpr (drops) return dropped[i] ? A(0) : value;
      return value;
    };
    if (before == nullptr) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) kl[i] = kl_at(i);
      return;
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const A value = kl_at(i), reward = before[i], penalised = reward - weight * value;
      kl[i] = value;
      after[i] = drops && dropped[i] ? reward : penalised;
    }
  });
  kl_out.finish();
  if (before != nullptr) reward_out.finish();
}

template <Estimator kind, typename T>
void backward(const TokenPiece<T>& piece, int64_t tokens, Wide<T> weight) {
  using A = Wide<T>;
  const int64_t count = whole(tokens);
  Output<T> out(piece.out, tokens);
  A* grad = out.place();
  Input<T> kl_in, reward_in;
  const A* of_kl = kl_in.of(piece.grad_kl, tokens);
  const A* of_reward = reward_in.of(piece.reward, tokens);
  with_differences(piece, tokens, [=](auto d, const Flag<A>* dropped, auto drops) {
    const auto write = [=](auto of_both) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) {
        const A value = -of_both(i) * kl_slope_of(d(i), kind);
        grad[i] = drops && dropped[i] ? A(0) : value;
      }
    };
    if (of_reward == nullptr) return write([=](int64_t i) { return of_kl[i]; });
    if (of_kl == nullptr) return write([=](int64_t i) { return -(weight * of_reward[i]); });
    write([=](int64_t i) { return of_kl[i] - weight * of_reward[i]; });
  });
  out.finish();
}

template <Estimator kind, bool is_backward, typename T>
void compute(const TokenPiece<T>& piece, int64_t tokens, Wide<T> weight) {
  const auto run = [=](const TokenPiece<T>& part, int64_t count) {
    if constexpr (is_backward) return backward<kind>(part, count, weight);
    forward<kind>(part, count, weight);
  };
  const int64_t left = tokens % kTogether;
  if (tokens > left) run(piece, tokens - left);
  if (left > 0) run(piece.from(tokens - left), left);
}

template <Estimator kind, typename T>
TokenKernel<T> kernel_of(bool is_backward) {
  return is_backward ? compute<kind, true, T> : compute<kind, false, T>;
}

}  // namespace

template <typename T>
TokenKernel<T> token_kernel(Estimator estimator, bool is_backward) {
  switch (estimator) {
    case Estimator::k1:
      return kernel_of<Estimator::k1, T>(is_backward);
    case Estimator::k2:
      return kernel_of<Estimator::k2, T>(is_backward);
    case Estimator::k3:
      return kernel_of<Estimator::k3, T>(is_backward);
    default:
      return kernel_of<Estimator::abs, T>(is_backward);
  }
}

template TokenKernel<float> token_kernel<float>(Estimator, bool);
template TokenKernel<double> token_kernel<double>(Estimator, bool);
template TokenKernel<BFloat16> token_kernel<BFloat16>(Estimator, bool);
template TokenKernel<Half> token_kernel<Half>(Estimator, bool);

}  // namespace fusedrl::FUSEDRL_LEVEL
