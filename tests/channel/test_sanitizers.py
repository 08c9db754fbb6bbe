"""The channel's C++ under sanitizers: a publisher and its readers as threads of one program."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "native/threads.cpp"
SOURCES = [ROOT / f"csrc/host/{name}.cpp" for name in ("memory_file", "publisher", "reader")]
OPTIONS = {
    "thread": ("-fsanitize=thread", "-Wl,--wrap=mmap,--wrap=munmap"),
    "memory": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
MISTAKES = ("read_after_release", "read_without_lease", "write_after_commit")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux"
    ),
]


def compiled(folder: Path, sanitizer: str) -> Path:
    options, program = OPTIONS[sanitizer], folder / sanitizer
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}")
    made = subprocess.run(
        ["g++", options[0], empty, "-o", program], capture_output=True, check=False
    )
    # Some kernels' addresses suit no sanitizer.
    if made.returncode != 0 or subprocess.run([program], check=False).returncode != 0:
        pytest.skip(f"g++ {options[0]} makes no program that runs here")
    flags = ("-std=c++20", "-O1", "-g1", "-pthread", f"-I{ROOT}/csrc", *options)
    subprocess.run(["g++", *flags, *SOURCES, PROGRAM, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitizers")
    return functools.cache(lambda sanitizer: compiled(folder, sanitizer))


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    stop = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    return subprocess.run(
        [program, *arguments],
        env={**os.environ, **stop},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("sanitizer", OPTIONS)
def test_no_sanitizer_finds_fault_with_a_publisher_and_its_readers(programs, sanitizer):
    done = run(programs(sanitizer))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leases, 0 wrong" in done.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_thread_sanitizer_reports_who_uses_a_slot_that_is_not_theirs(programs, mistake):
    done = run(programs("thread"), mistake)
    assert done.returncode == 66, done.stdout + done.stderr
    assert "data race" in done.stderr
