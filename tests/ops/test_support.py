"""The support of truncated sampling: log-probs over it alone, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fusedrl import linear_policy_loss, linear_token_log_probs, sampling_support, token_log_probs

CLASSES, WIDTH = 11, 37


def csr(rows):
    """Lists of ids as a support; an empty one stands for all classes."""
    counts = torch.tensor([0, *map(len, rows)])
    return torch.tensor([id for row in rows for id in row], dtype=torch.int64), counts.cumsum(0)


@st.composite
def problems(draw):
    """Packed sequences, and for each token its own id and others, or none for all classes."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    count = sum(lengths)
    classes = st.integers(0, CLASSES - 1)
    tokens = draw(st.lists(classes, min_size=count, max_size=count))
    mask = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    rows = []
    for token in tokens:
        others = draw(st.none() | st.sets(classes, max_size=6))
        rows.append([] if others is None else sorted({token, *others}))
    shift, temperature = draw(st.booleans()), draw(st.sampled_from([0.3, 1.0, 2.5]))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.tensor(tokens, dtype=torch.int64), mask, rows, offsets, shift, temperature


def by_hand(logits, tokens, mask, rows, offsets, shift, temperature):
    """Log-probs and entropies, one token after the other."""
    log_probs, entropy = [], []
    for n, row in enumerate(rows):
        if not mask[n] or (shift and n in offsets[:-1].tolist()):
            log_probs.append(logits.sum() * 0)
            entropy.append(logits.sum() * 0)
            continue
        ids = row or range(logits.shape[1])
        log_p = (logits[n - shift, list(ids)] / temperature).log_softmax(0)
        log_probs.append(log_p[list(ids).index(int(tokens[n]))])
        entropy.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropy)


def differentiated(function, leaves):
    """Results, and gradients with upstream gradients that differ."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    results = function(*leaves)
    upstream = [
        torch.linspace(i + 1, i + 2, x.numel()).view_as(x).to(x) for i, x in enumerate(results)
    ]
    return [*results, *torch.autograd.grad(results, leaves, upstream)]


@settings(max_examples=60, deadline=None)
@given(problem=problems(), bias=st.booleans())
def test_against_float64_by_hand(problem, bias):
    tokens, mask, rows, offsets, shift, temperature = problem
    if not len(tokens):
        return
    torch.manual_seed(0)
    head = [torch.randn(n, WIDTH) / 6 for n in (len(tokens), CLASSES)] + [torch.randn(CLASSES)]
    head = head[: 2 + bias]
    options = {"offsets": offsets, "shift": shift, "temperature": temperature, "entropy": True}
    options |= {"support": csr(rows)}
    kept = torch.tensor(mask)

    def logits(hidden, weight, bias=None):
        return functional.linear(hidden, weight, bias)

    def expected(*head):
        return by_hand(logits(*head), tokens, mask, rows, offsets, shift, temperature)

    def of_head(hidden, weight, bias=None):
        return linear_token_log_probs(hidden, weight, tokens, kept, bias=bias, **options)

    def of_logits(*head):
        return token_log_probs(logits(*head), tokens, kept, **options)

    exact = differentiated(expected, [x.double() for x in head])
    for op in (of_head, of_logits):
        found = differentiated(op, head)
        torch.testing.assert_close([x.double() for x in found], exact, rtol=1e-5, atol=3e-6)
        in_double = differentiated(op, [x.double() for x in head])
        torch.testing.assert_close(in_double, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 16, 97, 300])
def test_padded_and_long_rows_in_every_dtype(dtype, width):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 2 * width)[..., :width].to(dtype)  # rows with gaps between them
    weight = (torch.randn(400, width) / width**0.5).to(dtype)
    tokens, mask = torch.randint(400, (2, 5)), torch.rand(2, 5) < 0.8
    allowed = (torch.rand(10, 400) < 0.5).scatter(1, tokens.view(-1, 1), True)
    support = csr([row.nonzero().flatten().tolist() for row in allowed])

    def run(impl):
        def op(hidden, weight):
            return linear_token_log_probs(
                *(hidden, weight, tokens, mask),
                **{"shift": True, "entropy": True, "support": support, "softcap": 3.0},
                **{"impl": impl, "batch_invariant": impl == "cpu"},
            )

        return op

    exact = differentiated(run("auto"), [hidden.double(), weight.double()])
    found = differentiated(run("cpu"), [hidden, weight])
    eps = max(torch.finfo(dtype).eps, 2e-6)
    for x, want, rtol in zip(found, exact, (2e-6, 2e-6, eps, eps), strict=True):
        atol = rtol * float(want.abs().max())
        torch.testing.assert_close(x.double(), want, rtol=rtol, atol=atol)


def test_bits_of_a_row_depend_on_it_alone():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 70), torch.randn(500, 70)
    tokens = torch.randint(50, (9,))
    rows = [sorted({int(t), *torch.randperm(50)[:7].tolist()}) for t in tokens]
    options = {"entropy": True}
    whole = linear_token_log_probs(hidden, weight, tokens, support=csr(rows), **options)
    for n in range(9):
        own = hidden[n : n + 1].clone(), weight, tokens[n : n + 1]
        alone = linear_token_log_probs(*own, support=csr(rows[n : n + 1]), **options)
        assert torch.equal(alone.log_probs[0], whole.log_probs[n])
        assert torch.equal(alone.entropy[0], whole.entropy[n])


def test_nothing_outside_of_the_support_is_read():
    logits = torch.full((3, 6), torch.nan)
    logits[0, [1, 4]], logits[2, 3] = torch.tensor([0.0, 1.0]), 5.0
    support = csr([[1, 4], [-7, 99], [3]])  # the ids of a dropped token are not read either
    tokens, mask = torch.tensor([4, -100, 3]), torch.tensor([True, False, True])
    leaf = logits.requires_grad_()
    found = token_log_probs(leaf, tokens, mask, support=support, entropy=True)
    torch.testing.assert_close(found.log_probs.exp(), torch.tensor([0.7310586, 1.0, 1.0]))
    found.log_probs.sum().backward()
    assert bool((leaf.grad[logits.isnan()] == 0).all())
    hidden, weight = torch.randn(3, 6), torch.full((99, 6), torch.nan)
    hidden[1], weight[[1, 3, 4]] = torch.nan, torch.randn(3, 6)
    linear = linear_token_log_probs(hidden, weight, tokens, mask, support=support)
    assert bool(linear.isfinite().all())


def test_a_class_without_probability_and_a_row_without_any():
    inf = torch.inf
    logits = torch.tensor([[0.0, -inf, 2.0], [-inf, -inf, 1.0], [inf, 0.0, 1.0]])
    support = csr([[0, 1], [0, 1], [0, 1]])
    found = token_log_probs(logits, torch.tensor([0, 0, 1]), support=support, entropy=True)
    assert found.log_probs[0] == 0 and found.entropy[0] == 0
    assert bool(found.log_probs[1:].isnan().all())


def test_nested_rows():
    torch.manual_seed(0)
    parts = [torch.randn(n, 8) for n in (3, 0, 2)]
    tokens = [torch.randint(8, (len(x),)) for x in parts]
    flat = torch.cat(tokens)
    support = csr([sorted({int(t), 1, 2}) for t in flat])
    logits, ids = (torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in (parts, tokens))
    found = token_log_probs(logits, ids, shift=True, support=support)
    options = {"offsets": torch.tensor([0, 3, 3, 5]), "shift": True, "support": support}
    assert torch.equal(found.values(), token_log_probs(torch.cat(parts), flat, **options))


def test_a_compiled_graph_gives_the_same_and_refuses_what_does_not_fit():
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(6, 20), torch.randn(9, 20), torch.randint(9, (6,))
    support = csr([[], *([min(int(t), 3), max(int(t), 3)] * (t != 3) or [3] for t in tokens[1:])])

    def run(hidden, weight, tokens, ids, offsets):
        of_head = linear_token_log_probs(hidden, weight, tokens, support=(ids, offsets))
        return of_head + token_log_probs(hidden @ weight.T, tokens, support=(ids, offsets))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    args = (hidden, weight, tokens, *support)
    torch.testing.assert_close(compiled(*args), run(*args))
    for at, change, told in (
        (0, torch.tensor([0] * 8 + [70]), r"support: expected ids in \[0, V\)"),
        *(
            (1, torch.tensor(change), "support: expected offsets from 0 to the number of ids that")
            for change in (
                [0, 0, 0, 0, 0, 0, -1],  # ends too early
                [0, 0, 0, 0, 0, 0, 1],
                [1, 0, 0, 0, 0, 0, 0],
                [0, 0, 0, 3, 0, 0, 0],  # decreases
                [0, -1, 0, 0, 0, 0, 0],
            )
        ),
    ):
        wrong = [x.clone() for x in support]
        wrong[at] += change
        with pytest.raises(RuntimeError, match=told):
            compiled(hidden, weight, tokens, *wrong)


def test_a_policy_loss_equals_the_one_over_log_probs():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 12), torch.randn(30, 12)
    tokens, advantages = torch.randint(30, (2, 5)), torch.tensor([1.0, -0.5])
    rows = [sorted({int(t), *torch.randperm(30)[:4].tolist()}) for t in tokens.flatten()]
    old = -torch.rand(2, 5)
    options = {"shift": True, "support": csr(rows)}

    def fused(hidden, weight):
        loss = linear_policy_loss(
            *(hidden, weight, tokens, advantages), old_log_probs=old, loss="dapo", **options
        )
        return [loss.loss]

    def plain(hidden, weight):
        log_probs = linear_token_log_probs(hidden, weight, tokens, **options, impl="reference")
        ratio = (log_probs - old)[:, 1:].exp()
        a = advantages[:, None]
        return [-torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a).mean()]

    found = differentiated(fused, [hidden, weight])
    torch.testing.assert_close(found, differentiated(plain, [hidden, weight]))


def test_a_bandit_has_no_bias_with_the_support_alone():
    """Of a policy over 6 answers, 3 of which are sampled, all gradients can be enumerated."""
    weight = torch.tensor([1.5, 1.0, 0.5, 0.0, -0.5, -1.0], dtype=torch.float64).view(6, 1)
    reward = torch.tensor([0.2, 1.0, 0.0, 0.3, 0.9, 0.1], dtype=torch.float64)
    one, answers = torch.ones(3, 1, dtype=torch.float64), torch.arange(3)
    support = csr([[0, 1, 2]] * 3)
    leaf = weight.clone().requires_grad_()
    sampled = leaf[:3, 0].softmax(0)  # top-k with k = 3
    (exact,) = torch.autograd.grad(sampled @ reward[:3], leaf)
    shares = sampled.detach()

    def estimate(support):
        log_probs = linear_token_log_probs(one, leaf, answers, support=support)
        return torch.autograd.grad((shares * (reward[:3] * log_probs)).sum(), leaf)[0]

    torch.testing.assert_close(estimate(support), exact, rtol=1e-12, atol=1e-14)
    assert float((estimate(None) - exact).norm() / exact.norm()) > 0.25


BAD = {
    "type": (torch.tensor([1]), r"support: expected two tensors, got a dense tensor; pass"),
    "floats": ((torch.ones(1), torch.tensor([0, 1, 1])), "expected 1-D tensors of int64 or int32"),
    "short": ((torch.tensor([1]), torch.tensor([0, 1])), "offsets of 3 elements for 2 tokens"),
    "falling": ((torch.tensor([1]), torch.tensor([0, 2, 1])), "do not decrease, got a decrease"),
    "end": ((torch.tensor([1]), torch.tensor([0, 1, 2])), "offsets from 0 to 1, the number of ids"),
    "range": (csr([[1], [2, 4]]), r"ids in \[0, 4\), got 4 at token 1; mask"),
    "order": (csr([[1], [2, 0]]), "ascending order, each once, got 0 behind 2 at token 1; sort"),
    "twice": (csr([[1, 1], [2]]), "ascending order, each once, got 1 behind 1 at token 0; sort"),
    "token": (csr([[1], [0, 3]]), "every kept token among its own ids, got 2 at token 1, which"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_bad_supports_are_refused(bad, impl):
    support, message = BAD[bad]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        token_log_probs(torch.zeros(2, 4), torch.tensor([1, 2]), support=support, impl=impl)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        linear_token_log_probs(
            torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 2]), support=support, impl=impl
        )


def test_what_support_does_not_go_with():
    head, tokens, support = (torch.zeros(1, 3), torch.zeros(4, 3)), torch.tensor([1]), csr([[1]])
    with pytest.raises(ValueError, match="support: expected None with vocab_offset"):
        linear_token_log_probs(*head, tokens, support=support, vocab_offset=0)
    with pytest.raises(ValueError, match="impl: expected 'auto', 'cpu', 'cuda' or 'reference'"):
        linear_token_log_probs(*head, tokens, support=support, impl="triton")
    weight = head[1].requires_grad_()
    with pytest.raises(ValueError, match="main_grad: expected None with support"):
        linear_policy_loss(
            *(head[0], weight, tokens, torch.ones(1)), support=support, main_grad=torch.zeros(4, 3)
        )
    with pytest.raises(ValueError, match="top_k: expected an integer >= 1"):
        sampling_support(torch.zeros(2, 4), top_k=0)
    with pytest.raises(ValueError, match="top_p: expected a number above 0"):
        sampling_support(torch.zeros(2, 4), top_p=0.0)
    with pytest.raises(ValueError, match="min_p: expected a number from 0 to 1"):
        sampling_support(torch.zeros(2, 4), min_p=2)
