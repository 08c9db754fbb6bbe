"""Collectors over two nodes that the tests of a file share, and collectors of one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_collectors import ON_NODES, make, update
from ray_nodes import nodes

from fusedrl import RayLLMCollector


@pytest.fixture(scope="module")
def cluster() -> Any:
    return nodes.start()


@pytest.fixture
def collect(cluster) -> Iterator[Callable[..., RayLLMCollector]]:
    """Collectors of one test; an actor takes seconds to start, so most tests share ``pair``."""
    made = []

    def collect(*args: Any, **options: Any) -> RayLLMCollector:
        made.append(make(*args, **options))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown(raise_on_error=False)


@pytest.fixture(scope="module")
def pair_of_actors(cluster) -> Iterator[RayLLMCollector]:
    with make(remote_config=ON_NODES) as collector:
        yield collector


@pytest.fixture
def pair(pair_of_actors) -> RayLLMCollector:
    """An actor on each node, that have the same version of weights which are their version."""
    update(pair_of_actors)
    return pair_of_actors
