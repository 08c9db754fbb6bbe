"""NVIDIA's libraries, played, so that a CUDA build of torch runs on a machine without a GPU.

They are what the libraries in some folders need and do not have, with the names and versions that
these ask for. What ``libcuda.cpp`` and the files beside it define does what they say; every other
function does nothing and returns 0.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
OF_SYSTEM = re.compile(r"lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s|gomp)\.so|ld-linux")
OF_NVIDIA = re.compile(r"(cu|nccl|nv)\w+")
# It has the functions without a version too, as nothing says whose they are: all load it.
DRIVER = "libcuda.so.1"


@dataclass
class Needed:
    """What libraries ask for."""

    libraries: set[str] = field(default_factory=lambda: {DRIVER})
    versions: dict[str, str] = field(default_factory=dict)  # by library
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by version

    def read(self, path: Path) -> None:
        """Add what a library asks for."""
        self.libraries |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", path)))
        for part in _output("readelf", "-VW", path).split("File: ")[1:]:
            version = re.search(r"Name: (\S+)\s+Flags", part)
            if version:
                self.versions[part.split()[0]] = version[1]
        for line in _output("nm", "--dynamic", "--undefined-only", path).splitlines():
            function, _, version = line.split()[-1].partition("@")
            if version or OF_NVIDIA.fullmatch(function):
                self.functions[version].add(function)


def make(out: Path, folders: Iterable[Path], headers: Path | None = None) -> None:
    """Make in ``out`` what the libraries in the folders need and none of them is.

    Args:
        out: made anew.
        folders: those of the packages torch and fusedrl.
        headers: a folder with CUDA's, where torch is of another major version of it than nvcc.
    """
    there = {path.name: path for folder in folders for path in folder.rglob("*.so*")}
    needed = Needed()
    for path in there.values():
        needed.read(path)
    shutil.rmtree(out, ignore_errors=True)
    missing = {name for name in needed.libraries - there.keys() if not OF_SYSTEM.match(name)}
    for name in sorted(missing, key=lambda name: name != DRIVER):  # the runtime links to it
        version = needed.versions.get(name, "")
        functions = needed.functions[version] if version or name == DRIVER else set()
        _compile(out, name, version, functions, headers)


def _compile(
    out: Path, library: str, version: str, functions: set[str], headers: Path | None
) -> None:
    build = out / "build" / library
    build.mkdir(parents=True)
    objects, defined = [], set()
    source = HERE / f"{library.partition('.')[0]}.cpp"
    if source.exists():
        major = library.rpartition(".")[2]
        flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        if library != DRIVER:
            flags += [f"-DFAKE_CUDA_MAJOR={major}", *_includes(int(major), headers)]
        _output("g++", *flags, "-c", source, "-o", build / "source.o")
        found = _output("nm", "--extern-only", "--defined-only", build / "source.o")
        defined = {line.split()[-1] for line in found.splitlines()}
        objects = [build / "source.o", *([] if library == DRIVER else [out / DRIVER])]
    rest = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(functions - defined))
    (build / "rest.c").write_text(rest)
    _output("gcc", "-w", "-fPIC", "-c", build / "rest.c", "-o", build / "rest.o")
    flags = ["-shared", f"-Wl,-soname,{library}"]
    if version:
        (build / "version").write_text(f"{version} {{ global: *; }};\n")
        flags.append(f"-Wl,--version-script={build / 'version'}")
    _output("g++", *flags, build / "rest.o", *objects, "-o", out / library)


def _includes(major: int, headers: Path | None) -> list[str]:
    """The headers of that version of CUDA, and nvcc's for what is a package of its own."""
    everything = _output("nvcc", "-E", "-x", "cu", "/dev/null")
    ours = Path(re.findall(r'"(\S+)/cuda_runtime\.h"', everything)[0])
    others = sorted(headers.rglob("cuda_runtime_api.h")) if headers else []
    for path in (*others, ours / "cuda_runtime_api.h"):
        if re.search(rf"#define CUDART_VERSION +{major}\d{{3}}\b", path.read_text()):
            return [f"-isystem{path.parent}", f"-isystem{ours}"]
    raise SystemExit(f"--headers: expected those of CUDA {major}, got none; name their folder")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for LD_LIBRARY_PATH, made anew")
    parser.add_argument("folders", type=Path, nargs="+", help="the packages torch and fusedrl")
    parser.add_argument("--headers", type=Path, help="CUDA's, where nvcc's are of another version")
    arguments = parser.parse_args()
    make(arguments.out, arguments.folders, arguments.headers)
