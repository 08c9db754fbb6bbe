"""Instructions of the CPU row kernels, an element, as callgrind counts them.

A count repeats where a time does not. ``python tests/instructions/count.py`` records those of this
machine's compiler in ``counts.json``, after a change that is meant to change them.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = HERE / "counts.json"
LEVEL = "avx2"  # valgrind knows no AVX-512
ELEMENTS = 65536  # of each row, as driver.cpp has it


def missing() -> str | None:
    """Why nothing can be counted here."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "counts are of x86-64 under Linux"
    for program in ("g++", "valgrind"):
        if shutil.which(program) is None:
            return f"needs {program}: apt-get install {program}"
    return None


def compiler() -> str:
    """Another version makes other instructions."""
    version = subprocess.run(["g++", "-dumpversion"], check=True, capture_output=True, text=True)
    return f"g++ {version.stdout.split('.')[0].strip()}"


def per_element(folder: Path) -> dict[str, float]:
    """The instructions of each kernel, compiled in ``folder``, for an element of its rows."""
    driver, found = folder / "driver", folder / "callgrind.out"
    subprocess.run(["g++", *_flags(), *_sources(), "-o", driver], check=True)
    counting = ("--tool=callgrind", f"--callgrind-out-file={found}", "--combine-dumps=yes")
    subprocess.run(["valgrind", "--quiet", *counting, driver], check=True, capture_output=True)
    dumps = found.read_text().split("desc: Trigger: Client Request: ")[1:]
    totals = {text.split("\n", 1)[0]: re.search(r"^totals: (\d+)$", text, re.M) for text in dumps}
    return {name: int(total[1]) / ELEMENTS for name, total in totals.items() if total}


def _sources() -> list[Path]:
    return [HERE / "driver.cpp", *sorted((ROOT / "csrc").glob("*/cpu_rows.cpp"))]


def _flags() -> list[str]:
    """As the build has them, which names them once."""
    text = (ROOT / "CMakeLists.txt").read_text()
    bytes_of_a_vector = re.search(rf"\b{LEVEL}:(\d+)", text)
    assert bytes_of_a_vector is not None
    of_level, of_loops = (
        re.search(rf"^ *set\({name} (.+)\)$", text, re.MULTILINE)
        for name in (f"cpu_level_flags_{LEVEL}", "loop_flags")
    )
    assert of_level is not None and of_loops is not None
    return [
        *("-std=c++20", "-O3", "-DNDEBUG", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
        *("-DFUSEDRL_X86_LEVELS", f"-DFUSEDRL_LEVEL={LEVEL}"),
        f"-DFUSEDRL_VEC_BYTES={bytes_of_a_vector[1]}",
        *(*of_level[1].split(), *of_loops[1].split(), "-Wno-psabi", f"-I{ROOT / 'csrc'}"),
        *("-isystem", str(Path(torch.__file__).parent / "include")),
    ]


def main() -> None:
    if (why := missing()) is not None:
        sys.exit(why)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        counts = per_element(Path(folder))
    recorded[compiler()] = {name: round(count, 3) for name, count in counts.items()}
    RECORDED.write_text(json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main()
