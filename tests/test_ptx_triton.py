"""The Triton kernels without a GPU: their PTX for sm_80, as compiled, against float64."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch
from ptx.machine import WARP, Lanes, Program
from ptx.memory import Memory
from ptx.program import kernels
from triton_interpreter.run import exact

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from fusedrl.ops.linear_token_log_probs import triton as ours  # noqa: E402

pytestmark = pytest.mark.slow

ARCHITECTURE = 80
FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # of arguments; the others are addresses


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    """What was compiled for earlier launches."""
    return {}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, tmp_path, programs):
    """Launches run here, on CPU tensors, for a GPU that is not there."""
    compile_ = triton.JITFunction.run

    def launch(function, *args, grid, warmup, **options):
        del warmup
        compiled = compile_(function, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in programs:
            size = f"global_smem[{compiled.metadata.shared}]"
            (kernel,) = kernels(compiled.asm["ptx"].replace("global_smem[]", size))
            programs[compiled.hash] = Program(kernel)
        program = programs[compiled.hash]
        given = dict(zip(function.arg_names, args, strict=False)) | options
        packed = bytearray(sum(v.size for v in program.kernel.params.values()) + 64)
        kinds = [(x, kind) for x, kind in compiled.src.signature.items() if kind != "constexpr"]
        for (name, kind), place in zip(kinds, program.kernel.params.values(), strict=False):
            value = given[name]
            value = value.data_ptr() if isinstance(value, torch.Tensor) else value
            struct.pack_into(FORMATS.get(kind, "q"), packed, place.offset, value)
        memories = [x.untyped_storage() for x in given.values() if isinstance(x, torch.Tensor)]

        def find(address: int) -> tuple[int, int]:
            whole = ((x.data_ptr(), x.nbytes()) for x in memories)
            return next((x for x in whole if x[0] <= address < x[0] + x[1]), (0, 0))

        memory = Memory(find, program.kernel.shared, grid[0], bytes(packed), replicas=True)
        Lanes(program, grid[0], WARP * compiled.metadata.num_warps, memory).run()

    fake = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", ARCHITECTURE, WARP),
        get_current_device=lambda: ARCHITECTURE,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.JITFunction, "run", launch)
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(ours, "_compute_capability", lambda tensor: ARCHITECTURE)
    monkeypatch.setattr(ours, "MAX_SPLITS", 32)  # so that a split has several tiles
    # Memory that no kernel has written is NaN.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# H: of whole steps, with a part of one, and with rows that no vector divides.
WHOLE, PART, NARROW = 128, 80, 41


@pytest.mark.parametrize(
    ("dtype", "depth"),
    [
        (torch.bfloat16, WHOLE),
        (torch.float16, PART),
        (torch.bfloat16, NARROW),
        (torch.float32, NARROW),
    ],
)
def test_agrees_with_float64(dtype, depth):
    """Splits of two tiles, the last tile not full, and one of classes without probability."""
    hidden, weight = torch.randn(100, depth).to(dtype), torch.randn(4200, depth) / depth**0.5
    weight, bias = weight.to(dtype), torch.randn(4200).to(dtype)
    bias[128:256] = -torch.inf
    targets = torch.randint(-1, 4200, (100,))
    given = hidden, weight, bias, targets, torch.tensor([1.3]), 0.7, 0.0, True
    for mine, want in zip(ours.partials(*given), exact(*given), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=2e-5, atol=2e-5)


def test_softcap_without_entropy():
    """More than one tile of rows."""
    hidden, weight = torch.randn(130, WHOLE).half(), torch.randn(200, WHOLE).half()
    given = hidden, weight, None, torch.randint(200, (130,)), torch.ones(1), 1.0, 3.0, False
    for mine, want in zip(ours.partials(*given), exact(*given), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=2e-5, atol=2e-5)
