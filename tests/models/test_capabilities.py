"""Which way a model's log-probs take: a list of types, and one comparison, which changes undo."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from watching import Watch

from fusedrl.models import WithoutAdapters, capabilities, causal_log_probs
from fusedrl.models.capabilities import capabilities_of

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import config_of, definition, model_of


def check(model, splits=True, together=True):
    """The model takes this way, and its log-probs are those of its own logits."""
    with torch.no_grad():
        expected = definition(model, TOKENS, LENGTHS, MASK)
        close(causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs, expected)
        found = capabilities_of(model)
    assert (found.parts is not None, found.batches) == (splits, together)


def late(forward):
    """Differs from sequences of 20 tokens on, which no short comparison shows."""

    def replaced(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        name = "logits" if "logits" in out else "last_hidden_state"
        values = getattr(out, name)
        here = (torch.arange(values.shape[1]) >= 20)[:, None]
        setattr(out, name, torch.where(here, 2 * values, values))
        return out

    return replaced


def doubled(forward):
    return lambda self, x: 2 * forward(self, x)


def leaking(forward):
    """A layer whose tokens see their neighbour in the row, whichever sequence it belongs to."""

    def replaced(self, *args, **kwargs):
        states = forward(self, *args, **kwargs)
        return states + torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1)

    return replaced


def on_class(module, change):
    """Makes a module one of a subclass with another forward."""
    kind = type(module)
    module.__class__ = type("Mine", (kind,), {"forward": change(kind.forward)})


def on_instance(module, change):
    module.forward = types.MethodType(change(type(module).forward), module)


def bespoke_head(model):
    model.lm_head.__class__ = type("Head", (nn.Linear,), {})


def temperature(model):
    model.divisor = nn.Parameter(torch.ones(()))


def attention_of_somebody_else(model):
    AttentionInterface.register("sdpa", lambda *args, **options: sdpa(*args, **options))


NOT_TAKEN_APART = {
    "subclass": lambda model: on_class(model, late),
    "subclass of the decoder": lambda model: on_class(model.model, late),
    "forward": lambda model: on_instance(model, late),
    "forward of the decoder": lambda model: on_instance(model.model, late),
    "head": bespoke_head,
    "forward of the head": lambda model: on_instance(model.lm_head, doubled),
    "parameter": temperature,
    "buffer": lambda model: model.register_buffer("divisor", torch.ones(())),
    "hook": lambda model: model.register_forward_hook(lambda *_: None),
    "hook of the head": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
    "attention of somebody else": attention_of_somebody_else,
    "attention": lambda model: setattr(model.config, "_attn_implementation", "unknown"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", NOT_TAKEN_APART)
def test_what_is_not_listed_is_asked_for_its_logits(what, when, monkeypatch):
    """No comparison shows all of it, and it may come after one."""
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for name in ("unknown", "sdpa"):  # and as it is afterwards
            monkeypatch.setitem(table._global_mapping, name, table["sdpa"])
    model = model_of("llama")
    if when == "after":
        check(model)
    NOT_TAKEN_APART[what](model)
    check(model, splits=False)


def test_a_forward_that_is_replaced_on_a_class_of_transformers_counts(monkeypatch):
    model = model_of("llama")
    check(model)
    for kind in (type(model), type(model.model)):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", late(kind.forward))
            check(model, splits=False)
        check(model)


@pytest.mark.parametrize("part", ["base", "head", "everywhere"])
def test_hooks_of_the_backward_pass_count_where_there_is_one(part):
    model = model_of("llama")
    if part == "everywhere":
        handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    else:
        module = model if part == "base" else model.lm_head
        handle = module.register_full_backward_pre_hook(lambda *_: None)
    try:
        assert capabilities_of(model).parts is None
        with torch.no_grad():
            assert capabilities_of(model).parts is not None
    finally:
        handle.remove()
    assert capabilities_of(model).parts is not None


def leak_by_hook(layer):
    def leak(module, args, states):
        return states + torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1)

    return layer.register_forward_hook(leak).remove


def leak_on_class(layer):
    kind = type(layer)
    on_class(layer, leaking)
    return lambda: setattr(layer, "__class__", kind)


CHANGES = [leak_by_hook, leak_on_class]


@pytest.mark.parametrize("change", CHANGES)
def test_sequences_that_do_not_stay_apart_run_alone_while_it_is_so(change):
    model = model_of("llama")
    check(model)
    undo = change(model.model.layers[1])
    try:
        check(model, splits=False, together=False)
    finally:
        undo()
    check(model)


def test_a_layer_of_somebody_else_is_not_known_although_it_does_nothing_yet():
    """Its weights may be trained after the comparison."""
    model = model_of("llama")
    gates = []
    for layer in model.model.layers:
        gates.append(nn.Parameter(torch.zeros(())))
        on_instance(layer.mlp, partial(gated, gates[-1]))
    check(model, splits=False, together=False)
    for gate in gates:
        gate.data.fill_(1.0)
    check(model, splits=False, together=False)


def test_a_hook_of_somebody_else_is_not_known_although_it_does_nothing_yet():
    """It may look at what it reads, or begin behind the tokens of a comparison."""
    model = model_of("llama")
    check(model)
    steers = []

    def steer(module, args, states):
        beyond = (torch.arange(states.shape[1]) >= 20)[:, None]
        return torch.where(beyond, 2 * states, states) if steers else None

    hook = model.model.layers[0].register_forward_hook(steer)
    check(model, splits=False, together=False)
    steers.append(1)
    check(model, splits=False, together=False)
    hook.remove()
    check(model)


def another_rotation(model):
    config = config_of("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def seeing_all(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@pytest.mark.parametrize("change", [another_rotation, seeing_all])
def test_what_a_layer_has_is_compared_anew_once_it_has_another(change):
    model = model_of("llama")
    check(model)
    change(model)
    check(model, splits=False, together=False)


def noise_of_neftune(model):
    model.get_input_embeddings().neftune_noise_alpha = 1e-3
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)


def noise_of_router(model):
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 1e-6


@pytest.mark.parametrize("noise", [noise_of_neftune, noise_of_router])
def test_noise_counts_however_small_it_is(noise, caplog):
    """It would be drawn once for a token that sequences share, or for a row."""
    model = model_of("mixtral").train()
    check(model)
    noise(model)
    found = capabilities_of(model)
    assert (found.parts, found.batches, found.shares) == (None, False, False)
    (record,) = caplog.records
    assert "MixtralForCausalLM: its forward draws random numbers" in record.getMessage()
    assert capabilities_of(model.eval()).parts is not None


def test_a_number_that_switches_a_layer_is_no_noise():
    """peft's adapters draw one in each call, also where no module drops out."""
    model = model_of("llama")
    watch = Watch(lambda *_: torch.rand(1) and None)
    model.model.layers[0].register_forward_pre_hook(watch)
    assert capabilities_of(model).parts is not None


def gated(gate, forward):
    def replaced(self, states):
        out = forward(self, states)
        return out + gate * torch.cat((torch.zeros_like(out[:, :1]), out[:, :-1]), 1)

    return replaced


def test_a_call_that_is_replaced_on_a_class_and_a_scale_that_no_forward_reads(monkeypatch):
    model = model_of("llama")
    check(model)

    def halved(self, *args, **kwargs):
        out = nn.Module.__call__(self, *args, **kwargs)
        return type(out)(logits=out.logits / 2)

    monkeypatch.setattr(type(model), "__call__", halved, raising=False)
    check(model, splits=False, together=False)
    monkeypatch.undo()
    check(model)
    model.logit_scale = 0.5
    check(model, splits=False, together=False)


@torch.no_grad()
def test_logits_that_depend_on_later_tokens_are_the_models_own():
    """Nothing may be cut off behind the last token that counts."""
    model = model_of("gemma3_text", use_bidirectional_attention=True)
    mask = torch.zeros(len(TOKENS), dtype=torch.bool)
    mask[[1, LENGTHS[0] // 2]] = True
    expected = definition(model, TOKENS, LENGTHS, mask)
    close(causal_log_probs(model, TOKENS, LENGTHS, mask).log_probs, expected)


def test_scales_and_caps_are_those_of_now():
    model = model_of("cohere")
    for scale in (0.5, 2):
        model.logit_scale = scale  # the configuration still says 0.5
        check(model)
    model = model_of("gemma2")
    for cap in (3.0, 1.5, None):
        model.config.final_logit_softcapping = cap
        check(model)
    model.lm_head = nn.Linear(32, 100, bias=True)
    check(model)


def test_the_base_of_adapters_counts():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(model_of("qwen2"), config).eval()
    for model in (policy, WithoutAdapters(policy)):
        with torch.no_grad():
            expected = definition(model, TOKENS, LENGTHS, MASK)
            close(causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs, expected)
    assert capabilities_of(policy).parts is not None
    on_instance(policy.get_base_model(), late)
    check(policy, splits=False)


def test_a_model_is_compared_once_in_each_of_its_modes():
    model = model_of("llama", attention_dropout=0.5)
    calls = []
    with torch.no_grad():
        for train in (True, False) * 3:
            model.last_loss = float(len(calls))
            causal_log_probs(model.train(train), TOKENS, LENGTHS)
            before = capabilities._found[model]
            calls.append(len(before))
    assert calls == [1, 2, 2, 2, 2, 2]


def test_zeros_tell_nothing():
    model = model_of("llama")
    on_class(model.model.layers[1], leaking)
    nn.init.zeros_(model.lm_head.weight)
    check(model, splits=False, together=False)
    nn.init.normal_(model.lm_head.weight)
    check(model, splits=False, together=False)
    model = model_of("llama")
    nn.init.zeros_(model.lm_head.weight)
    check(model, splits=False, together=False)
    nn.init.normal_(model.lm_head.weight)
    check(model)


def test_nothing_that_is_remembered_keeps_a_model_alive():
    model = model_of("llama")
    on_instance(model.model.layers[1], leaking)
    check(model, splits=False, together=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_comparison_leaves_the_model_as_it_was(dtype):
    """In training too: no dropout, no random numbers, no copy of the head."""
    model = model_of("llama", attention_dropout=0.5).train().to(dtype)

    def state():
        modules = list(model.modules())
        return str(
            (
                [dict(vars(x)["_parameters"]) for x in modules],
                [(list(x._forward_hooks), list(x._forward_pre_hooks)) for x in modules],
                [(x.training, set(vars(x))) for x in modules],
                copy.deepcopy(model.config.to_dict()),
                torch.get_rng_state(),
            )
        )

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            weight = model.lm_head.weight
            if isinstance(out, torch.Tensor) and out.shape == weight.shape:
                assert out.untyped_storage()._cdata == weight.untyped_storage()._cdata, func
            return out

    before = state()
    with Sizes():
        assert capabilities_of(model).parts is not None
    assert state() == before


def test_models_of_other_makes_are_asked_for_their_logits():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 100)

        def forward(self, input_ids, attention_mask, **options):
            assert options == {"extra": 1}
            return {"logits": self.table(input_ids)}

    model = Bigram()
    options = {"model_kwargs": {"extra": 1}}
    out = causal_log_probs(model, TOKENS, LENGTHS, MASK, **options).log_probs
    logits = model.table(TOKENS[:16]).log_softmax(-1)
    close(out[1:17], logits.gather(-1, TOKENS[1:17, None]).squeeze(-1) * MASK[1:17])


def test_offloaded_weights_are_scored(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = model_of("llama")
    expected = definition(model, TOKENS, LENGTHS, MASK)
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    close(causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs, expected)


def in_autocast(model):
    accelerate = pytest.importorskip("accelerate")
    reset = accelerate.state.AcceleratorState._reset_state  # it is one for a whole process
    reset(reset_partial_state=True)
    try:
        return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    finally:
        reset(reset_partial_state=True)


def in_decorator(model):
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


@pytest.mark.parametrize(
    ("wrap", "outside"),
    [(in_autocast, False), (in_decorator, False), (in_decorator, True), (lambda x: x, True)],
)
def test_a_forward_may_enter_autocast_by_itself(wrap, outside):
    """The parts compute as the whole does: in autocast, or in none, whoever entered it."""
    model = model_of("llama")
    exact = definition(model, TOKENS, LENGTHS, MASK).detach()
    model = wrap(model)
    for autocast in (outside, False, outside):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = capabilities_of(model)
            expected = definition(model, TOKENS, LENGTHS, MASK)
            ours = causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs
        rounded = (expected - exact).abs().max()
        assert found.parts is not None
        # Both are rounded to bfloat16 on the way, or neither is.
        assert (ours - expected).abs().max() <= (2 * rounded if rounded > 1e-3 else 1e-4)
        assert ((ours - exact).abs().max() > 1e-3) == bool(rounded > 1e-3)


def test_a_slower_way_is_logged_once(caplog):
    for _ in range(2):
        for kind in ("opt", "llama"):
            causal_log_probs(model_of(kind), TOKENS, LENGTHS)
        for change in (seeing_all, lambda model: leak_by_hook(model.model.layers[1])):
            model = model_of("llama")
            change(model)
            causal_log_probs(model, TOKENS, LENGTHS)
    assert [record.getMessage() for record in caplog.records] == [
        "OPTForCausalLM: its type opt with sdpa attention is not tested; its log-probs are "
        "computed from its full logits",
        "LlamaForCausalLM: its decoder and head do not compute its logits for several sequences in "
        "one row; its log-probs are computed from its full logits",
        "LlamaForCausalLM: a hook of its LlamaDecoderLayer is not defined by its library; its "
        "log-probs are computed from its full logits",
    ]


def compiled_inside(model, **options):
    model.model = torch.compile(model.model, **options)
    return model


def compiled_in_place(model, **options):
    model.compile(**options)
    return model


@pytest.mark.heavy
@pytest.mark.parametrize("spell", [torch.compile, compiled_inside, compiled_in_place])
def test_a_compiled_model_stays_compiled(spell):
    torch._dynamo.reset()  # other tests compile the same class
    model = model_of("llama", num_hidden_layers=1)
    expected = definition(model, TOKENS, LENGTHS, MASK).detach()
    made, called = [], []

    def backend(graph, inputs):
        made.append(1)

        def call(*args):
            called.append(1)
            return graph.forward(*args)

        return call

    capabilities_of(model)
    model = spell(model, backend=backend)
    assert capabilities_of(model).parts is not None and not made, "the trial itself is not compiled"
    for calls in (1, 2, 3):
        close(causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs, expected)
        assert (len(made), len(called)) == (1, calls)
