"""Loading the compiled libraries, and what is said when one does not load."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import python

from fusedrl import _host, native
from fusedrl.cli import info
from fusedrl.ops import _dispatch

FEATURES = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
}
FEATURES["avx512_bf16"] = (*FEATURES["avx512"], "avx512_bf16")
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")


@pytest.fixture
def fresh_load():
    """Libraries are looked for again, in the test and after it."""
    native._outcomes.clear()
    native._devices.clear()
    yield
    native._outcomes.clear()
    native._devices.clear()


def usable(level: str) -> bool:
    features = _host.cpu_features()
    return all(features.get(name, False) for name in FEATURES.get(level, ()))


def test_levels_are_those_whose_instructions_the_cpu_has():
    """As the system says, which the compiler's runtime does not ask."""
    assert _host.cpu_levels() == [level for level in LEVELS if usable(level)]
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.is_file():
        pytest.skip("no list of flags to compare with")
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    assert flags is not None
    has = {level: set(FEATURES.get(level, ())) <= set(flags[1].split()) for level in LEVELS}
    assert _host.cpu_levels() == [level for level in LEVELS if has[level]]


def run_at(level: str, script: str) -> subprocess.CompletedProcess:
    return python("-c", script, env={**os.environ, "FUSEDRL_CPU_LEVEL": level})


@pytest.mark.parametrize("there", [True, False])
def test_a_corrupted_or_missing_library_is_explained(monkeypatch, tmp_path, fresh_load, there):
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native, "find", lambda name: broken if there else None)
    with pytest.raises(native.NativeLibraryError) as refusal:
        native.require("_C")
    message = str(refusal.value)
    machine = f"{platform.system()} {platform.machine()}"
    if there:
        assert f"fusedrl._C: {broken} does not load: " in message
        assert f"Built for: torch >= {_host.build_info()['torch_target']} on {machine}" in message
    else:
        assert message.startswith("fusedrl._C: expected a compiled library next to ")
    assert f"torch {torch.__version__} on {machine}" in message
    assert "pip install --force-reinstall" in message


@pytest.mark.parametrize("name", ["_C", "_C_cuda", "_host"])
def test_no_path_of_the_machine_that_built_it(name):
    path = native.find(name) if name != "_host" else Path(_host.__file__)
    if path is None:
        pytest.skip(f"built without {name}")
    content = path.read_bytes()
    for folder in (Path(__file__).parents[1], *map(Path, torch.__path__)):
        for spelling in {folder, folder.resolve()}:
            assert bytes(spelling) not in content


WITHOUT_LIBRARY = """
import pytest
import torch
from fusedrl import native

native.find = lambda name: None
from fusedrl import token_kl, token_log_probs

zeros, tokens = torch.zeros(2, 3), torch.tensor([0, 1])
with pytest.raises(native.NativeLibraryError, match="expected a compiled library"):
    token_log_probs(zeros, tokens)
with pytest.raises(native.NativeLibraryError, match="expected a compiled library"):
    token_kl(zeros[0], zeros[0])
uniform = token_log_probs(zeros, tokens, impl="reference")
torch.testing.assert_close(uniform.log_probs.exp(), torch.full((2,), 1 / 3))
"""


@pytest.mark.heavy
def test_ops_without_the_library_refuse_instead_of_running_slowly():
    done = run_at("", WITHOUT_LIBRARY)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_cuda_library_under_a_cpu_build_of_torch_is_explained():
    with pytest.raises(native.NativeLibraryError, match="_C_cuda: expected a CUDA build of torch"):
        native.require("_C_cuda")


# A build of torch for CUDA on a machine without a GPU, as it looks from Python. The package's own
# `_C_cuda`, if there is one, does not load into the build for the CPU that this really is.
ON_A_CUDA_BUILD = """
import pytest
import torch

torch.version.cuda = "13.0"
from fusedrl import native

if {driver!r} != "as it is":
    native._driver_version = lambda: {driver!r}
find = native.find
native.find = lambda name: None if name == "_C_cuda" and not {has_library} else find(name)
from fusedrl import token_log_probs
from fusedrl.cli import info

uniform = token_log_probs(torch.zeros(2, 3), torch.tensor([0, 1]))
torch.testing.assert_close(uniform.log_probs.exp(), torch.full((2,), 1 / 3))
with pytest.raises(native.NativeLibraryError, match="fusedrl._C_cuda: "):
    native.require("_C_cuda")
print(info.collect()["libraries"]["_C_cuda"])
"""


@pytest.mark.heavy
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
@pytest.mark.parametrize("driver", ["as it is", None, 12080, 13000])
@pytest.mark.parametrize("has_library", [True, False])
def test_cpu_ops_and_info_on_a_cuda_build_whatever_is_known_of_the_driver(driver, has_library):
    done = run_at("", ON_A_CUDA_BUILD.format(driver=driver, has_library=has_library))
    assert done.returncode == 0, done.stderr
    if not has_library or native.find("_C_cuda") is None:
        assert "expected a compiled library next to" in done.stdout
    elif driver == 12080:
        assert "expected a driver for CUDA 13.0 or newer, got one for CUDA 12.8" in done.stdout
    else:
        assert "does not load: " in done.stdout


def test_without_the_host_library_an_op_library_is_loaded_or_explained(monkeypatch, fresh_load):
    monkeypatch.setitem(sys.modules, "fusedrl._host", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert native.load_error("_C") is None
    error = native.load_error("_C_cuda")
    assert error is None or error.startswith("fusedrl._C_cuda: ")
    assert "unknown (the _host library does not load either)" in native.built_for()


RELEASE = "80-real 90-real 100"


@pytest.fixture
def gpus(monkeypatch, fresh_load):
    """A function that fakes a driver and its GPUs, and what the library was compiled for."""

    def fake(*capabilities, driver=13000, built=RELEASE):
        facts = _host.build_info() | {"cuda_compiler": "13.0.88", "cuda_architectures": built}
        monkeypatch.setattr(_host, "build_info", lambda: facts)
        monkeypatch.setattr(native, "find", lambda name: Path(__file__))
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        monkeypatch.setattr(native, "_driver_version", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)

    return fake


def chosen(index: int, impl: str = "auto") -> str:
    device = torch.device("cuda", index)
    return _dispatch.choose(impl, "token_kl", device, torch.float32)


def test_a_driver_older_than_the_library_leaves_the_reference(gpus, caplog):
    gpus((9, 0), driver=12080)
    assert [chosen(0), chosen(0)] == ["reference", "reference"]
    (said,) = caplog.messages
    assert "expected a driver for CUDA 13.0 or newer, got one for CUDA 12.8; update" in said
    assert said.endswith("using the reference implementation")
    with pytest.raises(native.NativeLibraryError, match=r"a driver for CUDA 13\.0 or newer"):
        chosen(0, "cuda")


def test_each_gpu_is_asked_for_itself(gpus, caplog):
    gpus((9, 0), (7, 5))
    assert [chosen(i) for i in (0, 1, 1, 0)] == ["cuda", "reference", "reference", "cuda"]
    (said,) = caplog.messages
    assert f"architectures {RELEASE}, got sm_75 on cuda:1; use a GPU from sm_80 on" in said
    with pytest.raises(native.NativeLibraryError, match="sm_75"):
        chosen(1, "cuda")
    assert chosen(0, "cuda") == "cuda"
    assert info.missing().keys() >= {"CUDA kernels for cuda:1"}
    assert "CUDA kernels for cuda:0" not in info.missing()


@pytest.mark.parametrize(
    ("built", "served", "refused"),
    [
        (RELEASE, [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], [(7, 5)]),
        ("80-real", [(8, 0), (8, 9)], [(7, 0), (9, 0), (12, 0)]),
        ("86", [(8, 6), (8, 9), (9, 0)], [(8, 0), (7, 5)]),
        ("90-virtual", [(9, 0), (10, 0)], [(8, 9)]),
    ],
)
def test_which_gpus_a_binary_serves(gpus, built, served, refused):
    """Machine code serves its generation from its own minor version on, PTX all that is newer."""
    gpus(*served, *refused, built=built)
    errors = [native.device_error(i) for i in range(len(served) + len(refused))]
    assert [error is None for error in errors] == [True] * len(served) + [False] * len(refused)


@pytest.mark.heavy
def test_a_traced_graph_takes_the_answer_about_a_gpu_as_a_constant(gpus):
    gpus((9, 0), (7, 5))

    def first_alone_is_served(x):
        return x + (1 if native.device_error(0) is None and native.device_error(1) else 2)

    compiled = torch.compile(first_alone_is_served, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


COMPARE = """
import torch
from fusedrl import _host
from fusedrl.ops.cases import all_cases

torch.set_num_threads(1)
for name, case in all_cases(classes=4099, sequences=2, length=4, width=19).items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results = []
        for impl, kind in (("cpu", dtype), ("reference", torch.float64)):
            leaves = {
                name: x.detach().to(dtype).to(kind).requires_grad_()
                for name, x in case.inputs.items()
            }
            outputs = case.call(leaves, impl=impl)
            upstream = [torch.linspace(1, 2, x.numel()).view_as(x).to(x) for x in outputs]
            results.append([*outputs, *torch.autograd.grad(outputs, [*leaves.values()], upstream)])
        for kernel, truth in zip(*results):
            # Gradients are rounded to the dtype of the inputs.
            close = {"rtol": 1e-5, "atol": 1e-5} if kernel.dtype == torch.float32 else {}
            torch.testing.assert_close(
                kernel.detach(), truth.detach().to(kernel.dtype), **close, msg=lambda m: name + m
            )
print(_host.cpu_level())
"""


@pytest.mark.heavy
@pytest.mark.parametrize("level", LEVELS)
def test_every_usable_level_agrees_with_the_reference(level):
    if not usable(level):
        pytest.skip(f"this CPU has no {level}")
    done = run_at(level, COMPARE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [level]


@pytest.mark.heavy
@pytest.mark.parametrize("level", ["fastest", *LEVELS])
def test_unusable_level_is_explained(level):
    if level in LEVELS and usable(level):
        pytest.skip(f"this CPU has {level}")
    done = run_at(level, "import fusedrl.native as n; n.require('_C')")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fusedrl.native.NativeLibraryError: fusedrl._C: FUSEDRL_CPU_LEVEL: ")
    best = max((x for x in LEVELS if usable(x)), key=LEVELS.index)
    assert f"up to {best}, the best of this CPU, got '{level}'; unset it" in last
