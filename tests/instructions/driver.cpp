// Calls every row kernel of one CPU level once, on rows of kElements, for callgrind to count the
// instructions of: after each call it dumps what it has counted under the kernel's name.
#include <torch/headeronly/util/BFloat16.h>
#include <valgrind/callgrind.h>

#include <string>
#include <vector>

#include "exact_kl/cpu_rows.h"
#include "importance_weights/cpu_rows.h"
#include "linear_token_log_probs/cpu_rows.h"
#include "token_kl/cpu_rows.h"
#include "token_log_probs/cpu_rows.h"

namespace {

using namespace fusedrl;
using namespace fusedrl::FUSEDRL_LEVEL;
using torch::headeronly::BFloat16;

constexpr int64_t kElements = 65536;
constexpr float kInverseTemperature = 1.25f;

template <typename Call>
void count(const std::string& name, const Call& call) {
  call();  // binds what libm has
  CALLGRIND_ZERO_STATS;
  call();
  CALLGRIND_DUMP_STATS_AT(name.c_str());
}

// Between -4 and 4, in an order without a pattern.
template <typename T>
std::vector<T> row(uint32_t seed) {
  std::vector<T> values(kElements);
  for (T& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<T>(static_cast<float>(seed >> 8) / (1 << 21) - 4.0f);
  }
  return values;
}

template <typename T>
void of_one_row(const std::string& dtype) {
  const RowKernels<T> kernels = row_kernels<T>();
  const std::vector<T> logits = row<T>(1);
  std::vector<T> grad(kElements);
  const RowGradient gradient{0.5f, 0.25f, 3.0f, {4.0f, 9.0f}, kInverseTemperature};
  count("token_log_probs " + dtype,
        [&] { kernels.part(logits.data(), kElements, kInverseTemperature); });
  count("token_log_probs entropy " + dtype,
        [&] { kernels.part_entropy(logits.data(), kElements, kInverseTemperature); });
  count("token_log_probs backward " + dtype,
        [&] { kernels.backward(logits.data(), grad.data(), kElements, gradient); });
}

template <typename T>
void of_two_rows(const std::string& dtype) {
  const std::vector<T> p = row<T>(1), q = row<T>(2);
  std::vector<T> grad(kElements), grad_ref(kElements);
  const Pair<Normalizer> normalizers{{4.0f, 9.0f}, {4.0f, 9.0f}};
  const Pair<float> shares{0.5f, 0.5f}, entropies{3.0f, 3.0f};
  const PairGradient gradient{{normalizers, {0.5f, 0.25f}}, shares, entropies, 0.5f, {0.25f, 0.0f},
                              kInverseTemperature};
  for (const bool mixture : {false, true}) {
    const std::string name = mixture ? "exact_kl jensen_shannon " : "exact_kl ";
    const PairKernels<T> kernels = pair_kernels<T>(mixture, false);
    count(name + "backward " + dtype, [&] {
      kernels.backward(p.data(), q.data(), grad.data(), grad_ref.data(), kElements, gradient);
    });
    if (mixture) {
      count(name + dtype, [&] {
        kernels.mixture_part(p.data(), q.data(), kElements, normalizers, shares,
                             kInverseTemperature);
      });
    } else {
      count(name + dtype,
            [&] { kernels.part(p.data(), q.data(), kElements, kInverseTemperature); });
    }
  }
  const PairKernels<T> kernels = pair_kernels<T>(false, true);
  count("exact_kl entropy " + dtype,
        [&] { kernels.part(p.data(), q.data(), kElements, kInverseTemperature); });
}

void of_a_head() {
  const HeadKernels kernels = head_kernels();
  const std::vector<float> bias = row<float>(2);
  std::vector<float> logits = row<float>(1), grads = row<float>(3);
  count("head bias softcap", [&] { kernels.shape(logits.data(), bias.data(), kElements, 5.0f); });
  count("head softcap backward",
        [&] { kernels.chain(logits.data(), grads.data(), kElements, 5.0f); });
}

void of_sequences() {
  const SequenceKernel<float> weigh = weigh_sequence<float>();
  const std::vector<float> p = row<float>(1), q = row<float>(2);
  std::vector<float> weights(kElements);
  const TokenSequence<float> sequence{p.data(), q.data(), nullptr, kElements};
  for (const auto& [name, level] :
       {std::pair{"token", WeightLevel::token}, std::pair{"sequence", WeightLevel::sequence}}) {
    count(std::string("importance_weights ") + name,
          [&] { weigh(sequence, {level, true, {0.5f, 2.0f, false}}, weights.data()); });
  }
}

template <typename T>
void of_tokens(const std::string& dtype) {
  const std::vector<T> p = row<T>(1), q = row<T>(2), before = row<T>(3);
  std::vector<T> kl(kElements), after(kElements);
  const float weight = 0.5f;
  const auto each_piece = [](const auto& call) {
    for (int64_t i = 0; i < kElements; i += kTokenPiece) call(i);
  };
  for (const auto& [name, estimator] :
       {std::pair{"k1", Estimator::k1}, std::pair{"k3", Estimator::k3}}) {
    const TokenPiece<T> forward{p.data(), q.data(),  nullptr,      before.data(),
                                nullptr,  kl.data(), after.data(), true};
    const TokenPiece<T> backward{p.data(),      q.data(),  nullptr, before.data(),
                                 before.data(), kl.data(), nullptr, true};
    const std::string of = std::string("token_kl ") + name + " ";
    for (const auto& [which, columns] :
         {std::pair{"", forward}, std::pair{"backward ", backward}}) {
      const TokenKernel<T> kernel = token_kernel<T>(estimator, columns.grad_kl != nullptr);
      count(of + which + dtype,
            [&] { each_piece([&](int64_t i) { kernel(columns.from(i), kTokenPiece, weight); }); });
    }
  }
}

}  // namespace

int main() {
  of_one_row<float>("float32");
  of_one_row<BFloat16>("bfloat16");
  of_two_rows<float>("float32");
  of_two_rows<BFloat16>("bfloat16");
  of_a_head();
  of_sequences();
  of_tokens<float>("float32");
  of_tokens<BFloat16>("bfloat16");
}
