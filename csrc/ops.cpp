// The schemas of all ops. Kernels are registered in <op>/cpu.cpp and <op>/cuda.cu.
#include <torch/csrc/stable/library.h>

// `rounds_grads`, a bool tensor on the CPU, allows kernels to round gradients of logits to bfloat16
// instead of splitting them into two bfloat16 numbers: see ops/_rounding.py.
//
// Forward passes store logits for the backward pass if `stored_bytes` allows it, and on CUDA also
// the indices of the `kept` tokens, so that the host need not wait for their number again. Tensors
// that are not stored are empty.
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
      "linear_token_log_probs(Tensor hidden, Tensor weight, Tensor? bias, Tensor tokens, "
      "Tensor? mask, Tensor? offsets, bool shift, Tensor temperature, float scale, float softcap, "
      "bool entropy, int? vocab_offset, bool batch_invariant, int stored_bytes, "
      "bool sums_weights, *, Tensor? rounds_grads=None) "
      "-> (Tensor parts, Tensor stored, Tensor kept)");
  m.def(
      "linear_token_log_probs_finish(Tensor parts, Tensor temperature, bool entropy) "
      "-> (Tensor log_probs, Tensor entropy, Tensor normalizers)");
  m.def(
      "linear_token_log_probs_backward(Tensor grad_log_probs, Tensor? grad_entropy, "
      "Tensor hidden, Tensor weight, Tensor? bias, Tensor tokens, Tensor? mask, Tensor? offsets, "
      "bool shift, Tensor temperature, float scale, float softcap, Tensor log_probs, "
      "Tensor entropy, Tensor normalizers, Tensor logits, Tensor kept, int? vocab_offset, "
      "bool batch_invariant, bool of_hidden, bool of_weight, bool of_bias, *, Tensor? "
      "rounds_grads=None) "
      "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "token_kl(Tensor log_probs, Tensor ref_log_probs, Tensor? mask, Tensor? reward, "
      "Tensor coeff, int estimator, bool nan_missing) -> (Tensor kl, Tensor reward)");
  m.def(
      "token_kl_backward(Tensor? grad_kl, Tensor? grad_reward, Tensor log_probs, "
      "Tensor ref_log_probs, Tensor? mask, Tensor coeff, int estimator, bool nan_missing) "
      "-> Tensor grad_log_probs");
  // beta = 1: KL(p || q), with p from the logits and q from the reference's; below 1, the
  // divergence from their mixture. The entropies are those of p and q.
  m.def(
      "exact_kl(Tensor logits, Tensor ref_logits, Tensor? mask, Tensor? offsets, bool shift, "
      "Tensor temperature, float beta, bool entropies) "
      "-> (Tensor divergence, Tensor entropies, Tensor statistics)");
  m.def(
      "exact_kl_backward(Tensor grad_divergence, Tensor? grad_entropies, Tensor logits, "
      "Tensor ref_logits, Tensor? mask, Tensor? offsets, bool shift, Tensor temperature, "
      "float beta, Tensor entropies, Tensor statistics, bool wants_grad, bool wants_grad_ref) "
      "-> (Tensor grad_logits, Tensor grad_ref_logits)");
  m.def(
      "linear_exact_kl(Tensor hidden, Tensor weight, Tensor? bias, float scale, float softcap, "
      "Tensor ref_hidden, Tensor ref_weight, Tensor? ref_bias, float ref_scale, "
      "float ref_softcap, Tensor? mask, Tensor? offsets, bool shift, Tensor temperature, "
      "float beta, bool entropies, bool batch_invariant, int stored_bytes) "
      "-> (Tensor divergence, Tensor entropies, Tensor statistics, Tensor logits, "
      "Tensor ref_logits, Tensor kept)");
  m.def(
      "linear_exact_kl_backward(Tensor grad_divergence, Tensor? grad_entropies, Tensor hidden, "
      "Tensor weight, Tensor? bias, float scale, float softcap, Tensor ref_hidden, "
      "Tensor ref_weight, Tensor? ref_bias, float ref_scale, float ref_softcap, Tensor? mask, "
      "Tensor? offsets, bool shift, Tensor temperature, float beta, bool batch_invariant, "
      "Tensor entropies, Tensor statistics, Tensor logits, Tensor ref_logits, Tensor kept, "
      "bool of_hidden, bool of_weight, bool of_bias, bool of_ref_hidden, bool of_ref_weight, "
      "bool of_ref_bias, *, Tensor? rounds_grads=None) "
      "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, "
      "Tensor grad_ref_hidden, Tensor grad_ref_weight, Tensor grad_ref_bias)");
}
