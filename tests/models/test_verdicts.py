"""What was found out about a model holds until something of it changes."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fusedrl.models import WithoutAdapters, causal_log_probs
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.signature import modules_of, signature

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import definition, model_of


def check(model: Any) -> None:
    with torch.no_grad():
        expected = definition(model, TOKENS, LENGTHS, MASK)
        close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected)


def doubled(forward: Any) -> Any:
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        if isinstance(out, torch.Tensor):
            return 2 * out
        if "logits" in out:
            out.logits = 2 * out.logits
        else:
            out.last_hidden_state = 2 * out.last_hidden_state
        return out

    return replaced


def replace_on_instance(module: Any) -> None:
    module.forward = types.MethodType(doubled(type(module).forward), module)


def replace_class(module: Any) -> None:
    original = type(module)
    module.__class__ = type("Doubled", (original,), {"forward": doubled(original.forward)})


PLACES = {
    "model": lambda model: model,
    "base": lambda model: model.model,
    "head": lambda model: model.lm_head,
    "norm": lambda model: model.model.norm,
    "layer": lambda model: model.model.layers[1].mlp,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("replace", [replace_on_instance, replace_class])
def test_a_forward_that_is_replaced_later_counts(place, replace):
    model = model_of("llama")
    check(model)
    before = causal_log_probs(model, TOKENS, LENGTHS, MASK).detach()
    replace(PLACES[place](model))
    check(model)
    assert (causal_log_probs(model, TOKENS, LENGTHS, MASK) - before).abs().max() > 0.1


def test_a_forward_that_is_replaced_on_the_class_counts(monkeypatch):
    model = model_of("llama")
    check(model)
    monkeypatch.setattr(type(model), "forward", doubled(type(model).forward))
    check(model)
    assert capabilities_of(model).parts is None
    monkeypatch.undo()
    check(model)
    assert capabilities_of(model).parts is not None


def test_a_forward_of_the_base_of_adapters_counts():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(model_of("qwen2"), config).eval()
    reference = WithoutAdapters(policy)
    for model in (policy, reference):
        check(model)
    replace_on_instance(policy.get_base_model())
    for model in (policy, reference):
        check(model)


def test_another_head_counts():
    model = model_of("llama")
    check(model)
    model.lm_head = nn.Linear(32, 100, bias=True)
    check(model)
    assert capabilities_of(model).parts is not None

    class Capped(nn.Linear):
        def forward(self, input):
            return super().forward(input).tanh()

    model.lm_head = Capped(32, 100)
    check(model)
    assert capabilities_of(model).parts is None


@pytest.mark.parametrize("hook", ["model", "head", "everywhere"])
def test_hooks_that_come_later_count(hook):
    model = model_of("llama")
    check(model)

    def double(module, args, out):
        if module is model:
            out.logits = 2 * out.logits
        return 2 * out if module is model.lm_head else out

    if hook == "everywhere":
        handle = nn.modules.module.register_module_forward_hook(double)
    else:
        handle = PLACES[hook](model).register_forward_hook(double)
    try:
        check(model)
        assert capabilities_of(model).parts is None
    finally:
        handle.remove()
    check(model)
    assert capabilities_of(model).parts is not None


@pytest.mark.parametrize("hook", ["full", "before", "everywhere"])
def test_hooks_of_the_backward_pass_count_where_there_is_one(hook):
    model = model_of("llama")
    head = model.lm_head
    check(model)
    _, plain = gradients(model)

    def double(module, grads, *_):
        return tuple(2 * grad for grad in grads) if module is head else None

    if hook == "full":
        handle = head.register_full_backward_hook(double)
    elif hook == "before":
        handle = head.register_full_backward_pre_hook(double)
    else:
        handle = nn.modules.module.register_module_full_backward_hook(double)
    try:
        ours, theirs = gradients(model)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs, 2 * plain, rtol=1e-4, atol=1e-4)
        assert capabilities_of(model).parts is None
        with torch.no_grad():
            assert capabilities_of(model).parts is not None
    finally:
        handle.remove()
    assert capabilities_of(model).parts is not None


def gradients(model):
    """Those of the embeddings, through our log-probs and through the model's own logits."""
    tokens, found = torch.arange(3, 12), []
    for log_probs in (
        lambda: causal_log_probs(model, tokens, [9]),
        lambda: model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None]),
    ):
        (gradient,) = torch.autograd.grad(log_probs().sum(), model.model.embed_tokens.weight)
        found.append(gradient)
    return found


@pytest.mark.parametrize("value", [0.25, 2])
def test_a_scale_that_is_set_on_the_model_counts(value):
    model = model_of("cohere")
    check(model)
    model.logit_scale = value  # the configuration still says 0.5
    check(model)


def test_a_cap_that_is_set_in_the_configuration_counts():
    model = model_of("gemma2")
    check(model)
    for cap in (1.5, None):
        model.config.final_logit_softcapping = cap
        check(model)
        assert capabilities_of(model).parts is not None


@pytest.fixture
def unknown_attention(monkeypatch) -> str:
    """The name of an attention that a user has registered, which is torch's own."""
    name = "unknown"
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(table._global_mapping, name, table["sdpa"])
    return name


@pytest.mark.parametrize(
    "other",
    [
        "unknown",
        pytest.param("flex_attention", marks=pytest.mark.slow),  # which torch compiles for a minute
    ],
)
@pytest.mark.usefixtures("unknown_attention")
def test_another_attention_counts(other):
    model = model_of("llama")
    assert capabilities_of(model).parts is not None
    model.set_attn_implementation("eager")
    check(model)
    model.config._attn_implementation = other
    assert capabilities_of(model).parts is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_counts(dtype):
    model = model_of("llama")
    check(model)
    model.to(dtype)
    assert capabilities_of(model).parts is not None
    out = causal_log_probs(model, TOKENS, LENGTHS, MASK)
    expected = definition(model, TOKENS, LENGTHS, MASK)
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.3)


def test_a_compiled_forward_counts():
    model = model_of("llama", num_hidden_layers=1)
    check(model)
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    check(model)


def test_a_trial_on_zeros_tells_nothing():
    """Any function of the head's product gives 0 for 0."""
    model = model_of("llama")
    nn.init.zeros_(model.lm_head.weight)
    original = type(model).forward
    model.__class__ = type("Squared", (type(model),), {"forward": doubled(original)})
    check(model)
    nn.init.normal_(model.lm_head.weight)
    check(model)


def test_nothing_that_is_remembered_keeps_a_model_alive():
    model = model_of("llama")
    replace_on_instance(model)
    check(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_states_that_alternate_are_tried_once_each():
    model = model_of("llama", attention_dropout=0.5)
    calls = []
    original = type(model).forward

    def counting(self, *args, **kwargs):
        calls.append(self.training)
        return original(self, *args, **kwargs)

    model.__class__ = type("Counting", (type(model),), {"forward": counting})
    for train in (True, False) * 3:
        capabilities_of(model.train(train))
    assert sorted(calls) == [False, False, True, True], "the two sequences of each comparison"


def test_every_module_counts_once():
    model = model_of("llama")
    model.again, model.nothing = model.model.norm, None
    model.more = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)]), "b": model.lm_head})
    found = modules_of(model)
    assert found[0] is model and len(found) == len(set(found))
    assert set(found) == set(model.modules())


def test_settings_that_are_set_in_the_middle_count():
    """A rotary embedding that follows the length, and a dtype, of one module among many."""
    model = model_of("llama")
    assert capabilities_of(model).below is None
    model.model.rotary_emb.rope_type = "dynamic"
    assert capabilities_of(model).below is not None
    model.model.rotary_emb.rope_type = "default"
    ends = (model, model.model, model.lm_head)
    before = signature(modules_of(model), ends)
    assert signature(modules_of(model), ends) == before
    norm = model.model.layers[1].input_layernorm
    for change, undo in ((norm.double, norm.float), (norm.train, norm.eval)):
        change()
        assert signature(modules_of(model), ends) != before
        undo()
        assert signature(modules_of(model), ends) == before
    model.model.layers[1].input_layernorm = type(norm)(32)
    assert signature(modules_of(model), ends) != before
