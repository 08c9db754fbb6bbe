"""The private names of the installed libraries that we need are there."""

from __future__ import annotations

import importlib

import pytest

from fusedrl.compat.library import Library

NAMES = ("accelerate", "tensordict", "torch", "torchrl", "transformers", "trl")


@pytest.mark.parametrize("name", NAMES)
def test_a_library_has_each_name(name):
    pytest.importorskip(name)
    words = importlib.import_module(f"fusedrl.compat.{name}")
    (library,) = {value for value in vars(words).values() if isinstance(value, Library)}
    assert library.needed
    for place in library.needed:
        library.require(place)
