"""Patches that make other libraries use the fused ops, each in a module loaded on demand."""
