"""sampling_support: the classes that transformers' sampler leaves, and the log-probs it sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sampler import SAMPLERS, allowed_by_transformers, sampled

from fusedrl import sampling_support, support_log_probs, token_log_probs


def dense(support, classes):
    """The support as bool ``[N, V]``; an empty row allows all."""
    ids, offsets = support
    counts = offsets.diff()
    allowed = (counts == 0)[:, None].expand(-1, classes).clone()
    allowed[torch.arange(len(counts)).repeat_interleave(counts), ids] = True
    return allowed


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 999),
    classes=st.integers(1, 30),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.05, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
    ties=st.booleans(),
)
def test_as_transformers_has_it(seed, classes, temperature, top_k, top_p, min_p, ties):
    logits = torch.randn(7, classes, generator=torch.Generator().manual_seed(seed)) * 2
    if ties:
        logits = logits.round()
    logits[:, 3:4] = -torch.inf
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = allowed_by_transformers(logits, **limits)
    assert torch.equal(dense(sampling_support(logits, **limits), classes), expected)


def test_rows_of_whole_sequences():
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    ids, offsets = sampling_support(logits, mask, top_k=np.int64(3), shift=True)
    assert offsets.diff().tolist() == [0, 3, 0, 3, 0, 3, 3, 3]
    expected = logits[:, :-1].topk(3).indices.sort().values[mask[:, 1:]]
    assert torch.equal(ids.view(-1, 3), expected)
    packed = sampling_support(
        *(logits.flatten(0, 1), mask.flatten()),
        **{"top_k": 3, "shift": True, "offsets": torch.tensor([0, 4, 8])},
    )
    assert torch.equal(packed[0], ids) and torch.equal(packed[1], offsets)


@pytest.mark.parametrize("name", SAMPLERS)
def test_log_probs_over_the_support_are_those_of_the_sampler(name):
    """Every token of `generate`, from the hidden states that a trainer computes."""
    run = sampled(name)
    support = sampling_support(run.logits, **run.limits)
    if name != "temperature":
        assert bool((support[1].diff() < run.logits.shape[-1]).all())
        assert int(support[1][-1]) > 0
    with torch.no_grad():
        hidden = run.model.model(run.sequences).last_hidden_state
    start = run.sequences.shape[1] - run.tokens.shape[1]
    head, temperature = run.model.lm_head.weight, run.limits["temperature"]
    found = support_log_probs(
        *(hidden[:, start - 1 : -1], head, run.tokens, support), temperature=temperature
    )
    torch.testing.assert_close(found, run.log_probs, rtol=0, atol=1e-5)
    # From logits in memory, which is what the documentation says of them.
    allowed = dense(support, run.logits.shape[-1]).view_as(run.logits)
    logits = run.logits.masked_fill(~allowed, -torch.inf)
    found = token_log_probs(logits, run.tokens, temperature=temperature).log_probs
    torch.testing.assert_close(found, run.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients_of_the_definition(dtype):
    """Shifted rows of which some are dropped, some truncated and some not."""
    torch.manual_seed(0)
    rows = torch.randn(2, 6, 8), torch.randn(40, 8), torch.randn(40)
    tokens, mask = torch.randint(40, (2, 6)), torch.rand(2, 6) < 0.8
    allowed = torch.rand(12, 40) < 0.3
    allowed[::3] = False  # all classes count
    allowed[allowed.any(-1)] |= torch.nn.functional.one_hot(tokens.flatten(), 40).bool()[
        allowed.any(-1)
    ]
    counts = allowed.sum(-1)
    support = allowed.nonzero()[:, 1], torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    outside = (~allowed & (counts > 0)[:, None]).view(2, 6, 40)
    options = {"softcap": 4.0, "scale": 0.8}

    def ours(hidden, weight, bias):
        return support_log_probs(
            *(hidden, weight, tokens, support, mask),
            **options | {"bias": bias, "shift": True, "temperature": 0.7},
        )

    def definition(hidden, weight, bias):
        logits = options["scale"] * (hidden[:, :-1] @ weight.T + bias)
        logits = 4.0 * torch.tanh(logits / 4.0) / 0.7
        logits = logits.masked_fill(outside[:, 1:], -torch.inf)
        kept = torch.where(mask[:, 1:, None], logits, 0).log_softmax(-1)
        found = kept.gather(-1, tokens[:, 1:, None]).squeeze(-1) * mask[:, 1:]
        return torch.nn.functional.pad(found, (1, 0))

    upstream, results = torch.randn(2, 6), []
    for function, kind in ((ours, dtype), (definition, torch.float64)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in rows]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(out))])
    for mine, truth in zip(*results, strict=True):
        atol = max(1e-5, torch.finfo(mine.dtype).eps)
        torch.testing.assert_close(mine.double(), truth.double(), rtol=max(1e-4, atol), atol=atol)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_a_support_of_any_integers(dtype):
    """As an index, uint8 would be a mask."""
    hidden, weight = torch.randn(2, 3), torch.randn(4, 3)
    support = torch.tensor([1, 2, 2, 3]), torch.tensor([0, 2, 4])
    tokens = torch.tensor([1, 2])
    wanted = support_log_probs(hidden, weight, tokens, support)
    narrow = tuple(x.to(dtype) for x in support)
    assert torch.equal(support_log_probs(hidden, weight, tokens, narrow), wanted)
    with pytest.raises(ValueError, match="ascend"):
        support_log_probs(hidden, weight, tokens, (narrow[0].flip(0), narrow[1]))


def test_second_derivatives():
    hidden, weight = torch.randn(2, 3).double(), torch.randn(6, 3).double()
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    support = torch.tensor([1, 3, 2, 5]), torch.tensor([0, 2, 4])
    assert torch.autograd.gradgradcheck(
        lambda *head: support_log_probs(*head, torch.tensor([1, 2]), support), leaves
    )


def test_the_support_of_a_dropped_token_is_not_read():
    hidden, weight, tokens = torch.randn(2, 4), torch.randn(9, 4), torch.tensor([1, 2])
    support = torch.tensor([9, -1, 2, 5]), torch.tensor([0, 2, 4])
    found = support_log_probs(hidden, weight, tokens, support, torch.tensor([False, True]))
    assert found[0] == 0
    logits = (hidden[1] @ weight.T)[[2, 5]]
    torch.testing.assert_close(found[1], logits.log_softmax(-1)[0])


def test_nan_is_not_left_out():
    logits = torch.tensor([[1.0, 2.0, torch.nan, 0.0]])
    ids, _ = sampling_support(logits, top_k=2)
    assert 2 in ids
