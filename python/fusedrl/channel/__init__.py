"""Weights of one machine's processes: complete versions, leased without a copy."""
