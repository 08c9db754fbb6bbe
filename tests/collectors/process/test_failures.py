"""What is told of an exception, and which processes a process has started."""

from __future__ import annotations

import pickle

import pytest
from async_workers import Odd, Unspeakable

from fusedrl.collectors.process.messages import Failure


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (LookupError("lost"), LookupError, "LookupError: lost"),
        (Odd("odd", 1), RuntimeError, "Odd: odd"),
        (Unspeakable("what happened"), Unspeakable, "Unspeakable"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_exception_arrives_whatever_it_is(error, kind, told):
    try:
        raise error
    except BaseException as raised:
        failure = pickle.loads(pickle.dumps(Failure.of(raised)))
    arrived = failure.exception()
    assert type(arrived) is kind
    text = str(arrived.__cause__)
    assert text.count("Traceback") == 1 and told in text and __name__.split(".")[-1] in text
    if kind is RuntimeError:
        assert told in str(arrived)
