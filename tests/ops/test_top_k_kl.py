"""top_k_kl and linear_top_k_kl: against their definition in float64."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_top_k_kl, top_k_kl
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.top_k_kl import LEAST_REST, TAILS

INF = float("inf")


def kl(log_p, log_q):
    """Of two rows of log-probs, where a class may have none."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def divergence(student, teacher, direction, beta):
    """As the definitions have it, of log-probs over the same classes."""
    if direction == "reverse":
        return kl(student, teacher)
    if direction == "forward":
        return kl(teacher, student)
    middle = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    return (1 - beta) * kl(student, middle) + beta * kl(teacher, middle)


def definition(logits, ids, teacher, direction="reverse", tail="bucket", beta=0.5, temperature=1.0):
    """A log_softmax, a gather, and what is left of the probabilities; in float64."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    student, known = log_p.gather(-1, ids), teacher.double()
    if tail == "renormalize":
        return divergence(student.log_softmax(-1), known.log_softmax(-1), direction, beta)
    if ids.shape[-1] < logits.shape[-1]:
        student, known = (
            torch.cat((x, (1 - x.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()), -1)
            for x in (student, known)
        )
    return divergence(student, known, direction, beta)


def sample(rows, classes, k, dtype=torch.float32, apart=1.0):
    """Hidden states, weight and bias, and the k likeliest classes of a teacher near them."""
    head = torch.randn(*rows, 24), torch.randn(classes, 24) * 0.4, torch.randn(classes)
    hidden, weight, bias = (x.to(dtype) for x in head)
    logits = (hidden.double() @ weight.double().T + bias.double()).float()
    teacher = (logits + torch.randn(*rows, classes) * apart).double().log_softmax(-1)
    log_probs, ids = teacher.topk(min(k, classes))
    order = torch.randperm(ids.shape[-1])
    return (hidden, weight, bias), logits, ids[..., order], log_probs[..., order].float()


def gradients(function, leaves, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    return torch.autograd.grad(out, leaves, upstream.to(out))


@pytest.mark.parametrize("classes", [1, 7, 4097])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_the_definition_and_its_gradient(classes, direction, tail):
    for k, apart, temperature in ((1, 3.0, 1.0), (20, 1.0, 0.7), (64, 0.05, 25.0)):
        _, logits, ids, teacher = sample((9,), classes, k, apart=apart)
        options = {"direction": direction, "tail": tail, "temperature": temperature}
        upstream, results = torch.randn(9), []
        for path in (top_k_kl, definition):
            leaf = logits.clone().requires_grad_()
            values = path(leaf, ids, teacher, **options)
            results.append((values, *torch.autograd.grad(values, leaf, upstream.to(values))))
        assert results[0][0].dtype == torch.float32
        for ours, truth in zip(*results, strict=True):
            torch.testing.assert_close(ours.double(), truth.double(), rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 300), (70, 9000)])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 1.7, "temperature": 0.8}])
def test_from_hidden_states(dtype, shape, options):
    rows, classes = shape
    head, _, ids, teacher = sample((rows,), classes, 6, dtype)
    ids[0, 0] = -1
    capped = {key: value for key, value in options.items() if key != "temperature"}

    def ours(hidden, weight, bias):
        return linear_top_k_kl(hidden, weight, ids, teacher, bias=bias, **options)

    def exact(hidden, weight, bias):
        logits = capped.get("scale", 1.0) * (hidden.double() @ weight.double().T + bias.double())
        if "softcap" in capped:
            logits = 3.0 * torch.tanh(logits / 3.0)
        temperature = options.get("temperature", 1.0)
        return top_k_kl(logits, ids, teacher, temperature=temperature)

    upstream = torch.randn(rows)
    torch.testing.assert_close(ours(*head).double(), exact(*head), rtol=2e-5, atol=2e-5)
    for got, want in zip(
        gradients(ours, head, upstream), gradients(exact, head, upstream), strict=True
    ):
        assert got.dtype == dtype
        # The gathered rows and the log-prob have gradients that cancel, each rounded to the dtype.
        atol = max(2e-5, torch.finfo(dtype).eps) * (1 + want.abs().max().item())
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol)


def test_shifts_masks_and_forms_say_the_same():
    """Packed, padded and nested; what the mask drops is not read."""
    head, logits, ids, teacher = sample((3, 5), 50, 4)
    mask = torch.rand(3, 5) < 0.7
    dirty = logits.masked_fill(~torch.roll(mask, -1, 1)[..., None], float("nan"))
    expected = torch.zeros(3, 5, dtype=torch.float64)
    expected[:, 1:] = definition(logits[:, :-1], ids[:, 1:], teacher[:, 1:])
    expected = torch.where(mask, expected, 0)
    ids = ids.masked_fill(~mask[..., None], 10**6)
    found = {"padded": top_k_kl(dirty, ids, teacher, mask, shift=True)}
    packed = [x.flatten(0, 1) for x in (dirty, ids, teacher, mask)]
    offsets = torch.tensor([0, 5, 10, 15])
    found["packed"] = top_k_kl(*packed, offsets=offsets, shift=True).view(3, 5)
    nested = (torch.nested.as_nested_tensor(list(x)) for x in (dirty, ids, teacher, mask))
    found["nested"] = top_k_kl(*nested, shift=True).to_padded_tensor(0.0)
    hidden, weight, bias = head
    found["linear"] = linear_top_k_kl(*(hidden, weight, ids, teacher, mask), bias=bias, shift=True)
    for name, values in found.items():
        torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-5, msg=name)
        assert (values[~mask] == 0).all()


@pytest.mark.parametrize("tail", TAILS)
def test_a_token_without_ids_is_not_read(tail):
    """It has divergence 0, and a NaN of its row reaches no gradient."""
    (hidden, weight, _), _, ids, teacher = sample((3,), 20, 4)
    hidden[0], ids[0] = float("nan"), -1
    for op, rows in ((top_k_kl, [hidden @ weight.T]), (linear_top_k_kl, [hidden, weight])):
        leaves = [x.clone().requires_grad_() for x in rows]
        out = op(*leaves, ids, teacher, tail=tail)
        assert out[0] == 0
        grads = torch.autograd.grad(out.sum(), leaves)
        assert not grads[0][0].any()
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("tail", TAILS)
def test_second_derivatives_in_float64(tail):
    (hidden, weight, _), _, ids, teacher = sample((3,), 7, 3, torch.float64)
    leaves = [x[:, :3].clone().requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradgradcheck(
        lambda *head: linear_top_k_kl(*head, ids, teacher, tail=tail), leaves
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_dtypes_of_ids_and_log_probs(dtype):
    _, logits, ids, teacher = sample((5,), 60, 4)
    ids[2, 1] = -1
    assert torch.equal(top_k_kl(logits, ids.to(dtype), teacher), top_k_kl(logits, ids, teacher))
    for other in (torch.bfloat16, torch.float16, torch.float64):
        rounded = teacher.to(other)
        assert torch.equal(top_k_kl(logits, ids, rounded), top_k_kl(logits, ids, rounded.float()))


def test_no_gradient_reaches_the_teacher():
    (hidden, weight, _), logits, ids, teacher = sample((5,), 60, 4)
    teacher.requires_grad_()
    for op, rows in ((top_k_kl, [logits]), (linear_top_k_kl, [hidden, weight])):
        assert not op(*rows, ids, teacher).requires_grad
        op(*(x.requires_grad_() for x in rows), ids, teacher).sum().backward()
        assert teacher.grad is None and rows[0].grad.any()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (3,)])
@pytest.mark.parametrize("shift", [False, True])
def test_nothing_to_do(shape, shift):
    """No tokens, and tokens that are all dropped."""
    (hidden, weight, _), logits, ids, teacher = sample(shape, 60, 4)
    mask, count = torch.zeros(shape, dtype=torch.bool), shape[0]
    options = {"shift": shift, "offsets": torch.tensor([0, count]) if len(shape) == 1 else None}
    for op, rows in ((top_k_kl, [logits]), (linear_top_k_kl, [hidden, weight])):
        leaves = [x.requires_grad_() for x in rows]
        out = op(*leaves, ids, teacher, mask, **options)
        assert torch.equal(out, torch.zeros(shape))
        out.sum().backward()
        assert not any(leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_banned_classes(direction):
    """Where some of the ids or all others have a logit of -inf, or the teacher has none."""
    _, logits, ids, teacher = sample((4,), 5000, 8)
    ids[:], teacher[:] = torch.arange(8), torch.tensor(0.1).log()
    logits[0, 8:] = -INF
    teacher[0] = torch.tensor(0.125).log()
    logits[1, :3] = -INF
    logits[2, 100:] = -INF
    teacher[3, 2] = -INF
    truth = definition(logits, ids, teacher, direction)
    infinite = {"reverse": [3], "forward": [1], "jensen_shannon": []}[direction]
    assert truth.isinf().nonzero().flatten().tolist() == infinite
    ours = top_k_kl(logits, ids, teacher, direction=direction)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)
    finite = truth.isfinite()
    (grad,) = gradients(
        lambda x: top_k_kl(x, ids, teacher, direction=direction), [logits], torch.randn(4)
    )
    assert grad[finite].isfinite().all()
    assert (grad[logits == -INF] == 0).all()
