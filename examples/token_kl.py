"""Per-token KL and penalised reward of a padded batch, with two ops."""

from __future__ import annotations

import torch

from fusedrl import token_kl, token_log_probs

torch.manual_seed(0)
batch, length, vocabulary = 2, 6, 1000
tokens = torch.randint(vocabulary, (batch, length))
# A prompt of two tokens; the second answer is one token shorter than the first.
mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]], dtype=torch.bool)
reference_logits = torch.randn(batch, length, vocabulary)
policy_logits = (reference_logits + 0.3 * torch.randn_like(reference_logits)).requires_grad_()

policy, entropy = token_log_probs(policy_logits, tokens, mask, shift=True, entropy=True)
reference = token_log_probs(reference_logits, tokens, mask, shift=True).log_probs
kl, reward = token_kl(
    policy, reference, mask, estimator="k3", reward=torch.tensor([1.0, 0.0]), coeff=0.1
)
print("KL per token\n", kl.detach())
print("reward - 0.1 * KL\n", reward.detach())
print("mean entropy", float(entropy[mask].detach().mean()))

kl[mask].mean().backward()
assert policy_logits.grad is not None
print("gradient reaches the logits:", float(policy_logits.grad.norm()) > 0)
