"""A channel of weights that are their version, and a reader of it."""

from __future__ import annotations

import channel_workers as workers
import pytest

from fusedrl.channel import WeightChannel


@pytest.fixture
def channel():
    with WeightChannel.create(workers.weights_of(0)) as channel:
        yield channel


@pytest.fixture
def reader(channel):
    with channel.handle.open() as reader:
        yield reader
