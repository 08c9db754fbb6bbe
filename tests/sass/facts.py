"""Facts of the machine code of every CUDA kernel: resources, and what the loop over a row takes.

A fact repeats where a time does not, and needs no GPU. ``python tests/sass/facts.py`` records those
of the installed library in ``facts.json``, after a change that is meant to change them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from fusedrl import _host, native

COPIES = ("shape_tile", "add_elements", "gather_rows", "scatter_rows")  # without exponentials
RECORDED = Path(__file__).parent / "facts.json"
CONVERSIONS = re.compile(r"F2F|F2I|I2F|F2FP")
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+) )?\s*(\S+)\s*(.*?) ;", re.MULTILINE
)


def tool(name: str) -> str | None:
    """NVIDIA's program of that name; Triton brings some where there is no CUDA toolkit."""
    spec = importlib.util.find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else None
    return shutil.which(name) or (shutil.which(name, path=str(bundled)) if bundled else None)


def missing() -> str | None:
    """Why no facts can be found here."""
    if native.find("_C_cuda") is None:
        return "built without _C_cuda (no nvcc)"
    absent = [name for name in ("cuobjdump", "nvdisasm", "c++filt") if tool(name) is None]
    return f"there is no {absent[0]}" if absent else None


def compiler() -> str:
    """Another release of nvcc makes other instructions."""
    return "nvcc " + ".".join(_host.build_info()["cuda_compiler"].split(".")[:2])


class Instruction(NamedTuple):
    guarded: bool  # by a predicate
    name: str
    operands: str

    @property
    def load_bytes(self) -> int:
        """What an instruction loads from global memory, 0 of others."""
        if not self.name.startswith("LDG"):
            return 0
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[part] for part in self.name.split(".") if part in sizes), 4)

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        condition = self.guarded or self.operands.startswith(("P", "!P", "UP", "!UP"))
        return condition or self.name not in ("BRA", "EXIT")

    def named(self) -> set[int]:
        """The registers that are named."""
        return {int(r) for r in re.findall(r"\bR(\d+)\b", self.operands)}

    def loaded(self) -> set[int]:
        """The registers that a load writes."""
        first = re.match(r"R(\d+)", self.operands)
        assert first is not None, self
        return {int(first[1]) + k for k in range(max(self.load_bytes // 4, 1))}


def facts(library: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """``{architecture: {kernel: facts}}``: registers, bytes of stack and shared, ``loops``."""
    with tempfile.TemporaryDirectory() as folder:
        _run("cuobjdump", "--extract-elf", "all", library, cwd=folder)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for cubin in sorted(Path(folder).iterdir()):
            architecture = re.search(r"sm_(\d+)", cubin.name)
            assert architecture is not None, cubin
            found.setdefault(architecture[1], {}).update(of_cubin(cubin))
    return {arch: dict(sorted(kernels.items())) for arch, kernels in sorted(found.items())}


def of_cubin(cubin: Path) -> dict[str, dict[str, Any]]:
    """The facts of the kernels of one file of machine code."""
    usage = _run("cuobjdump", "--dump-resource-usage", cubin)
    resources = dict(re.findall(r"Function (\S+):\n\s*(.+)", usage))
    sections = re.split(
        r"^//-+ \.text\.(\S+) -+$", _run("nvdisasm", "-c", cubin), flags=re.MULTILINE
    )
    code = dict(zip(sections[1::2], sections[2::2], strict=True))
    names = _run("c++filt", *resources).splitlines()
    found = {}
    for mangled, name in zip(resources, names, strict=True):
        of = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", resources[mangled])}
        short = short_name(name)
        found[short] = {
            "registers": of["REG"],
            "stack": of["STACK"],
            "shared": of["SHARED"],
            **loops(short, code[mangled]),
        }
    return found


def short_name(name: str) -> str:
    """``policy_rows<false, BFloat16>`` of a demangled declaration."""
    name = re.sub(r"^void ", "", name).replace("fusedrl::", "").replace("c10::", "")
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def loops(kernel: str, text: str) -> dict[str, dict[str, Any]]:
    """What the loops over a row take an element (of a pair of rows: a pair), by what they are.

    ``reads`` only reads, ``scores`` reads and takes logarithms, ``writes`` writes gradients. A row
    that starts on no 16-byte boundary has a loop of its own, which is left out.
    """
    products = "tile" in kernel or kernel.startswith(("policy", "add_elements", "scatter"))
    item = 4 if products or "float>" in kernel else 2
    streams = 2 if "pair" in kernel or "mixture" in kernel or kernel == "add_elements" else 1
    found: dict[str, dict[str, Any]] = {}
    for path in innermost_paths(text):
        widest = max((i.load_bytes for i in path), default=0)
        wide = [i for i in path if i.load_bytes == widest]
        elements = widest * len(wide) / item / streams
        counts = Counter(i.name.split(".")[0] for i in path)
        exponentials = sum(i.name.startswith("MUFU.EX2") for i in path)
        copies = exponentials == 0 and kernel.startswith(COPIES)
        if widest == 0 or not (copies or exponentials >= elements * streams):
            continue
        logarithms = any(i.name.startswith("MUFU.LG2") for i in path)
        kind = "writes" if counts["STG"] else "scores" if logarithms else "reads"
        loop = {
            "load_bits": 8 * widest,
            "loads_in_flight": in_flight(path, widest),
            "instructions": round(len(path) / elements, 2),
            "mufu": round(counts["MUFU"] / elements, 2),
            "conversions": round(
                sum(n for k, n in counts.items() if CONVERSIONS.match(k)) / elements, 2
            ),
        }
        if kind not in found or loop["instructions"] < found[kind]["instructions"]:
            found[kind] = loop
    return found


def innermost_paths(text: str) -> list[list[Instruction]]:
    """The way through each innermost loop that makes most of its loads and stores, the shortest."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line + "\n"):
            code.append(Instruction(found[1] is not None, found[2], found[3]))
    targets = {
        at: labels[to[1]]
        for at, i in enumerate(code)
        if i.name == "BRA"
        and (to := re.search(r"`\(\.(L_x_\d+)\)", i.operands))
        and to[1] in labels
    }
    backward = [(to, at) for at, to in targets.items() if to <= at]
    innermost = [
        (first, last)
        for first, last in backward
        if not any(first <= f and t <= last and (f, t) != (first, last) for f, t in backward)
    ]
    paths = (_path(code, targets, first, last) for first, last in innermost)
    return [path for path in paths if path]


def _path(
    code: list[Instruction], targets: dict[int, int], first: int, last: int
) -> list[Instruction]:
    widest = max(i.load_bytes for i in code[first : last + 1])
    # The best way to reach each instruction: most accesses, then fewest instructions.
    best: dict[int, tuple[tuple[int, int], int]] = {first: ((0, 0), -1)}
    for at in range(first, last):
        if at not in best:
            continue
        (score, length), _ = best[at]
        i = code[at]
        accesses = i.load_bytes == widest or i.name.startswith(("STG", "LDS"))
        reached = (score - accesses, length + 1)
        for to in {at + 1} if i.goes_on else set():
            best[to] = min(best.get(to, (reached, at)), (reached, at))
        if at < targets.get(at, -1) <= last:
            to = targets[at]
            best[to] = min(best.get(to, (reached, at)), (reached, at))
    way, at = [], last if last in best else -1
    while at >= 0:
        way.append(code[at])
        at = best[at][1]
    return way[::-1]


def in_flight(path: list[Instruction], widest: int) -> int:
    """The most wide loads of a thread that nothing has waited for, over two rounds of a loop."""
    pending: list[set[int]] = []
    most = 0
    for i in path * 2:
        if i.load_bytes == widest:
            pending.append(i.loaded())
            most = max(most, len(pending))
            continue
        used = i.named()
        waits = [k for k, load in enumerate(pending) if load & used]
        if waits:
            del pending[: waits[-1] + 1]
    return most


def _run(name: str, *args: str | Path, cwd: str | None = None) -> str:
    program = tool(name)
    assert program is not None, name
    done = subprocess.run([program, *args], check=True, capture_output=True, text=True, cwd=cwd)
    return done.stdout


def record(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Replace what is recorded of this compiler, a line a kernel."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    recorded.setdefault(compiler(), {}).update(found)
    text = json.dumps(recorded, indent=1)
    RECORDED.write_text(re.sub(r"\n {4,}", " ", re.sub(r"\n {3}\}", "}", text)) + "\n")


def main() -> None:
    if (why := missing()) is not None:
        sys.exit(why)
    library = native.find("_C_cuda")
    assert library is not None
    record(facts(library))


if __name__ == "__main__":
    main()
