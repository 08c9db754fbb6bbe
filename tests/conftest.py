"""How the tests are shared among processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)  # `make gpu` runs where xdist need not be
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        """A process runs a file at a time, and one of them all ``test_ray*.py``.

        Two Ray clusters side by side on two busy cores start actors minutes late.
        """

        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ray" if Path(file).name.startswith("test_ray") else file

    return ByFile(config, log)
