"""Patches that let other libraries use the fused ops; a library's file is loaded on demand."""
