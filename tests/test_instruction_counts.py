"""The CPU row kernels take as many instructions an element as were recorded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

TOLERANCE = 0.05

spec = importlib.util.spec_from_file_location(
    "instruction_count", Path(__file__).parent / "instructions/count.py"
)
assert spec is not None and spec.loader is not None
count = importlib.util.module_from_spec(spec)
spec.loader.exec_module(count)


def test_row_kernels_take_the_recorded_instructions(tmp_path):
    if (why := count.missing()) is not None:
        pytest.skip(why)
    recorded = json.loads(count.RECORDED.read_text())
    compiler = count.compiler()
    if compiler not in recorded:
        pytest.skip(f"{count.RECORDED.name} has counts of {', '.join(recorded)}, not of {compiler}")
    expected, found = recorded[compiler], count.per_element(tmp_path)
    assert found.keys() == expected.keys()
    changed = [
        f"{name}: {found[name]:.2f} instructions an element, recorded {expected[name]:.2f}"
        for name in expected
        if abs(found[name] - expected[name]) > TOLERANCE * expected[name]
    ]
    assert not changed, "\n".join([*changed, f"if that is meant, run {count.__file__}"])
