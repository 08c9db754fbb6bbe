"""Log-probability of each token from hidden states and the head's weight, without the logits."""
