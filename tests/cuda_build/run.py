"""What of fusedrl works with which CUDA build of torch: ``make test-cuda-build`` runs it.

Each folder that is named is an environment with a build of torch, without NVIDIA's libraries, and
with fusedrl. What they show are rows of the install page's table, where they replace those of the
same versions; the exit code is 1 if anything fails. What the steps print is in the environment's
folder ``log``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from fake_libraries import make

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "tensordict", "torchrl", "transformers", "trl")
IMPORTS = """
import fusedrl, fusedrl.models, fusedrl.vllm, transformers
for name in fusedrl.__all__:
    getattr(fusedrl, name)
"""
TRL = """
import fusedrl
from trl import GRPOTrainer
fusedrl.patch_trl()
"""
VERSIONS = f"""
from importlib.metadata import version
for package in {PACKAGES}:
    print(version(package))
"""
TABLE = re.compile(r"^\| torch \|.*\n\|---.*\n((?:\|.*\n)*)", re.MULTILINE)
TESTS = ("-m", "pytest", "-q", "--no-header", "-rfE", "-p", "no:cacheprovider")
OPS = (
    "tests/cuda_build/test_device.py",
    "tests/cuda_build/test_ops.py",
    # What else of the tests for a GPU reads no value.
    "tests/ops/test_cuda_capture.py::test_no_op_waits_for_the_device",
)
# By column: how many GPUs there are, and what Python runs.
STEPS = {
    "imports": (0, ("-c", IMPORTS)),
    "patches TRL": (0, ("-c", TRL)),
    "private names": (0, (*TESTS, "tests/compat/test_torch.py")),
    "CPU ops": (0, ("-m", "fusedrl", "check")),
    "CUDA ops": (1, (*TESTS, *OPS)),
    "channel, collector": (1, (*TESTS, "tests/cuda_build/test_channel.py")),
}


def row_of(environment: Path, headers: Path | None) -> dict[str, str]:
    """What works in one environment."""
    python = environment / "bin/python"
    [packages] = environment.glob("lib/python*/site-packages")
    libraries = environment / "libraries"
    make(libraries, [packages / "torch", packages / "fusedrl"], headers)
    said = subprocess.run([python, "-c", VERSIONS], check=True, stdout=subprocess.PIPE, text=True)
    found = dict(zip(PACKAGES, said.stdout.split(), strict=True))
    build = (packages / "torch" / "version.py").read_text()
    found["torch"] = re.findall(r"__version__ = '(.*)'", build)[0]  # with the version of CUDA
    (environment / "log").mkdir(exist_ok=True)
    for step, (gpus, arguments) in STEPS.items():
        played = {"LD_LIBRARY_PATH": str(libraries), "FAKE_CUDA_DEVICES": str(gpus)}
        done = subprocess.run(
            [python, *arguments],
            cwd=ROOT,
            env=os.environ | played | {"FAKE_CUDA": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        (environment / "log" / f"{step}.txt").write_text(done.stdout)
        last = (done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        passed = done.returncode == 0 and "skipped" not in last
        found[step] = "yes" if passed else "no"
        why = "" if passed else f": {last}"
        print(f"torch {found['torch']}, {step}: {found[step]}{why}", flush=True)
    return found


def table_of(page: Path) -> re.Match[str]:
    """The table in the page; an error that says so where there is none."""
    found = TABLE.search(page.read_text())
    if found is None:
        raise SystemExit(
            f"--page: expected a table that begins with '| torch |' in {page}, got none"
        )
    return found


def update(page: Path, rows: list[dict[str, str]]) -> None:
    """Write the rows into the page's table; its others stay if they are of the same steps."""
    columns, table = [*PACKAGES, *STEPS], table_of(page)
    heading = [_line(columns), f"|{'---|' * len(columns)}"]
    known = table[1].splitlines() if table[0].startswith(heading[0]) else []
    by_torch = {line.split(" | ")[0]: line for line in known}
    by_torch |= {f"| {row['torch']}": _line([row[c] for c in columns]) for row in rows}
    lines = sorted(by_torch.values(), key=lambda line: [*map(int, re.findall(r"\d+", line)[:3])])
    made = "".join(f"{line}\n" for line in heading + lines)
    page.write_text(page.read_text().replace(table[0], made))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Update the table by all environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", type=Path, nargs="+", help="folders with bin/python")
    parser.add_argument("--headers", type=Path, help="folder with those of each version of CUDA")
    parser.add_argument("--page", type=Path, required=True, help="Markdown with the table")
    arguments = parser.parse_args()
    table_of(arguments.page)  # before what takes minutes
    rows = [row_of(each.absolute(), arguments.headers) for each in arguments.environments]
    update(arguments.page, rows)
    return int(any(each[step] != "yes" for each in rows for step in STEPS))


if __name__ == "__main__":
    sys.exit(main())
