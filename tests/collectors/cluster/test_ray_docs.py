"""The tutorial about a Ray cluster runs on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ray_nodes import nodes
from shown import assert_prints, texts

pytest.importorskip("ray")

PAGE = Path(__file__).parents[3] / "docs/tutorials/ray-cluster.md"


def test_the_tutorial_runs(capsys):
    """Its program, which finds the tests' cluster instead of starting one."""
    nodes.start()
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, PAGE, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert_prints(texts(PAGE, "python"), printed, figures=False)
    batches = printed.splitlines()
    assert len(batches) == 4 and batches[0] == "torch.Size([8]) [1]"
    # No turn is of the weights that each actor drew for itself.
    assert not any(re.search(r"\b0\b", batch.removeprefix("torch.Size([8])")) for batch in batches)
