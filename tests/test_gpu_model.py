"""Predictions for GPUs: the tiles are the compiled code's, the goals hold, the page has them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how-it-works/cuda.md"

spec = importlib.util.spec_from_file_location("gpu_model", ROOT / "benchmarks/gpu_model.py")
assert spec is not None and spec.loader is not None
model = importlib.util.module_from_spec(spec)
sys.modules["gpu_model"] = model
spec.loader.exec_module(model)
H100 = next(gpu for gpu in model.GPUS if gpu.name == "H100")

# Prints the tiles of each head that it is given, and where each tile and each block starts.
DRIVER = """
#include <cstdlib>
#include <iostream>

#include "common/head_tiles.h"

int main(int, char** text) {
  const auto number = [&] { return std::atoll(*++text); };
  const int64_t count = number(), classes = number();
  const bool batch_invariant = number() != 0, one_a_block = number() != 0;
  const fusedrl::HeadTiles tiles(count, classes, {batch_invariant, one_a_block});
  for (const int64_t size : {tiles.padded, tiles.tile.rows, tiles.tile.classes, tiles.block.rows,
                             tiles.block.classes}) {
    std::cout << size << ' ';
  }
  fusedrl::for_each_tile(
      tiles, [](int64_t c, int64_t r) { std::cout << "t " << c << ' ' << r << ' '; },
      [](int64_t c, int64_t r) { std::cout << "b " << c << ' ' << r << ' '; });
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "driver.cpp").write_text(DRIVER)
    compile_it = ["g++", "-std=c++20", f"-I{ROOT / 'csrc'}", folder / "driver.cpp"]
    subprocess.run([*compile_it, "-o", folder / "driver"], check=True)
    return folder / "driver"


ROWS = [0, 1, 255, 400, 441, 5000, 8192, 40000]
CLASSES = [1, 300, 32000, 151936, 262144, 2**21]


@pytest.mark.heavy
@pytest.mark.parametrize(("one_a_block", "batch_invariant"), [(0, 0), (1, 0), (0, 1)])
def test_tiles_are_those_of_the_host_code(driver, one_a_block, batch_invariant):
    for rows, classes in itertools.product(ROWS, CLASSES):
        sizes = [rows, classes, batch_invariant, one_a_block]
        command = [driver, *(str(size) for size in sizes)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        *extents, starts = done.stdout.split(" ", 5)
        tiles = model.tiles_of(rows, classes, bool(batch_invariant), bool(one_a_block))
        assert [int(size) for size in extents] == [tiles.padded, *tiles.tile, *tiles.block]
        run = list(model.steps(tiles, 64, "add_tile"))
        assert starts.count("t ") == sum(step.name == "logits" for step in run)
        blocks = [
            (c, r)
            for c in range(0, classes if rows else 0, tiles.block.classes)
            for r in range(0, rows, tiles.block.rows)
        ]
        assert starts.count("b ") == len(blocks)


def test_linear_ops_are_predicted_to_take_little_more_than_their_products():
    # Rounding the weight's gradient, and reading float32 logits twice, keeps the first above
    # 1.1. A frozen head rounds what each class counts, and adds up a float32 sum for each tile.
    for op, products, most in ((model.log_probs, 4, 1.15), (model.frozen_head, 2, 1.3)):
        bare = products * model.bare_product(model.LARGE, H100)
        assert model.total(op(model.LARGE), H100) <= most * bare


def test_few_rows_are_multiplied_three_times():
    """All logits are one tile, which the forward pass keeps."""
    products = [step for step in model.log_probs(model.SMALL) if step.depth > 0]
    operations = sum(2 * step.rows * step.columns * step.depth for step in products)
    assert operations == 3 * 2 * model.SMALL.rows * model.SMALL.width * model.SMALL.classes


def test_the_page_has_the_tables():
    page = PAGE.read_text()
    found = {gpu: model.measured(model.read(results)) for gpu, results in model.RESULTS.items()}
    for table in (model.row_table(found), model.linear_table(found)):
        assert table in page, f"the page has another table; replace it with\n{table}"


def test_what_was_measured_stands_beside_its_prediction(tmp_path):
    def record(job, **figures):
        known = {"job": job, "beside": "torch", "tiny": False, "rows": [], "kernels": {}}
        return known | figures

    def row(contender, milliseconds):
        return {"contender": contender, "median_ms": milliseconds}

    records = [
        {"step": "memcheck", "outcome": "passed", "kernels": []},
        record(
            "linear_token_log_probs",
            rows=[row("fusedrl", 60.0), row("bare products", 48.0)],
            kernels={"weigh_tile": {"ms": 2.0, "share": 0.874}, "unknown GPU": {"ms": 1.0}},
        ),
        record("linear_token_log_probs", rows=[row("fusedrl", 60.0), row("Liger", 90.0)]),
        record("others", beside="nothing", kernels={"weigh_tile": {"share": 0.1}}),
        record("linear_token_log_probs", tiny=True, kernels={"add_tile": {"share": 1}}),
    ]
    results = tmp_path / "gpu.jsonl"
    results.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = model.measured(model.read(results))
    assert found == {"weigh_tile": "87 %", "linear_token_log_probs": "60.0 ms, 1.25x"}
    assert "| `weigh_tile` | 6 | 87 % |" in model.row_table({"H100": found})
    assert "| 60.0 ms, 1.25x |" in model.linear_table({"H100": found})
    assert model.measured(model.read(tmp_path / "none")) == {}
