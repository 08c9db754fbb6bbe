"""Predictions, without a GPU: the time of each CUDA kernel, and of the linear ops.

A row kernel takes the bytes that it moves. A linear op is its products and the row kernels between
them, one after the other, each as slow as its arithmetic or its bytes; the sizes are those of
``head_tiles.h``, whose constants are read. ``python benchmarks/gpu_model.py`` prints the tables of
``docs/how-it-works/cuda.md``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FLOAT = 4  # bytes


class Gpu(NamedTuple):
    """What NVIDIA states of a GPU, and assumptions that are the same for all."""

    name: str
    processors: int
    bandwidth: float  # bytes a second
    tensor_rate: float  # dense bfloat16 operations a second

    REACHED_BANDWIDTH = 0.92  # of a copy
    REACHED_PRODUCTS = 0.75  # of a large matrix product


GPUS = (
    Gpu("A100", 108, 2.04e12, 312e12),
    Gpu("H100", 132, 3.35e12, 989e12),
    Gpu("H200", 132, 4.8e12, 989e12),
    Gpu("B200", 148, 8.0e12, 2250e12),
)

# The bytes that a row kernel reads and writes for each element (or pair of two rows), at bfloat16.
# Products are float32, and their gradients bfloat16. A mixture is read twice in the forward pass.
KERNELS = {
    "forward_rows": 2,
    "forward_rows, entropy": 2,
    "backward_rows": 4,
    "forward_pairs": 4,
    "backward_pairs": 8,
    "forward_pairs, mixture": 8,
    "backward_pairs, mixture": 8,
    "add_tile": 4,
    "differentiate_tile": 6,
    "weigh_tile": 6,
    "add_pair_tile": 8,
    "add_mixture_tile": 8,
    "differentiate_pair_tile": 12,
    "differentiate_pair_tile, mixture": 12,
}


def written_kernels() -> set[str]:
    """The names of all kernels in the sources."""
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cu")]
    start = re.compile(r"__global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(")
    return {name for source in sources for name in start.findall(source.read_text())}


def seconds(name: str, gpu: Gpu) -> float:
    """The predicted time of a row kernel, an element."""
    return KERNELS[name] / (gpu.bandwidth * gpu.REACHED_BANDWIDTH)


def sizes_of(header: Path) -> dict[str, int]:
    """The constants of a ``tile_sizes.h``, by their names without the k."""
    found = re.findall(
        r"constexpr int(?:64_t)? k(\w+) = (?:int64_t\((\d+)\) << (\d+)|(\d+));",
        header.read_text(),
    )
    return {name: int(plain) if plain else int(n) << int(bits) for name, n, bits, plain in found}


SIZES = sizes_of(ROOT / "csrc/common/tile_sizes.h")


class Extent(NamedTuple):
    """Some rows and some classes."""

    rows: int
    classes: int


class Tiles(NamedTuple):
    """What ``HeadTiles`` in ``head_tiles.h`` makes of a head: the tests compile and compare it."""

    count: int
    classes: int
    batch_invariant: bool
    padded: int
    tile: Extent
    block: Extent


def tiles_of(
    count: int,
    classes: int,
    batch_invariant: bool = False,
    one_a_block: bool = False,
) -> Tiles:
    """The tiles of products, and the blocks of gradients, of ``count`` kept rows."""

    def multiple(most: int, step: int) -> int:
        return most if most < step else most // step * step

    def room(elements: int, others: int, step: int) -> int:
        return max(multiple(elements // others, step), step)

    elements, column = SIZES["TileElements"], SIZES["ColumnStep"]
    gradient_elements = SIZES["GradientElements"]
    every = math.ceil(classes / column) * column
    rows = max(1, min(count, SIZES["MostRows"]))
    padded = count
    if batch_invariant:
        rows = SIZES["InvariantRows"]
        padded = math.ceil(count / rows) * rows
    tile = Extent(rows, min(every, room(elements, rows, column)))
    if one_a_block:
        return Tiles(count, classes, batch_invariant, padded, tile, tile)
    block_classes = min(every, room(gradient_elements, rows, tile.classes))
    fit = gradient_elements // block_classes
    block_rows = min(padded, room(fit + rows - 1, 1, rows))
    return Tiles(count, classes, batch_invariant, padded, tile, Extent(block_rows, block_classes))


class Step(NamedTuple):
    """A kernel on the GPU: a product or a row kernel."""

    name: str
    rows: int  # of the result
    columns: int
    depth: int  # of a product, 0 of what is none
    moved: float  # bytes

    def seconds(self, gpu: Gpu) -> float:
        """As slow as its arithmetic or its bytes."""
        if self.name in KERNELS:
            return self.rows * self.columns * seconds(self.name, gpu)
        moving = self.moved / (gpu.bandwidth * gpu.REACHED_BANDWIDTH)
        # A result is computed in parts of 128 x 256 elements, one a processor at a time.
        parts = math.ceil(self.rows / 128) * math.ceil(self.columns / 256)
        rounds = math.ceil(parts / gpu.processors)
        operations = 2 * 128 * 256 * self.depth * rounds * gpu.processors
        return max(moving, operations / (gpu.tensor_rate * gpu.REACHED_PRODUCTS))


def product(name: str, rows: int, columns: int, depth: int) -> Step:
    """A product of bfloat16 matrices that are read once, with a float32 result."""
    moved = 2 * depth * (rows + columns) + FLOAT * rows * columns
    return Step(name, rows, columns, depth, moved)


def steps(
    tiles: Tiles, width: int, row_kernels: str, gradients: str = "", multiplies: bool = True
) -> Iterator[Step]:
    """What a loop over tiles runs, with gradients "of hidden" and "of weight", as cuda_head.h."""
    count, classes, _, padded, tile, block = tiles
    if count == 0:
        return
    for c in range(0, classes, block.classes):
        end_class = min(classes, c + block.classes)
        for r in range(0, count, block.rows):
            end_row = min(count, r + block.rows)
            for first in range(c, end_class, tile.classes):
                for row in range(r, end_row, tile.rows):
                    columns = min(tile.classes, classes - first)
                    if multiplies:
                        yield product("logits", min(tile.rows, padded - row), columns, width)
                    for name in row_kernels.split():
                        yield Step(name, min(tile.rows, count - row), columns, 0, 0)
            if "of hidden" in gradients:
                yield from _hidden_steps(tiles, width, c, r)
            if "of weight" in gradients:
                yield from _weight_steps(tiles, width, c, r)


def _hidden_steps(tiles: Tiles, width: int, first_class: int, first_row: int) -> Iterator[Step]:
    classes = min(tiles.block.classes, tiles.classes - first_class)
    rows = min(tiles.block.rows, tiles.padded - first_row)
    at_a_time = tiles.tile.rows if tiles.batch_invariant else rows
    for _ in range(0, rows, at_a_time):
        yield from _added("of hidden", at_a_time, width, classes, starts=first_class == 0)


def _weight_steps(tiles: Tiles, width: int, first_class: int, first_row: int) -> Iterator[Step]:
    classes = min(tiles.block.classes, tiles.classes - first_class)
    rows = min(tiles.block.rows, tiles.padded - first_row)
    only, last = tiles.count <= tiles.block.rows, first_row + tiles.block.rows >= tiles.count
    yield from _added("of weight", classes, width, rows, first_row == 0, rounded=only)
    if last and not only:
        yield Step("rounded", classes, width, 0, (FLOAT + 2) * classes * width)


def _added(
    name: str, rows: int, columns: int, depth: int, starts: bool, rounded: bool = False
) -> Iterator[Step]:
    """A product that starts a float32 sum, or what is added to it, or rounded, part by part."""
    part = rows if starts and not rounded else max(SIZES["TermElements"] // columns, 1)
    for first in range(0, rows, part):
        some = min(part, rows - first)
        yield product(name, some, columns, depth)
        if not starts:
            yield Step("sum", some, columns, 0, 3 * FLOAT * some * columns)
        elif rounded:
            yield Step("rounded", some, columns, 0, (FLOAT + 2) * some * columns)


class Case(NamedTuple):
    """A head and its kept rows; bfloat16."""

    rows: int
    width: int
    classes: int


def frozen_head(case: Case) -> list[Step]:
    """``linear_token_log_probs`` of a head that has no gradient, and its backward pass."""
    tiles = tiles_of(case.rows, case.classes, one_a_block=True)
    return list(steps(tiles, case.width, "add_tile weigh_tile", "of hidden"))


def log_probs(case: Case, batch_invariant: bool = False) -> list[Step]:
    """``linear_token_log_probs`` and its backward pass."""
    tiles = tiles_of(case.rows, case.classes, batch_invariant)
    one_tile = tiles.padded <= tiles.tile.rows and case.classes <= tiles.tile.classes
    multiplies = batch_invariant or not one_tile
    return [
        *steps(tiles, case.width, "add_tile"),
        *steps(tiles, case.width, "differentiate_tile", "of hidden, of weight", multiplies),
    ]


def exact_kl(case: Case) -> list[Step]:
    """``linear_exact_kl`` and its backward pass to one head; the reference is of its width."""
    tiles = tiles_of(case.rows, case.classes)
    loops = (("add_pair_tile", ""), ("differentiate_pair_tile", "of hidden, of weight"))
    return [
        step
        for kernel, gradients in loops
        for one in steps(tiles, case.width, kernel, gradients)
        for step in ([one] * 2 if one.name == "logits" else [one])
    ]


def total(run: list[Step], gpu: Gpu) -> float:
    """Seconds, one step after the other."""
    return sum(step.seconds(gpu) for step in run)


def bare_product(case: Case, gpu: Gpu) -> float:
    """The seconds of one product of all rows and classes, at the rate that products reach."""
    operations = 2 * case.rows * case.width * case.classes
    return operations / (gpu.tensor_rate * gpu.REACHED_PRODUCTS)


LARGE = Case(8192, 4096, 151936)
SMALL = Case(400, 4096, 151936)  # all logits are one tile
LINEAR = {
    "`linear_token_log_probs`": (log_probs, LARGE, 4),
    "`linear_token_log_probs`, head frozen": (frozen_head, LARGE, 2),
    "`linear_exact_kl`": (exact_kl, LARGE, 6),
}


RESULTS = {name: ROOT / f"benchmarks/results/{name.lower()}/gpu.jsonl" for name in ("H100", "H200")}
Cells = dict[str, str]


def read(results: Path) -> list[dict[str, Any]]:
    """The lines that are there."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def measured(records: list[dict[str, Any]]) -> Cells:
    """Cells of the tables: a row kernel's share of the bandwidth, and an op's time and factor.

    Of the newest run, and where several jobs run a kernel, of one at the shape of the predictions.
    """
    cells = {}
    jobs = [record for record in records if "rows" in record and not record["tiny"]]
    for record in sorted(jobs, key=lambda job: job["beside"] == "torch"):
        for name, figures in record["kernels"].items():
            if "share" in figures:
                cells[name] = f"{100 * figures['share']:.0f} %"
        medians = {row["contender"]: row.get("median_ms") for row in record["rows"]}
        ours, products = medians.get("fusedrl"), medians.get("bare products")
        if ours is not None and products is not None:
            cells[record["job"]] = f"{ours:.1f} ms, {ours / products:.2f}x"
    return cells


def row_table(found: Mapping[str, Cells]) -> str:
    """Markdown: the bytes that each row kernel moves, and the share of the bandwidth measured."""
    lines = [
        f"| kernel | bytes an element | {' | '.join(_headings(found))} |",
        "|---|---|" + "---|" * len(found),
    ]
    for name, moved in KERNELS.items():
        kernel, comma, rest = name.partition(",")
        cells = [f"`{kernel}`{comma}{rest}", str(moved)]
        cells += [cells_of.get(name, "") for cells_of in found.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _headings(found: Mapping[str, Cells]) -> list[str]:
    return [f"measured, {gpu}" for gpu in found]


def linear_table(found: Mapping[str, Cells]) -> str:
    """Markdown: the time of the linear ops, and how many bare products they take as long as."""
    names = " | ".join((*(gpu.name for gpu in GPUS), *_headings(found)))
    lines = [
        f"| op | rows x hidden x classes | products | {names} |",
        "|---|---|---|" + "---|" * (len(GPUS) + len(found)),
    ]
    for name, (op, case, count) in LINEAR.items():
        run = op(case)
        cells = [name, " x ".join(str(n) for n in case), str(count)]
        for gpu in GPUS:
            time, bare = total(run, gpu), bare_product(case, gpu)
            cells.append(f"{1e3 * time:.1f} ms, {time / bare / count:.2f}x")
        cells += [cells_of.get(name.replace("`", ""), "") for cells_of in found.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    of_gpus = {gpu: measured(read(results)) for gpu, results in RESULTS.items()}
    print(row_table(of_gpus), linear_table(of_gpus), sep="\n\n")
