"""Every op on "CUDA" tensors, forward and backward: what is launched, and the form of results."""

from __future__ import annotations

import ctypes
import re
import warnings

import pytest
import torch

import fusedrl
from fusedrl import native
from fusedrl.ops.cases import OPS, Case, all_cases, cases_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_ENTROPY = {"entropy": False, "entropy_coeff": 0.0}


def without_entropy(cases):
    """Those that compute it, without: other kernels run then."""
    for name, case in cases.items():
        off = {option: NO_ENTROPY[option] for option in NO_ENTROPY.keys() & case.others.keys()}
        if off:
            yield f"{name} off", case._replace(others=case.others | off)


SMALL = {f"{op}, {case.name}": case for op in OPS for case in cases_of(op)}
SMALL |= dict(without_entropy(SMALL))
# A vocabulary as models have it, of which few rows are split over many blocks, and many rows with
# more gradients of logits than exist at a time.
LARGE = all_cases(classes=151936)
LARGE["linear_token_log_probs, many rows"] = Case(
    fusedrl.linear_token_log_probs,
    "many rows",
    {"hidden": torch.zeros(1, 16384, 8), "weight": torch.zeros(151936, 8)},
    {"tokens": torch.zeros(1, 16384, dtype=torch.int64), "shift": True},
)


@pytest.fixture(scope="module", autouse=True)
def _nonzero():
    """Every other place is one: the kernel of torch's nonzero would count none, and no row kept."""

    def nonzero(x):
        return torch.ones(x.shape).nonzero()[::2].to(x.device)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch has one itself
        library.impl("nonzero", nonzero, "CUDA")
    yield
    library._destroy()


def run(case, dtype, device, frozen=()):
    """The results of a case and its gradients, in that order."""
    case = case.to(device)
    leaves = {
        name: x.detach().to(dtype).requires_grad_(name not in frozen)
        for name, x in case.inputs.items()
    }
    results = case.call(leaves)
    upstream = [torch.zeros_like(x) for x in results]
    trained = [x for x in leaves.values() if x.requires_grad]
    return [*results, *torch.autograd.grad(results, trained, upstream)]


def forms(tensors):
    return [(x.shape, x.dtype) for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_an_op_goes_forward_and_backward(name, dtype, launches):
    there = run(SMALL[name], dtype, "cuda")
    torch.cuda.synchronize()
    assert {x.device for x in there} == {torch.device("cuda", 0)}
    assert forms(there) == forms(run(SMALL[name], dtype, "cpu"))
    launched = launches.new()
    assert launched
    assert all(launch.runs for launch in launched)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_vocabulary_is_launched_within_the_limits(name, launches):
    run(LARGE[name], torch.bfloat16, "cuda")
    assert all(launch.runs for launch in launches.new())


def test_every_kernel_is_launched(launches, tmp_path):
    """By some case, so that nothing of the library is left out here."""
    for name, case in (SMALL | LARGE).items():
        for dtype in (*DTYPES, *([torch.float64] if name.startswith("token_kl") else [])):
            run(case, dtype, "cuda")
            if "linear_token_log_probs" in name:
                run(case, dtype, "cuda", frozen=("weight", "bias"))
    path = tmp_path / "kernels"
    # Looked up in the runtime, which the library brings along.
    ctypes.CDLL(str(native.find("_C_cuda"))).fake_cuda_kernels(str(path).encode())
    there = {name for name in path.read_text().splitlines() if "fusedrl::" in name}
    launched = {launch.kernel for launch in launches.new()}
    assert there
    assert "\n".join(sorted(there - launched)) == ""


def test_nested_tensors_are_taken_and_answered(launches):
    offsets = torch.tensor([0, 3, 3, 5]).cuda()  # one tensor, as comparing two compares no values
    logits = torch.nested.nested_tensor_from_jagged(torch.zeros(5, 11).cuda(), offsets)
    logits.requires_grad_()
    tokens = torch.nested.nested_tensor_from_jagged(torch.zeros(5).long().cuda(), offsets)
    log_probs = fusedrl.token_log_probs(logits, tokens, shift=True).log_probs
    assert log_probs.is_nested and log_probs.is_cuda
    log_probs.values().sum().backward()
    assert logits.grad is not None and logits.grad.is_nested
    assert {re.findall(r"(\w+)_rows", launch.kernel)[0] for launch in launches.new()} == {
        "forward",
        "backward",
    }


def test_the_support_of_a_sampler_is_computed():
    logits = torch.randn(2, 5, 100).cuda()
    ids, offsets = fusedrl.sampling_support(logits, top_k=10)
    assert ids.is_cuda and offsets.shape == (11,)
