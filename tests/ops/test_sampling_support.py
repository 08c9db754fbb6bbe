"""sampling_support: the classes that transformers' sampler leaves, and the log-probs it sampled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sampler import SAMPLERS, allowed_by_transformers, sampled

from fusedrl import linear_token_log_probs, sampling_support, token_log_probs


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
    ids, offsets = sampling_support(logits, mask, top_k=3, shift=True)
    assert offsets.diff().tolist() == [0, 3, 0, 3, 0, 3, 3, 3]
    expected = logits[:, :-1].topk(3).indices.sort().values[mask[:, 1:]]
    assert torch.equal(ids.view(-1, 3), expected)
    packed = sampling_support(
        *(logits.flatten(0, 1), mask.flatten()),
        **{"top_k": 3, "shift": True, "offsets": torch.tensor([0, 4, 8])},
    )
    assert torch.equal(packed[0], ids) and torch.equal(packed[1], offsets)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_op_has_the_log_probs_of_the_sampler(name):
    """Every token of `generate`: its renormalised log-prob there, and here."""
    run = sampled(name)
    support = sampling_support(run.logits, **run.limits)
    if name != "temperature":
        assert bool((support[1].diff() < run.logits.shape[-1]).all())
        assert int(support[1][-1]) > 0
    options = {"support": support, "temperature": run.limits["temperature"]}
    found = token_log_probs(run.logits, run.tokens, **options)
    torch.testing.assert_close(found, run.log_probs, rtol=0, atol=1e-5)
    # From the hidden states of a forward pass over all tokens, as a trainer computes them.
    with torch.no_grad():
        hidden = run.model.model(run.sequences).last_hidden_state
    start = run.sequences.shape[1] - run.tokens.shape[1]
    of_head = linear_token_log_probs(
        hidden[:, start - 1 : -1], run.model.lm_head.weight, run.tokens, **options
    )
    torch.testing.assert_close(of_head, run.log_probs, rtol=0, atol=1e-5)


def test_nan_is_not_left_out():
    logits = torch.tensor([[1.0, 2.0, torch.nan, 0.0]])
    support = sampling_support(logits, top_k=2)
    assert token_log_probs(logits, torch.tensor([2]), support=support).isnan().all()
