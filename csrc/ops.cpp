// Every op, a line each. Kernels register themselves in <op>/cpu.cpp and <op>/cuda.cu.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fusedrl, m) {
  m.def(
      "token_log_probs(Tensor logits, Tensor tokens, Tensor? mask, Tensor? offsets, bool shift, "
      "Tensor temperature, bool entropy) "
      "-> (Tensor log_probs, Tensor entropy, Tensor normalizers)");
  m.def(
      "token_log_probs_backward(Tensor grad_log_probs, Tensor? grad_entropy, Tensor logits, "
      "Tensor tokens, Tensor? mask, Tensor? offsets, bool shift, Tensor temperature, "
      "Tensor log_probs, Tensor entropy, Tensor normalizers) -> Tensor grad_logits");
  m.def(
      "token_kl(Tensor log_probs, Tensor ref_log_probs, Tensor? mask, Tensor? offsets, "
      "Tensor? reward, Tensor coeff, int estimator, bool nan_missing) "
      "-> (Tensor kl, Tensor reward)");
  m.def(
      "token_kl_backward(Tensor grad_kl, Tensor? grad_reward, Tensor log_probs, "
      "Tensor ref_log_probs, Tensor? mask, Tensor coeff, int estimator, bool nan_missing) "
      "-> Tensor grad_log_probs");
  m.def(
      "exact_kl(Tensor logits, Tensor ref_logits, Tensor? mask, Tensor? offsets, bool shift, "
      "Tensor temperature, bool jensen_shannon) -> (Tensor kl, Tensor statistics)");
  m.def(
      "exact_kl_backward(Tensor grad_kl, Tensor logits, Tensor ref_logits, Tensor? mask, "
      "Tensor? offsets, bool shift, Tensor temperature, bool jensen_shannon, Tensor statistics, "
      "bool wants_grad, bool wants_grad_ref) -> (Tensor grad_logits, Tensor grad_ref_logits)");
}
