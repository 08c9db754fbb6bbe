"""How the tests are shared among processes, and what each of them starts from."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

# Threads that wait for others sleep: several processes share the cores, and those that spin take
# them from each other. Read when OpenMP is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from ray_nodes import nodes

from fusedrl import logs

HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}

# In the background of a shell, or under nohup, some are ignored that tests send.
for _number, _default in HANDLERS.items():
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)

# Those that take longest begin first, so that no process is left alone with one at the end.
LONGEST = (
    "ray",
    "test_docs.py",
    "test_async_lifecycle.py",
    "test_bench.py",
    "test_demo.py",
    "test_sync_scheme.py",
    "test_contract.py",
    "test_updaters.py",
    "test_shared_models.py",
    "test_one_version.py",
    "test_triton.py",
    "test_torchrl.py",
    "test_trl_losses.py",
    "test_trl_sharing.py",
    "test_shared_losses.py",
    "test_ptx.py",
    "test_site.py",
)

# Cases up to which a test runs all of them.
WHOLE_GRID = 12


def group_of(nodeid: str) -> str:
    """What one process runs: a file, or all ``test_ray*.py``.

    Two Ray clusters side by side on two busy cores start actors minutes late.
    """
    file = nodeid.split("::", 1)[0]
    return "ray" if Path(file).name.startswith("test_ray") else file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--grids", action="store_true", help="run every case of every grid, and random examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Random examples are the same in each run but the nightly one, which searches further."""
    if find_spec("hypothesis") and not config.getoption("grids"):
        from hypothesis import settings

        settings.register_profile("the same", derandomize=True)
        settings.load_profile("the same")


def pairwise(cases: list[Any]) -> list[Any]:
    """A choice of a test's cases in which each pair of parameters' values occurs.

    Greedy, and the same in each run; where a test has one parameter, these are all of its cases.
    """
    values = [sorted((name, id(value)) for name, value in c.callspec.params.items()) for c in cases]
    pairs = [set(combinations(of, min(2, len(of)))) for of in values]
    left, missing, chosen = list(range(len(cases))), set().union(*pairs), []
    random.Random(cases[0].originalname).shuffle(left)  # cases side by side share most pairs
    while missing:
        best = max(left, key=lambda i: len(pairs[i] & missing))
        left.remove(best)
        missing -= pairs[best]
        chosen.append(best)
    return [cases[i] for i in sorted(chosen)]


@pytest.hookimpl(trylast=True)  # behind what `-m` leaves out, which must not be what a choice is of
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    grids = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not config.getoption("grids"):
            grids[item.nodeid.partition("[")[0]].append(item)
    dropped = set()
    for cases in grids.values():
        if len(cases) > WHOLE_GRID:
            dropped.update(set(cases) - set(pairwise(cases)))
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]

    def rank(item: pytest.Item) -> int:
        group = Path(group_of(item.nodeid)).name
        return LONGEST.index(group) if group in LONGEST else len(LONGEST)

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)  # `make gpu` runs where xdist need not be
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ray's nodes end with the last test of its group, behind what the tests ended themselves."""
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        nodes.stop()


def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def pytest_collectstart() -> None:
    """A module draws the same numbers whichever were imported before it."""
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> None:
    """So does a fixture that several tests share, whichever of them comes first."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals do what they do in a fresh program, whoever has set a handler before, as Ray does."""
    before = {number: signal.signal(number, default) for number, default in HANDLERS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """So does every test, whichever ran before it, and it is told all warnings."""
    seed()
    logs._warn.cache_clear()
