"""Beginnings that rows of a padded batch share are computed once; nothing but rounding changes."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from torch.nn.utils.rnn import pad_sequence
from watching import Watch

from fusedrl.models.comparison import UNCOMPILED
from fusedrl.models.shared_rows import sharing_prefixes

from .test_shared_prefixes import ATTENTIONS, EXACT, MODELS, drawn, families
from .tiny import counted, model_of


def padded(rows, left=None):
    """Rows as a batch, the first tokens of each so far from the left edge."""
    left = left or [0] * len(rows)
    moved = [torch.cat((torch.zeros(n).long(), row)) for n, row in zip(left, rows, strict=True)]
    ids = pad_sequence(moved, batch_first=True)
    mask = torch.zeros_like(ids)
    for kept, first, row in zip(mask, left, rows, strict=True):
        kept[first : first + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def groups():
    """Answers to two prompts of unequal lengths, which end in one column; one is empty."""
    prompts = [drawn(32, 0), drawn(48, 1)]
    rows = [torch.cat((prompts[i % 2], drawn(n, 2 + n))) for i, n in enumerate((5, 9, 12, 9, 0))]
    return padded(rows, [16, 0, 16, 0, 16])


NODES = 32 + 48 + 5 + 9 + 12  # the two answers of 9 tokens are alike


def states_of(model, batch):
    """The hidden states of the tokens that are no padding."""
    states = model.get_decoder()(**batch).last_hidden_state
    assert states.shape[:2] == batch["input_ids"].shape
    return states[batch["attention_mask"].bool()]


def states_alone(model, batch):
    """The same, of each row by itself without padding."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    decoder = model.get_decoder()
    return torch.cat([decoder(row[None, kept]).last_hidden_state[0] for row, kept in rows])


def shared_states(model, batch, counts):
    """The same in a block that shares, after one in which the model is tried."""
    for _ in range(2):
        counts.clear()
        with sharing_prefixes(model):
            states = states_of(model, batch)
    return states


def gradients(model, states):
    model.zero_grad()
    (states * torch.linspace(-1, 1, states.shape[-1])).square().sum().backward()
    return [weight.grad for weight in model.get_decoder().parameters()]


@pytest.mark.parametrize("window", [{}, {"sliding_window": 40, "use_sliding_window": True}])
@pytest.mark.parametrize(("kind", "attention"), ATTENTIONS)
def test_states_and_gradients_are_those_of_the_batch(kind, attention, window):
    layers = {"max_window_layers": 1} if window else {}
    model = model_of(kind, attention, **window, **layers)
    counts = counted(model)
    batch = groups()
    # Experts of transformers multiply in float32 alone.
    experts = "moe" in kind or kind == "mixtral"
    exact = model if experts else copy.deepcopy(model).double()
    found = []
    for one, states in (
        (model, shared_states(model, batch, counts)),
        (model, states_of(model, batch)),
        (exact, states_alone(exact, batch)),
    ):
        found.append([states.detach(), *(x for x in gradients(one, states) if x is not None)])
    assert counts[0] == NODES
    least = 1e-5 if experts else 1e-6
    for ours, theirs, truth in zip(*found, strict=True):
        assert (ours - truth).norm() <= 1.5 * (theirs - truth).norm() + least * truth.norm()


@pytest.mark.parametrize("kind", MODELS)
@given(families())
@settings(max_examples=20, deadline=None)
@torch.no_grad()
def test_any_family_is_as_near_to_float64(kind, family):
    tokens, lengths, _, _ = family
    left = [5 * i % 7 for i in range(len(lengths))]
    batch = padded([*tokens.split(lengths), drawn(9, 9)], [*left, 0])
    truth = states_of(EXACT[kind], batch)
    with sharing_prefixes(MODELS[kind]):
        ours = states_of(MODELS[kind], batch)
    theirs = states_of(MODELS[kind], batch)
    assert (ours - truth).norm() <= 2 * (theirs - truth).norm() + 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_follows_the_tree(reentrant):
    found = []
    for checkpointed in (False, True):
        model = model_of("llama", "sdpa").train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        found.append(gradients(model, shared_states(model, groups(), counted(model))))
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def stripped(batch, **changes):
    return {name: x for name, x in {**batch, **changes}.items() if x is not None}


OTHER_CALLS = {
    "one row": lambda b: {name: x if x is False else x[:1] for name, x in b.items()},
    "nothing shared": lambda b: stripped(b, input_ids=drawn(5 * 60, 3).view(5, 60)),
    "a cache": lambda b: stripped(b, use_cache=True),
    "no mask": lambda b: stripped(b, attention_mask=None),
    "a mask of pairs": lambda b: stripped(
        b, attention_mask=b["attention_mask"][:, None, None].expand(-1, 1, 60, 60).bool()
    ),
    "a gap": lambda b: stripped(
        b, attention_mask=b["attention_mask"] * (torch.arange(60) != 20).long()
    ),
    "positions": lambda b: stripped(b, position_ids=torch.arange(60).expand(5, 60)),
    "embeddings": lambda b: stripped(b, input_ids=None, inputs_embeds=torch.ones(5, 60, 32)),
}


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_other_calls_are_left_alone(call):
    """The gap is counted by the positions of a batch, and all of them belong to the caller."""
    model = model_of("llama")
    batch = OTHER_CALLS[call](groups())
    seen = []
    watch = Watch(lambda module, args, output: seen.append(args[0].shape[:2]))
    model.get_decoder().layers[0].register_forward_hook(watch)
    theirs = model.get_decoder()(**batch).last_hidden_state
    with sharing_prefixes(model):
        ours = model.get_decoder()(**batch).last_hidden_state
    assert torch.equal(ours, theirs)
    assert seen[0] == seen[-1]


HEAVY = [pytest.param(way, marks=pytest.mark.heavy) for way in ("compiled", "layer", "flex")]


@pytest.mark.parametrize("way", ["dropout", "type", "prompt", "long", *HEAVY])
def test_models_that_share_nothing(way, caplog):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    options = {
        "dropout": {"attention_dropout": 0.1},
        "long": {"max_position_embeddings": 60, "rope_parameters": scaling},
    }
    kind = "gpt2" if way == "type" else "llama"
    attention = "flex_attention" if way == "flex" else None
    model = model_of(kind, attention, **options.get(way, {})).train()
    if way == "prompt":
        peft = pytest.importorskip("peft")
        prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, prompts)
    batch = groups()
    counts = counted(model)
    caplog.clear()
    if way == "compiled":
        model.compile(backend="eager")
    if way == "layer":
        model.get_decoder().layers[0].compile(backend="eager")
    with torch.no_grad(), UNCOMPILED:
        for _ in range(2):
            with sharing_prefixes(model):
                model(**batch)
    assert counts[-1] >= batch["input_ids"].numel()
    assert not [record for record in caplog.records if record.name == "fusedrl"]


def test_adapters_share_and_so_does_the_model_without_them():
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model_of("llama"), adapters).eval()
    counts = counted(adapted)
    batch = groups()
    real = batch["attention_mask"].bool()
    theirs = adapted(**batch).logits[real]
    with sharing_prefixes(adapted):
        torch.testing.assert_close(adapted(**batch).logits[real], theirs, rtol=0, atol=1e-4)
        with adapted.disable_adapter():
            below = adapted(**batch).logits[real]
    assert counts.count(NODES) == 2
    with adapted.disable_adapter():
        torch.testing.assert_close(below, adapted(**batch).logits[real], rtol=0, atol=1e-4)


def test_an_error_leaves_nothing_behind():
    model = model_of("llama")
    batch = groups()
    counts = counted(model)
    shared_states(model, batch, counts)

    def fails(*_):
        raise KeyboardInterrupt

    hook = model.get_decoder().layers[0].register_forward_hook(Watch(fails))
    with pytest.raises(KeyboardInterrupt), sharing_prefixes(model):
        states_of(model, batch)
    hook.remove()
    assert UNCOMPILED._blocks == 0
    counts.clear()
    with sharing_prefixes(model):
        states_of(model, batch)
    states_of(model, batch)
    assert counts == [NODES, batch["input_ids"].numel()]


def test_a_copy_that_is_made_within_a_block_computes_with_its_own_weights():
    """Nor does a block of another thread leave anything on the model."""
    model, batch = model_of("qwen2").eval(), groups()
    with torch.no_grad(), sharing_prefixes(model), ThreadPoolExecutor(1) as pool:
        pool.submit(shared_states, model, batch, []).result()
        other = copy.deepcopy(model)
        other.get_decoder().layers[0].mlp.down_proj.weight.mul_(3)
        found = states_of(other, batch)
    assert not {"forward"} & vars(model.get_decoder()).keys()
    with torch.no_grad():
        torch.testing.assert_close(found, states_alone(other, batch), rtol=1e-4, atol=1e-4)


def test_a_configuration_may_ask_for_more_than_the_last_states():
    model, batch = model_of("qwen2").eval(), groups()
    model.config.output_hidden_states = True
    with torch.no_grad():
        expected = model(**batch).hidden_states
        with sharing_prefixes(model):
            found = model(**batch).hidden_states
    assert [x.shape for x in found] == [x.shape for x in expected]
