"""A name that a library has lost is an error that says which, what for, and what to do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from fusedrl.compat.library import Library


class Collector:
    stated: int

    def __init__(self):
        self._policy = 1
        vars(self)["_held"] = 2

    @property
    def _size(self: Any):
        return self._counted

    def _step(self: Any):
        return [self._inner for _ in range(2)]


@pytest.fixture
def library(monkeypatch):
    module = ModuleType("some_library")
    vars(module).update(Collector=Collector, _tool=len, __version__="9.1")
    monkeypatch.setitem(sys.modules, "some_library", module)
    return Library("some_library", tried="8.0")


@pytest.mark.parametrize(
    "name", ["stated", "_policy", "_held", "_size", "_counted", "_step", "_inner"]
)
def test_a_class_has_what_its_code_uses(library, name):
    library.names("some_library:Collector", (name,), "a reason")
    library.require(f"some_library:Collector.{name}")


@pytest.mark.parametrize(
    "place", ["some_library:_lost", "some_library:Collector._lost", "some_library:_Lost._policy"]
)
def test_a_word_whose_name_is_lost_raises_the_reason(library, place):
    @library.needs("some_library:_tool", place)
    def word():
        """A collector's policy, which follows.

        Not here.
        """
        raise AssertionError

    with pytest.raises(ImportError) as caught:
        word()
    assert str(caught.value) == (
        f"some_library 9.1: expected {place.replace(':', '.')}, got none, and fusedrl needs it "
        "(A collector's policy, which follows); install some_library 8.0, with which it has been "
        "tried"
    )


def test_a_module_that_is_not_loaded_is_looked_for_at_the_first_call(library, monkeypatch):
    @library.needs("some_library.late:_tool")
    def word():
        """The size."""
        return 3

    monkeypatch.setitem(sys.modules, "some_library.late", late := ModuleType("some_library.late"))
    with pytest.raises(ImportError, match=r"some_library\.late\._tool"):
        word()
    vars(late)["_tool"] = len
    assert word() == 3


def test_an_object_is_taken_as_it_is(library):
    assert library.take("some_library:_tool", "a reason") is len
    with pytest.raises(ImportError, match=r"_lost, got none, and fusedrl needs it \(a reason\)"):
        library.take("some_library:_lost", "a reason")
