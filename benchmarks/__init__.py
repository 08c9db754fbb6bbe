"""Microbenchmarks, one module an op: ours, what it replaces and plain torch, in one run."""
