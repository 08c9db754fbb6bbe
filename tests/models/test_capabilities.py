"""Which way a model's log-probs take, and that finding out leaves the model as it was."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from fusedrl.models import capabilities, causal_log_probs
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.comparison import _undisturbed

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import definition, model_of


def scaled(model):
    """A head that no configuration tells of."""
    original = type(model).forward

    class Scaled(type(model)):
        def forward(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            out.logits = 2 * out.logits
            return out

    model.__class__ = Scaled
    return model


def leaking(model):
    """Tokens see their neighbour in the row, whichever sequence it belongs to."""

    class Leaking(type(model.model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            states = out.last_hidden_state
            before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1)
            out.last_hidden_state = states + before
            return out

    model.model.__class__ = Leaking
    return model


def bespoke(model):
    class Head(nn.Linear):
        """Could compute anything."""

    model.lm_head.__class__ = Head
    return model


def hooked(model):
    model.register_forward_hook(lambda *_: None)
    return model


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("spoil", "splits", "together"),
    [
        (lambda model: model, True, True),
        (leaking, False, False),
        (scaled, False, True),
        (bespoke, False, True),
        (hooked, False, True),
        (hooked_head, False, True),
    ],
)
def test_what_would_give_other_numbers_goes_a_slower_way(spoil, splits, together):
    model = spoil(model_of("llama"))
    found = capabilities_of(model)
    assert (found.parts is not None, found.together) == (splits, together)
    with torch.no_grad():
        expected = definition(model, TOKENS, LENGTHS, MASK)
        close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected)


@torch.no_grad()
def test_logits_that_depend_on_later_tokens_are_the_models_own():
    """Nothing may be cut off behind the last token that counts."""
    model = model_of("gemma3_text", use_bidirectional_attention=True)
    mask = torch.zeros(len(TOKENS), dtype=torch.bool)
    mask[[1, LENGTHS[0] // 2]] = True
    expected = definition(model, TOKENS, LENGTHS, mask)
    close(causal_log_probs(model, TOKENS, LENGTHS, mask), expected)


@pytest.mark.parametrize("buffer", [False, True])
@torch.no_grad()
def test_what_a_model_learns_beside_its_decoder_and_head_counts(buffer):
    """It may change nothing at first, so that no comparison shows it."""
    model = model_of("llama")
    original = type(model).forward

    class Tempered(type(model)):
        def forward(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            out.logits = out.logits / self.divisor
            return out

    model.__class__ = Tempered
    if buffer:
        model.register_buffer("divisor", torch.ones(()))
    else:
        model.divisor = nn.Parameter(torch.ones(()))
    for _ in range(2):
        expected = definition(model, TOKENS, LENGTHS, MASK)
        close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected)
        model.divisor.mul_(2)


def test_models_of_other_makes_are_asked_for_their_logits():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 100)

        def forward(self, input_ids, attention_mask, **options):
            assert options == {"extra": 1}
            return {"logits": self.table(input_ids)}

    model = Bigram()
    out = causal_log_probs(model, TOKENS, LENGTHS, MASK, model_kwargs={"extra": 1})
    logits = model.table(TOKENS[:16]).log_softmax(-1)
    close(out[1:17], logits.gather(-1, TOKENS[1:17, None]).squeeze(-1) * MASK[1:17])


def test_models_without_parameters_are_scored():
    class Uniform(nn.Module):
        def forward(self, input_ids, attention_mask):
            return {"logits": torch.zeros(*input_ids.shape, 100)}

    out = causal_log_probs(Uniform(), TOKENS, LENGTHS)
    close(out[1:17], torch.full((16,), 0.01).log())


def test_offloaded_weights_are_scored(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = model_of("llama")
    expected = definition(model, TOKENS, LENGTHS, MASK)
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected)


def test_a_forward_with_other_arguments_is_asked_for_its_logits(caplog, monkeypatch):
    monkeypatch.setattr(capabilities, "_warned", set())
    model = model_of("llama")

    class Narrow(type(model)):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    model.__class__ = Narrow
    expected = definition(model, TOKENS, LENGTHS, MASK)
    close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected)
    assert "trying it raised TypeError" in caplog.text


def test_a_wrapper_that_passes_attributes_on_is_called_itself():
    """As FSDP does, which gathers weights and reduces gradients around its forward."""

    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = model
            self.calls = 0

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, *args, **kwargs):
            self.calls += 1
            return self.inner(*args, **kwargs)

    model = Wrapper(model_of("llama"))
    assert capabilities_of(model).parts is None
    causal_log_probs(model, TOKENS, LENGTHS, MASK)
    assert model.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_makes_no_copy_of_the_head(dtype):
    model = model_of("llama").to(dtype)

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            weight = model.lm_head.weight
            if isinstance(out, torch.Tensor) and out.shape == weight.shape:
                assert out.untyped_storage()._cdata == weight.untyped_storage()._cdata, func
            return out

    with Sizes():
        capabilities_of(model)


def test_a_model_is_tried_once_until_its_head_changes():
    model = model_of("llama")
    calls = []
    forward = type(model).forward

    class Counting(type(model)):
        def forward(self, *args, **kwargs):
            calls.append(1)
            return forward(self, *args, **kwargs)

    model.__class__ = Counting
    for _ in range(3):
        causal_log_probs(model, TOKENS, LENGTHS)
    assert len(calls) == 2, "the two sequences of the comparison"
    model.config.final_logit_softcapping = 1.0  # the model itself does not read it
    assert capabilities_of(model).parts is None


def test_a_model_in_training_is_tried_without_its_dropout():
    model = model_of("llama", attention_dropout=0.5).train()
    random_state = torch.get_rng_state()
    assert capabilities_of(model).parts is not None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training


def test_the_model_is_left_as_it_was():
    model = model_of("llama")

    def state():
        modules = list(model.modules())
        return (
            [dict(vars(module)["_parameters"]) for module in modules],
            [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in modules],
            [module.training for module in modules],
            [set(vars(module)) for module in modules],
            copy.deepcopy(model.config.to_dict()),
        )

    before = state()
    causal_log_probs(model, TOKENS, LENGTHS)
    assert str(state()) == str(before)


def test_an_error_of_the_model_reaches_the_caller():
    model = model_of("llama")
    capabilities_of(model)

    def fail(*_):
        raise RuntimeError("out of order")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of order"):
        causal_log_probs(model, TOKENS, LENGTHS)
    handle.remove()
    close(causal_log_probs(model, TOKENS, LENGTHS, MASK), definition(model, TOKENS, LENGTHS, MASK))


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


def with_exact_head(model):
    model.lm_head.forward = torch.autocast("cpu", enabled=False)(model.lm_head.forward)
    return model


@pytest.mark.parametrize(
    ("wrap", "outside", "splits"),
    [
        (in_autocast, False, True),
        (in_decorator, False, True),
        (in_decorator, True, True),
        (lambda model: model, True, True),
        (with_exact_head, True, False),
        (with_exact_head, False, True),
    ],
)
def test_a_forward_may_enter_autocast_by_itself(wrap, outside, splits, caplog, monkeypatch):
    """The parts compute as the whole does: in autocast, or in none, whoever entered it."""
    monkeypatch.setattr(capabilities, "_warned", set())
    model = model_of("llama")
    exact = definition(model, TOKENS, LENGTHS, MASK).detach()
    model = wrap(model)
    for autocast in (outside, False, outside):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = capabilities_of(model)
            expected = definition(model, TOKENS, LENGTHS, MASK)
            ours = causal_log_probs(model, TOKENS, LENGTHS, MASK)
        rounded = (expected - exact).abs().max()
        assert (found.parts is not None) == (splits or not autocast)
        # Both are rounded to bfloat16 on the way, or neither is.
        assert (ours - expected).abs().max() <= (2 * rounded if rounded > 1e-3 else 1e-4)
        assert ((ours - exact).abs().max() > 1e-3) == bool(rounded > 1e-3)
    assert ("another autocast than its embeddings" in caplog.text) == (not splits)


def test_a_trial_in_autocast_leaves_gradients_to_the_call():
    """Autocast keeps the weights that it has converted, those of the trial without a graph."""
    model = model_of("llama")
    with torch.autocast("cpu", torch.bfloat16):
        causal_log_probs(model, TOKENS, LENGTHS).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.model.layers.parameters())


def compiled_whole(model, **options):
    return torch.compile(model, **options)


def compiled_inside(model, **options):
    model.model = torch.compile(model.model, **options)
    return model


def compiled_in_place(model, **options):
    model.compile(**options)
    return model


def test_trials_in_two_threads_leave_the_compiler_on():
    first, second = (_undisturbed(torch.device("cpu")) for _ in range(2))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        other.submit(second.__exit__, None, None, None).result()
    torch._dynamo.reset()
    graphs = CompileCounter()
    torch.compile(torch.sin, backend=graphs)(torch.ones(2))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("spell", [compiled_whole, compiled_inside, compiled_in_place])
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
        close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected)
        assert (len(made), len(called)) == (1, calls)
