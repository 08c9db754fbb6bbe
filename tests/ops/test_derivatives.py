"""All ops: a first derivative wherever one is asked for, and never zeros for a second one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

from fusedrl import exact_kl, linear_token_log_probs, token_log_probs

from .every_case import FEW, gradients, leaves_of

TOKENS = torch.tensor([0, 4, 2, 1])
ROWS = torch.linspace(-2, 2, 20).sin().view(4, 5)
OTHERS = torch.linspace(3, -1, 20).cos().view(4, 5)
HIDDEN, HEAD = torch.linspace(0, 4, 12).sin().view(4, 3), torch.linspace(1, 3, 15).sin().view(5, 3)
REFUSED = r"({}): expected a backward pass with create_graph=False.* impl='reference'"


@pytest.fixture(params=FEW)
def case(request):
    return request.param.split(",")[0], FEW[request.param]


def of_first(case, **options):
    """A function of the first input of a case, and that input."""
    name, *others = case.inputs
    rest = {other: case.inputs[other] for other in others}

    def function(x):
        kept = {k: v.to(x) for k, v in rest.items()}
        return torch.cat([y.flatten() for y in case.call({name: x} | kept, **options)])

    return function, case.inputs[name]


@pytest.mark.parametrize("square", [False, True], ids=["constant upstream", "upstream with grad"])
def test_a_recorded_backward_pass_is_refused(case, square):
    op, case = case
    op = op.replace("linear_policy_loss", "token_kl|linear_token_log_probs")  # of which it is made
    leaves = leaves_of(case)
    out = torch.cat([y.flatten() for y in case.call({k: 2 * x for k, x in leaves.items()})])
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match=REFUSED.format(op)):
            torch.autograd.grad((out.square() if square else out).sum(), leaf, create_graph=True)


def test_the_reference_has_second_derivatives(case):
    op, case = case
    for impl in ("reference", "auto"):  # float64 runs through it by itself, but for token_kl
        if (impl == "auto" and op in ("token_kl", "linear_policy_loss")) or case.others.get(
            "loss"
        ) == "cispo":
            continue  # the ratio of cispo is a constant, which differences do not see
        function, x = of_first(case, impl=impl)
        leaf = x.double().requires_grad_()
        assert torch.autograd.gradcheck(function, leaf)
        assert torch.autograd.gradgradcheck(function, leaf)


def test_torch_func_is_refused_with_a_remedy_that_works(case):
    function, x = of_first(case[1])
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(NotImplementedError, match=r"impl='reference'"):
            transform(lambda x: function(x).sum())(x)
    with pytest.raises(NotImplementedError, match=r"outside the transforms of torch\.func"):
        torch.func.vjp(function, x)
    reference, _ = of_first(case[1], impl="reference")
    gradient = torch.func.grad(lambda x: reference(x).sum())(x)
    torch.testing.assert_close(gradient, jacobian(lambda x: function(x).sum(), x))


def test_vmap_without_a_gradient_is_right():
    both = torch.stack([ROWS, OTHERS])
    for op in (lambda x: token_log_probs(x, TOKENS).log_probs, lambda x: exact_kl(x, ROWS).kl):
        expected = torch.stack([op(x) for x in both])
        torch.testing.assert_close(torch.vmap(op)(both), expected)
        with pytest.raises(NotImplementedError, match=r"outside the transforms of torch\.func"):
            torch.vmap(op)(both.clone().requires_grad_())
        with pytest.raises(NotImplementedError, match=r"outside the transforms of torch\.func"):
            torch.func.grad(lambda x, op=op: torch.vmap(op)(x).sum())(both)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(case, reentrant):
    function, x = of_first(case[1])
    grads = []
    for recomputed in (False, True):
        leaf = x.clone().requires_grad_()
        if recomputed:
            out = checkpoint(lambda x: function(2 * x), leaf, use_reentrant=reentrant)
        else:
            out = function(2 * leaf)
        (out * torch.arange(1.0, 1 + out.numel())).sum().backward()
        grads.append(leaf.grad)
    assert grads[0].any()
    assert torch.equal(*grads)


def test_a_batch_of_upstream_gradients(case):
    """``is_grads_batched``, as ``jacobian(vectorize=True)`` asks."""
    function, x = of_first(case[1])
    expected = jacobian(function, x)
    assert expected.any()
    torch.testing.assert_close(jacobian(function, x, vectorize=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_graph_that_is_kept_and_run_again(case, dtype):
    """By a caller that clips the gradients in place: none of them is what was saved."""
    case, leaves = case[1], leaves_of(case[1], dtype)
    results = case.call(leaves)
    expected = [x.clone() for x in gradients(results, leaves, retain_graph=True)]
    for keeps in (True, True, False):
        found = gradients(results, leaves, retain_graph=keeps)
        assert all(map(torch.equal, found, expected))
        for grad in found:
            grad.zero_()


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
def test_a_sharded_head_is_refused(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shard = {"vocab_offset": 0, "vocab_group": dist.group.WORLD}
        x = HIDDEN.clone().requires_grad_()
        out = linear_token_log_probs(x, HEAD, TOKENS, **shard).log_probs
        with pytest.raises(RuntimeError, match=r"whole vocabulary with impl='reference'"):
            torch.autograd.grad(out.sum(), x, create_graph=True)
    finally:
        dist.destroy_process_group()
