// One elementwise pass over a piece of tokens. Estimator and flags are compile-time constants of
// the loops and nothing in them branches, so that compilers vectorise them. Compiled once a CPU
// level.
#include "token_kl/cpu_rows.h"

#include <bit>
#include <type_traits>

#include "common/vec.h"

namespace fusedrl::FUSEDRL_LEVEL {
namespace {

// Tokens are computed so many at a time, the last ones beside zeros: a token has the same bits
// wherever it stands.
constexpr int64_t kTogether = 32;

// Elements of a buffer. Were buffers whole pages apart, loads of one would wait for stores to
// another whose addresses end alike.
constexpr int64_t kApart = kTokenPiece + kTogether;

// As wide as what it selects: loops over mixed widths are not vectorised well.
template <typename A>
using Flag = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

template <typename T>
using Wide = typename Accumulate<T>::type;

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

// Values that a loop reads: where they lie if it computes in their type, or widened here.
template <typename T>
class Input {
 public:
  const Wide<T>* of(const T* values, int64_t tokens) {
    if constexpr (std::is_same_v<T, Wide<T>>) return values;
    if constexpr (!std::is_same_v<T, Wide<T>>) widen(values, tokens, wide_);
    return wide_;
  }

 private:
  Wide<T> wide_[kApart];
};

// Values that a loop writes, and how they come to where they belong.
template <typename T>
class Output {
 public:
  explicit Output(T* values) : values_(values) {}

  Wide<T>* place() {
    if constexpr (std::is_same_v<T, Wide<T>>) return values_;
    return wide_;
  }

  void finish(int64_t tokens) {
    if constexpr (!std::is_same_v<T, Wide<T>>) narrow(wide_, tokens, values_);
  }

 private:
  T* values_;
  Wide<T> wide_[kApart];
};

// Calls body(d, dropped, drops) with the differences of log-probs and, where `drops`, a flag for
// each token. Values under a mask are loaded, and left out by selection.
template <typename T, typename Body>
void with_differences(const TokenPairs<T>& pairs, int64_t tokens, Body&& body) {
  using A = Wide<T>;
  Input<T> policy, reference;
  const A* p = policy.of(pairs.log_probs, tokens);
  const A* q = reference.of(pairs.ref_log_probs, tokens);
  const auto d = [=](int64_t i) { return q[i] - p[i]; };
  Flag<A> dropped[kApart];
  const auto* mask = reinterpret_cast<const uint8_t*>(pairs.mask);
  if (mask == nullptr && !pairs.nan_missing) return body(d, dropped, std::false_type());
  if (mask == nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < tokens; ++i) dropped[i] = (p[i] != p[i]) | (q[i] != q[i]);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < tokens; ++i) dropped[i] = mask[i] == 0;
    if (pairs.nan_missing) {
#pragma GCC ivdep
      for (int64_t i = 0; i < tokens; ++i) dropped[i] |= (p[i] != p[i]) | (q[i] != q[i]);
    }
  }
  body(d, dropped, std::true_type());
}

template <Estimator kind, typename T>
void forward_together(const TokenPairs<T>& pairs, int64_t blocks, Wide<T> weight,
                      const PieceRewards<T>& rewards, T* kl) {
  using A = Wide<T>;
  const int64_t tokens = blocks * kTogether;
  Output<T> kl_out(kl), reward_out(rewards.after);
  A *values = kl_out.place(), *after = reward_out.place();
  Input<T> reward_in;
  const A* before = rewards.before == nullptr ? nullptr : reward_in.of(rewards.before, tokens);
  with_differences(pairs, tokens, [=](auto d, Flag<A>* dropped, auto drops) {
    const auto kl_at = [=](int64_t i) {
      const A value = kl_of(d(i), kind);
      if constexpr (drops) return dropped[i] ? A(0) : value;
      return value;
    };
    if (before == nullptr) {
#pragma GCC ivdep
      for (int64_t i = 0; i < tokens; ++i) values[i] = kl_at(i);
      return;
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < tokens; ++i) {
      const A value = kl_at(i), reward = before[i], penalised = reward - weight * value;
      values[i] = value;
      after[i] = drops && dropped[i] ? reward : penalised;
    }
  });
  kl_out.finish(tokens);
  if (before != nullptr) reward_out.finish(tokens);
}

template <Estimator kind, typename T>
void backward_together(const TokenPairs<T>& pairs, int64_t blocks, Wide<T> weight,
                       const PieceGradients<T>& upstream, T* grad_log_probs) {
  using A = Wide<T>;
  const int64_t tokens = blocks * kTogether;
  Output<T> out(grad_log_probs);
  A* grad = out.place();
  Input<T> kl_in, reward_in;
  const A* of_kl = upstream.kl == nullptr ? nullptr : kl_in.of(upstream.kl, tokens);
  const A* of_reward = upstream.reward == nullptr ? nullptr : reward_in.of(upstream.reward, tokens);
  with_differences(pairs, tokens, [=](auto d, Flag<A>* dropped, auto drops) {
    const auto write = [=](auto of_both) {
#pragma GCC ivdep
      for (int64_t i = 0; i < tokens; ++i) {
        const A value = -of_both(i) * kl_slope_of(d(i), kind);
        grad[i] = drops && dropped[i] ? A(0) : value;
      }
    };
    if (of_reward == nullptr) return write([=](int64_t i) { return of_kl[i]; });
    if (of_kl == nullptr) return write([=](int64_t i) { return -(weight * of_reward[i]); });
    write([=](int64_t i) { return of_kl[i] - weight * of_reward[i]; });
  });
  out.finish(tokens);
}

// The last tokens of a column beside zeros; null for a column there is not.
template <typename T>
class Padded {
 public:
  Padded(const T* column, int64_t tokens) : given_(column != nullptr) {
    for (int64_t i = 0; given_ && i < tokens; ++i) values_[i] = column[i];
  }

  const T* get() const { return given_ ? values_ : nullptr; }

 private:
  bool given_;
  T values_[kTogether] = {};
};

// Calls together(pairs, tokens, done) for the tokens of a piece that fill what is computed
// together, and rest(pairs, tokens, done) for copies of those that are left, `done` tokens behind
// its start.
template <typename T, typename Together, typename Rest>
void split_piece(const TokenPairs<T>& pairs, int64_t tokens, Together&& together, Rest&& rest) {
  const int64_t left = tokens % kTogether, done = tokens - left;
  if (done > 0) together(pairs, done);
  if (left == 0) return;
  const Padded<T> p(pairs.log_probs + done, left), q(pairs.ref_log_probs + done, left);
  const Padded<bool> mask(pairs.mask == nullptr ? nullptr : pairs.mask + done, left);
  rest(TokenPairs<T>{p.get(), q.get(), mask.get(), pairs.nan_missing}, left, done);
}

template <typename T>
void copy(const T* from, int64_t tokens, T* to) {
#pragma GCC ivdep
  for (int64_t i = 0; i < tokens; ++i) to[i] = from[i];
}

template <Estimator kind, typename T>
void forward(const TokenPairs<T>& piece, int64_t tokens, Wide<T> weight,
             const PieceRewards<T>& rewards, T* kl) {
  split_piece(
      piece, tokens,
      [&](const TokenPairs<T>& pairs, int64_t count) {
        forward_together<kind>(pairs, count / kTogether, weight, rewards, kl);
      },
      [&](const TokenPairs<T>& pairs, int64_t count, int64_t done) {
        const bool has_rewards = rewards.before != nullptr;
        const Padded<T> before(has_rewards ? rewards.before + done : nullptr, count);
        T values[kTogether], after[kTogether];
        forward_together<kind>(pairs, 1, weight, {before.get(), after}, values);
        copy(values, count, kl + done);
        if (has_rewards) copy(after, count, rewards.after + done);
      });
}

template <Estimator kind, typename T>
void backward(const TokenPairs<T>& piece, int64_t tokens, Wide<T> weight,
              const PieceGradients<T>& upstream, T* grad_log_probs) {
  split_piece(
      piece, tokens,
      [&](const TokenPairs<T>& pairs, int64_t count) {
        backward_together<kind>(pairs, count / kTogether, weight, upstream, grad_log_probs);
      },
      [&](const TokenPairs<T>& pairs, int64_t count, int64_t done) {
        const Padded<T> of_kl(upstream.kl == nullptr ? nullptr : upstream.kl + done, count);
        const Padded<T> of_reward(upstream.reward == nullptr ? nullptr : upstream.reward + done,
                                  count);
        T grad[kTogether];
        backward_together<kind>(pairs, 1, weight, {of_kl.get(), of_reward.get()}, grad);
        copy(grad, count, grad_log_probs + done);
      });
}

}  // namespace

template <typename T>
TokenKernels<T> token_kernels(Estimator estimator) {
  switch (estimator) {
    case Estimator::k1:
      return {forward<Estimator::k1, T>, backward<Estimator::k1, T>};
    case Estimator::k2:
      return {forward<Estimator::k2, T>, backward<Estimator::k2, T>};
    case Estimator::k3:
      return {forward<Estimator::k3, T>, backward<Estimator::k3, T>};
    default:
      return {forward<Estimator::abs, T>, backward<Estimator::abs, T>};
  }
}

template TokenKernels<float> token_kernels<float>(Estimator);
template TokenKernels<double> token_kernels<double>(Estimator);
template TokenKernels<BFloat16> token_kernels<BFloat16>(Estimator);
template TokenKernels<Half> token_kernels<Half>(Estimator);

}  // namespace fusedrl::FUSEDRL_LEVEL
