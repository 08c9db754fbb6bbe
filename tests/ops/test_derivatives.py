"""All ops: a first derivative wherever one is asked for, and never zeros for a second one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import checkpoint

from fusedrl import (
    exact_kl,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_kl,
    token_log_probs,
    top_k_kl,
)

TOKENS, OFFSETS = torch.tensor([0, 4, 2, 1]), torch.tensor([0, 1, 4])
MASK = torch.tensor([True, True, False, True])
ROWS = torch.linspace(-2, 2, 20).sin().view(4, 5)
OTHERS = torch.linspace(3, -1, 20).cos().view(4, 5)
HIDDEN, HEAD = torch.linspace(0, 4, 12).sin().view(4, 3), torch.linspace(1, 3, 15).sin().view(5, 3)


def head_options(x):
    return {"bias": OTHERS[0].to(x), "softcap": 3.0}


# Name -> a function of one float tensor, and where to differentiate it.
FUNCTIONS = {
    "token_log_probs": (
        lambda x, **o: token_log_probs(x, TOKENS, MASK, temperature=0.7, **o),
        ROWS,
    ),
    "token_log_probs, its entropy": (
        lambda x, **o: token_log_probs(x, TOKENS, entropy=True, **o).entropy,
        ROWS,
    ),
    "linear_token_log_probs": (
        lambda x, **o: linear_token_log_probs(x, HEAD.to(x), TOKENS, **head_options(x), **o),
        HIDDEN,
    ),
    "linear_token_log_probs, its weight": (
        lambda x, **o: linear_token_log_probs(HIDDEN.to(x), x, TOKENS, entropy=True, **o).entropy,
        HEAD,
    ),
    "linear_token_log_probs, its bias": (
        lambda x, **o: linear_token_log_probs(HIDDEN.to(x), HEAD.to(x), TOKENS, bias=x, **o),
        OTHERS[0],
    ),
    "token_kl": (
        lambda x, **o: token_kl(x, OTHERS.to(x), estimator="k3", **o),
        ROWS,
    ),
    "token_kl, its reference": (
        lambda x, **o: token_kl(OTHERS.to(x), x, estimator="k2", **o),
        ROWS,
    ),
    "token_kl, its reward": (
        lambda x, **o: token_kl(x, OTHERS.to(x), reward=ROWS.to(x), estimator="k2", **o).reward,
        ROWS,
    ),
    "token_kl, a list": (
        lambda x, **o: torch.cat(token_kl(list(x), list(OTHERS.to(x)), estimator="k3", **o)),
        ROWS,
    ),
    "exact_kl": (lambda x, **o: exact_kl(x, OTHERS.to(x), MASK, **o), ROWS),
    "exact_kl, forward": (
        lambda x, **o: exact_kl(OTHERS.to(x), x, direction="forward", **o),
        ROWS,
    ),
    "exact_kl, Jensen-Shannon": (
        lambda x, **o: exact_kl(x, OTHERS.to(x), direction="jensen_shannon", **o),
        ROWS,
    ),
    "exact_kl, its entropy": (
        lambda x, **o: sum(exact_kl(x, OTHERS.to(x), MASK, entropy=True, **o)),
        ROWS,
    ),
    "linear_exact_kl": (
        lambda x, **o: linear_exact_kl(x, HEAD.to(x), -HIDDEN.to(x), 2 * HEAD.to(x), MASK, **o),
        HIDDEN,
    ),
    "linear_exact_kl, its reference's weight": (
        lambda x, **o: linear_exact_kl(HIDDEN.to(x), HEAD.to(x), HIDDEN.to(x), x, **o),
        -HEAD,
    ),
}
TEACHER = OTHERS[:4].log_softmax(-1).topk(2)
FUNCTIONS["top_k_kl"] = (
    lambda x, **o: top_k_kl(x, TEACHER.indices, TEACHER.values.to(x), MASK, **o),
    ROWS,
)
FUNCTIONS["linear_top_k_kl"] = (
    lambda x, **o: linear_top_k_kl(x, HEAD.to(x), TEACHER.indices, TEACHER.values.to(x), **o),
    HIDDEN,
)
for loss in ("grpo", "gspo"):
    FUNCTIONS[f"linear_policy_loss, {loss}"] = (
        lambda x, loss=loss, **o: (
            linear_policy_loss(
                *(x, HEAD.to(x), TOKENS, MASK, OTHERS[1, :4].to(x)),
                old_log_probs=OTHERS[2, :4].to(x) - 1,
                offsets=OFFSETS,
                loss=loss,
                **o,
            ).loss
        ),
        HIDDEN,
    )
REFUSED = r"{}: expected a backward pass with create_graph=False.* impl='reference'"


@pytest.fixture(params=FUNCTIONS)
def case(request):
    return request.param.split(",")[0], *FUNCTIONS[request.param]


def test_a_hessian_is_refused(case):
    op, function, x = case
    with pytest.raises(RuntimeError, match=REFUSED.format(op)):
        hessian(lambda x: function(x).sum(), x)


@pytest.mark.parametrize("square", [False, True], ids=["constant upstream", "upstream with grad"])
def test_a_recorded_backward_pass_is_refused(case, square):
    op, function, x = case
    x = x.clone().requires_grad_()
    out = function(x * 2)
    with pytest.raises(RuntimeError, match=REFUSED.format(op)):
        torch.autograd.grad((out.square() if square else out).sum(), x, create_graph=True)


def test_a_nested_batch_is_refused():
    tokens = torch.nested.nested_tensor_from_jagged(TOKENS, OFFSETS)

    def total(x):
        rows = torch.nested.nested_tensor_from_jagged(x, OFFSETS)
        return token_log_probs(rows, tokens, shift=True).values().sum()

    with pytest.raises(RuntimeError, match=REFUSED.format("token_log_probs")):
        hessian(total, ROWS)


def test_a_reward_alone_is_refused():
    reward = ROWS.clone().requires_grad_()
    out = token_kl(ROWS, OTHERS, reward=reward).reward
    with pytest.raises(RuntimeError, match=REFUSED.format("token_kl")):
        torch.autograd.grad(out.sum(), reward, create_graph=True)


def test_the_reference_has_second_derivatives(case):
    _, function, x = case
    x = x.double().requires_grad_()
    for impl in ("reference", "auto"):  # float64 runs through it by itself, but for token_kl
        if impl == "auto" and case[0] == "token_kl":
            continue
        assert torch.autograd.gradgradcheck(lambda x, impl=impl: function(x, impl=impl), (x,))


def test_the_reference_in_float32_has_the_hessian_of_torch():
    def plain(x):
        return torch.log_softmax(x, -1).gather(-1, TOKENS[:, None]).sum()

    found = hessian(lambda x: token_log_probs(x, TOKENS, impl="reference").sum(), ROWS)
    assert found.abs().sum() > 1
    torch.testing.assert_close(found, hessian(plain, ROWS))


def test_torch_func_is_refused_with_a_remedy_that_works(case):
    _, function, x = case

    def total(x, **options):
        return function(x, **options).sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(NotImplementedError, match=r"impl='reference'"):
            transform(total)(x)
    with pytest.raises(NotImplementedError, match=r"outside the transforms of torch\.func"):
        torch.func.vjp(total, x)
    gradient = torch.func.grad(lambda x: total(x, impl="reference"))(x)
    torch.testing.assert_close(gradient, jacobian(total, x))


def test_vmap_without_a_gradient_is_right():
    both = torch.stack([ROWS, OTHERS])
    for op in (lambda x: token_log_probs(x, TOKENS), lambda x: exact_kl(x, ROWS)):
        expected = torch.stack([op(x) for x in both])
        torch.testing.assert_close(torch.vmap(op)(both), expected)
        with pytest.raises(NotImplementedError, match=r"outside the transforms of torch\.func"):
            torch.vmap(op)(both.clone().requires_grad_())
        with pytest.raises(NotImplementedError, match=r"outside the transforms of torch\.func"):
            torch.func.grad(lambda x, op=op: torch.vmap(op)(x).sum())(both)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(case, reentrant):
    _, function, x = case
    grads = []
    for recomputed in (False, True):
        leaf = x.clone().requires_grad_()
        if recomputed:
            out = checkpoint(lambda x: function(2 * x), leaf, use_reentrant=reentrant)
        else:
            out = function(2 * leaf)
        (out * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum().backward()
        grads.append(leaf.grad)
    assert grads[0].any()
    assert torch.equal(*grads)


def test_a_batch_of_upstream_gradients(case):
    """``is_grads_batched``, as ``jacobian(vectorize=True)`` asks."""
    _, function, x = case
    expected = jacobian(function, x)
    assert expected.any()
    torch.testing.assert_close(jacobian(function, x, vectorize=True), expected)


def test_a_graph_that_is_kept_and_run_twice(case):
    _, function, x = case
    leaf = x.clone().requires_grad_()
    total = function(leaf).sum()
    first, second = (torch.autograd.grad(total, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_compiled_graph_is_refused_by_torch(case):
    _, function, x = case
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x).sum(), backend="aot_eager")
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(compiled(leaf), leaf)
    torch.testing.assert_close(grad, jacobian(lambda x: function(x).sum(), x))

    def penalty():
        (grad,) = torch.autograd.grad(compiled(leaf), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)

    with pytest.raises(RuntimeError, match=r"double backward|create_graph=False|leaf Variable"):
        penalty()


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
def test_a_sharded_head_is_refused(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shard = {"vocab_offset": 0, "group": dist.group.WORLD}
        x = HIDDEN.clone().requires_grad_()
        out = linear_token_log_probs(x, HEAD, TOKENS, **shard)
        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        whole = linear_token_log_probs(x, HEAD, TOKENS).sum()
        torch.testing.assert_close(grad, torch.autograd.grad(whole, x)[0])
        with pytest.raises(RuntimeError, match=r"whole vocabulary with impl='reference'"):
            torch.autograd.grad(out.sum(), x, create_graph=True)
    finally:
        dist.destroy_process_group()
