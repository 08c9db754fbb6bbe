"""Microbenchmarks, one module an op: ours, the reference it replaces, and plain torch, in one run."""
