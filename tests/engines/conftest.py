"""Tests of vLLM's engines, which `make test-vllm` runs in an environment of their own."""

import asyncio
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the model is that an engine reads."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder):
    """It, as a trainer has it."""
    from tiny_engines import tiny_model

    return tiny_model(folder)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """What fails in the workers of engines that are started later."""
    from engine_faults import inject

    with pytest.MonkeyPatch.context() as patch:
        yield inject(tmp_path_factory.mktemp("faults"), patch)


@pytest.fixture(scope="module")
def loop():
    """An event loop for all tests of a module."""
    with asyncio.Runner() as runner:
        yield runner
