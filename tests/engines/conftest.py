"""Tests of vLLM's engines, which `make test-vllm` runs in an environment of their own."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
