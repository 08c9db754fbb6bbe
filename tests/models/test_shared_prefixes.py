"""Beginnings that sequences share are computed once, and change nothing but rounding."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fusedrl.models import causal_log_probs, log_probs, prefix_tree
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.prefix_tree import cut, in_order, laid_out
from fusedrl.models.tree_mask import Tree

from .test_log_probs import close
from .tiny import PACKING, VOCAB, counted, definition, model_of


def drawn(length, seed):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def forest(prompt=38):
    """Answers to a prompt, one of them continued, two alike, one empty, and a stranger."""
    start = drawn(prompt, 0)
    rows = [torch.cat((start, drawn(n, 1 + n))) for n in (5, 20, 0, 12)]
    rows.append(torch.cat((rows[1], drawn(6, 50))))
    rows += [drawn(20, 60), rows[0].clone(), drawn(0, 0), drawn(1, 1)]
    return torch.cat(rows), [len(row) for row in rows]


def nodes_of(tokens, lengths):
    """Tokens in the tree: those of each sequence but its last, without what the former one has."""
    rows = [row[:-1] for row in tokens.split(lengths) if len(row) > 1]
    return sum(map(len, rows)) - sum(in_order(rows)[1])


ATTENTIONS = [(kind, "eager") for kind in PACKING]
ATTENTIONS += [(kind, "sdpa") for kind in PACKING if kind != "gemma2"]  # which refuses it


WINDOW = {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize("window", [{}, WINDOW])
@pytest.mark.parametrize(("kind", "attention"), ATTENTIONS)
def test_values_and_gradients_are_those_of_each_sequence_alone(kind, attention, window):
    model = model_of(kind, attention, **window)
    tokens, lengths = forest()
    counts = counted(model)
    ours = causal_log_probs(model, tokens, lengths).log_probs
    assert sum(counts) == nodes_of(tokens, lengths) < 0.6 * sum(lengths)
    theirs = definition(model, tokens, lengths, None)
    close(ours, theirs)
    weights = list(model.parameters())
    pairs = (torch.autograd.grad(x.square().sum(), weights) for x in (ours, theirs))
    for mine, reference in zip(*pairs, strict=True):
        torch.testing.assert_close(
            mine, reference, rtol=0, atol=1e-5 * float(reference.abs().max())
        )


@st.composite
def families(draw):
    """Sequences of which each continues a part of an earlier one."""
    rows = [drawn(draw(st.integers(0, 40)), 0)]
    for seed in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from(rows))
        kept = draw(st.one_of(st.just(len(parent)), st.integers(0, len(parent))))
        rows.append(torch.cat((parent[:kept], drawn(draw(st.integers(0, 24)), 1 + seed)))[:64])
    masks = [torch.rand(len(row), generator=torch.Generator().manual_seed(1)) < 0.7 for row in rows]
    limit = draw(st.one_of(st.none(), st.integers(1, 150)))
    return torch.cat(rows), [len(row) for row in rows], torch.cat(masks), limit


MODELS = {kind: model_of(kind) for kind in ("llama", "gemma3_text")}
EXACT = {kind: copy.deepcopy(model).double() for kind, model in MODELS.items()}


@pytest.mark.parametrize("kind", MODELS)
@given(families())
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_any_family_is_as_near_to_float64(kind, family):
    tokens, lengths, mask, limit = family
    truth = causal_log_probs(EXACT[kind], tokens, lengths, mask, share_prefixes=False).log_probs
    errors = []
    for share in (True, False):
        ours = causal_log_probs(
            *(MODELS[kind], tokens, lengths, mask),
            max_tokens_per_forward=limit,
            share_prefixes=share,
        ).log_probs
        errors.append(float((ours - truth).abs().max()) if len(tokens) else 0.0)
    assert errors[0] <= 2 * errors[1] + 1e-6


@given(families())
@settings(deadline=None)
def test_the_fewest_tokens_are_laid_out_within_the_limit(family):
    tokens, lengths, _, limit = family
    rows = list(tokens.split(lengths))
    order, shared = in_order(rows)
    lengths = [len(rows[i]) for i in order]
    limit = limit or 10**6

    def size(first, end):
        return sum(lengths[first:end]) - sum(shared[first + 1 : end])

    def fits(bounds):
        groups = list(pairwise(bounds))
        joined = all(all(shared[first + 1 : end]) for first, end in groups)
        return joined and all(size(a, b) <= limit or b - a == 1 for a, b in groups)

    count = len(rows)
    choices = [
        (0, *inner, count) for n in range(count) for inner in combinations(range(1, count), n)
    ]
    fewest = min(sum(size(a, b) for a, b in pairwise(bounds)) for bounds in choices if fits(bounds))
    groups = cut(lengths, shared, limit)
    assert fits((0, *(group.stop for group in groups)))
    assert sum(size(group.start, group.stop) for group in groups) == fewest


@given(families(), st.one_of(st.none(), st.integers(1, 20)))
@settings(deadline=None)
def test_a_mask_stands_for_what_it_says(family, window):
    tokens, lengths, _, _ = family
    rows = list(tokens.split(lengths))
    order, shared = in_order(rows)
    rows = [rows[i] for i in order]
    parts = laid_out(list(map(len, rows)), shared)
    tree = Tree(parts, window, "cpu")
    expected = torch.zeros(tree.length, tree.length, dtype=torch.bool)
    for row, part in zip(rows, parts, strict=True):
        for last in range(part.shared, len(row)):
            first = 0 if window is None else max(0, last + 1 - window)
            expected[part.path[last], part.path[first : last + 1]] = True
    assert torch.equal(tree.dense(torch.device("cpu")), expected)
    query, key, value = torch.randn(3, 1, 2, tree.length, 4)
    torch.testing.assert_close(
        tree.attend(query, key, value, scale=0.3) if tree.length else query,
        scaled_dot_product_attention(query, key, value, expected, scale=0.3),
    )


class Calls(TorchFunctionMode):
    """Records the shapes of keys that attention is called with."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            self.keys.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def attended(lengths, shared):
    """The shapes of keys in each call of attention along a tree, which must equal the whole's."""
    tree = Tree(laid_out(lengths, shared), None, "cpu")
    query, key, value = torch.randn(3, 1, 2, tree.length, 4)
    with Calls() as calls:
        ours = tree.attend(query, key, value)
    whole = scaled_dot_product_attention(query, key, value, tree.dense(torch.device("cpu")))
    torch.testing.assert_close(ours, whole)
    return calls.keys


def test_a_chain_and_answers_of_about_one_length_are_one_call():
    assert attended([40, 50, 50, 75], [0, 40, 50, 50]) == [(1, 2, 75, 4)]
    assert attended([64, 74, 70, 79], [0, 64, 64, 64]) == [(1, 2, 74, 4), (2, 2, 79, 4)]
    assert attended([64, 74, 90, 164], [0, 64, 64, 64])[1:] == [(1, 2, 90, 4), (1, 2, 164, 4)]


def test_a_layer_has_few_gathered_keys_at_once():
    keys = attended([65] * 50, [0] + [64] * 49)
    tokens = [count * length for count, _, length, _ in keys]
    assert sum(tokens) == 50 * 65 and max(tokens) <= 4 * (64 + 50)
    assert len(keys) == 1 + 7


@pytest.mark.parametrize("limit", [30, 41, 60, 200])
def test_a_limit_counts_what_is_laid_out(limit):
    model = model_of("llama")
    tokens, lengths = forest()
    expected = definition(model, tokens, lengths, None)
    counts = counted(model)
    close(
        causal_log_probs(model, tokens, lengths, max_tokens_per_forward=limit).log_probs, expected
    )
    assert max(counts) <= max(limit, max(lengths))
    assert sum(counts) <= sum(lengths)


def test_a_recomputed_layer_follows_the_tree():
    model = model_of("llama", "sdpa")
    tokens, lengths = forest()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        scored = causal_log_probs(model, tokens, lengths).log_probs
        gradients.append(torch.autograd.grad(scored.square().sum(), list(model.parameters())))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


DROPS = ["dropout", "attention dropout", "changed rate"]
COMPILED = [pytest.param(way, marks=pytest.mark.heavy) for way in ("compiled", "forward")]


@pytest.mark.parametrize("way", ["asked", *DROPS, *COMPILED])
def test_what_is_not_shared(way):
    options = {"attention_dropout": 0.1} if way == "attention dropout" else {}
    model = model_of("llama", **options)
    attention, mlp = (getattr(model.get_decoder().layers[0], x) for x in ("self_attn", "mlp"))
    if way == "dropout":
        mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.1))
    if way in DROPS:
        model.train()
    if way == "compiled":
        model.compile(backend="eager")
    if way == "forward":
        attention.forward = torch.compile(attention.forward, backend="eager")
    tokens, lengths = forest()
    with torch.no_grad():
        counts = counted(model)
        if way == "changed rate":
            attention.attention_dropout = 0.1
            capabilities_of(model)
            counts.clear()
        causal_log_probs(model, tokens, lengths, share_prefixes=way != "asked")
    assert sum(counts) == sum(length - 1 for length in lengths if length > 1)


def disabled(policy):
    policy.base_model.disable_adapter_layers()
    return policy.base_model.enable_adapter_layers


def merged(policy):
    policy.merge_adapter()
    return policy.unmerge_adapter


def another(policy):
    policy.add_adapter("still", type(policy.peft_config["default"])(target_modules=["q_proj"]))
    policy.set_adapter("still")
    return lambda: policy.set_adapter("default")


@pytest.mark.parametrize("before", [disabled, merged, another])
def test_adapters_that_drop_out_once_they_are_on_share_nothing(before):
    """The model is known without them, such as from log-probs of its reference."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    policy = peft.get_peft_model(model_of("llama"), config).train()
    switch_on = before(policy)
    assert capabilities_of(policy).shares
    switch_on()
    assert not capabilities_of(policy).shares


@pytest.mark.parametrize("train", [True, False])
def test_dropout_of_nothing_is_none(train):
    model = model_of("llama", attention_dropout=0.0 if train else 0.1).train(train)
    model.get_decoder().layers[0].mlp.act_fn.never_called = torch.nn.Dropout(0.1)
    tokens, lengths = forest()
    counts = counted(model)
    causal_log_probs(model, tokens, lengths)
    assert sum(counts) == nodes_of(tokens, lengths)


def test_a_model_that_ignores_the_mask_shares_nothing():
    model = model_of("llama")
    for layer in model.get_decoder().layers:
        theirs = layer.self_attn.forward

        def unmasked(*args, theirs=theirs, attention_mask=None, **kwargs):
            return theirs(*args, attention_mask=None, **kwargs)

        layer.self_attn.forward = unmasked
    tokens, lengths = forest()
    close(
        causal_log_probs(model, tokens, lengths).log_probs, definition(model, tokens, lengths, None)
    )


def test_little_in_common_is_not_shared():
    for common, shared in ((prefix_tree.LEAST - 1, 0), (prefix_tree.LEAST, prefix_tree.LEAST)):
        start = drawn(common, 0)
        rows = [torch.cat((start, torch.tensor([token, 7]))) for token in (1, 2)]
        assert in_order(rows)[1] == [0, shared]


def test_bfloat16_errs_no_more():
    model = model_of("llama").bfloat16()
    exact = model_of("llama").double()
    exact.load_state_dict(model.state_dict())
    tokens, lengths = forest()
    with torch.no_grad():
        truth = causal_log_probs(exact, tokens, lengths).log_probs
        found = [
            causal_log_probs(model, tokens, lengths, share_prefixes=share).log_probs
            for share in (True, False)
        ]
    errors = [float((x - truth).norm()) for x in found]
    assert errors[0] <= 1.5 * errors[1]


def test_a_shared_token_is_multiplied_with_the_head_once(monkeypatch):
    rows, theirs = [], log_probs.linear_token_log_probs

    def counted(hidden, *args, **kwargs):
        rows.append(len(hidden))
        return theirs(hidden, *args, **kwargs)

    monkeypatch.setattr(log_probs, "linear_token_log_probs", counted)
    tokens, lengths = forest()
    causal_log_probs(model_of("llama"), tokens, lengths)
    assert abs(sum(rows) - nodes_of(tokens, lengths)) < 10  # a last token is computed in no row
