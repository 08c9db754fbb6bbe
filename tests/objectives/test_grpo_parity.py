"""GRPOLoss, CISPOLoss and DAPO beside torchrl's: every output and every parameter's gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from .policies import (
    FORMS,
    NAMES,
    OUTPUTS,
    PADDED,
    STACK,
    answer_of,
    assert_same,
    batch_of,
    losses_of,
    model_of,
    rows,
)

BOTH_KLS = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no entropy": {"entropy_bonus": False},
    "bounds that differ": {"clip_epsilon": (0.05, 0.3)},
    "KL to the reference": {"kl_to_ref_coeff": 0.3},
    "KL to the policy that generated": {"kl_to_inference_coeff": 0.3},
    "a negative KL": {"kl_to_inference_coeff": -0.2, "kl_to_ref_coeff": -0.1},
    "a mean of each prompt": {"aggregation": "prompt_mean", **BOTH_KLS},
    "no aggregation": {"aggregation": "none", **BOTH_KLS},
    "no reduction": {"reduction": "none"},
    "tokens that drifted": {"kl_mask_threshold": 0.03, **BOTH_KLS},
    "KLs padded on the right": {"ref_log_prob_padding_side": "right", **BOTH_KLS},
    "KLs padded with a number": {"ref_log_prob_padding_value": -1.0, **BOTH_KLS},
}


@pytest.fixture(autouse=True)
def none_as_torchrl(ways):
    yield
    assert set(ways) == {"ours"}


def compare(
    name: str,
    form: Any,
    data: Any,
    model: Any = None,
    factors: dict[str, float] | None = None,
    **options: Any,
) -> None:
    losses = losses_of(name, model_of() if model is None else model, form, **options)
    assert_same(*(answer_of(loss, data.copy(), factors) for loss in losses))


@pytest.mark.parametrize("title", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_options(name, title):
    compare(name, STACK, batch_of(STACK), masking_strategy="rlhf", **OPTIONS[title])


@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_representations(form, strategy):
    # Prompts that are padded by themselves end in another column than in their conversation.
    data = batch_of(form, prompts=form != ("history", "stack", True))
    compare("GRPOLoss", form, data, masking_strategy=strategy, **BOTH_KLS)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_tokens_of_rows_of_one_length(form):
    """The first token counts too: torchrl puts uniform logits there."""
    data = batch_of(form, rows(even=True))
    compare("GRPOLoss", form, data, masking_strategy="generic", **BOTH_KLS)


@pytest.mark.parametrize("shape", ["a token", "all", "columns"])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_of_other_shapes(name, shape):
    data = batch_of(PADDED, per_token=shape == "a token")
    if shape == "all":
        data["advantage"] = torch.tensor(0.7).expand(len(rows()), 1, 1)
    if shape == "columns":
        data["advantage"] = torch.randn(len(rows()), 1, 2)
    options = {"entropy_bonus": False} if shape == "columns" else BOTH_KLS
    compare(name, PADDED, data, masking_strategy="rlhf", **options)


@pytest.mark.parametrize("key", ["auto", ("my", "mask"), None])
def test_a_mask_of_the_data(key):
    data = batch_of(PADDED)
    valid = torch.rand(data["tokens", "full"].shape) < 0.7
    data["collector"] = TensorDict(mask=valid[..., None], batch_size=data.batch_size)
    data["my"] = TensorDict(mask=valid.flip(1), batch_size=data.batch_size)
    losses = losses_of("GRPOLoss", model_of(), PADDED, masking_strategy="rlhf", **BOTH_KLS)
    for loss in losses:
        loss.loss_mask_key = key
    assert_same(*(answer_of(loss, data.copy()) for loss in losses))


def test_keys():
    data = batch_of(STACK)
    keys = {"advantage": "a", "sample_log_prob": ("old", "p"), "ref_log_probs": "ref"}
    data["a"] = data.pop("advantage")
    data.rename_key_(("log_probs", "full"), ("old", "p"))
    data.rename_key_(("next", "ref_log_probs", "full"), "ref")
    losses = losses_of("GRPOLoss", model_of(), STACK, masking_strategy="rlhf", **BOTH_KLS)
    for loss in losses:
        loss.set_keys(**keys)
    assert losses[0].in_keys == losses[1].in_keys
    assert losses[0].out_keys == losses[1].out_keys
    assert vars(losses[0].tensor_keys) == vars(losses[1].tensor_keys)
    assert_same(*(answer_of(loss, data.copy()) for loss in losses))


TERMS = [name for name in OUTPUTS if name.startswith("loss_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_for_each_term(name):
    factors = dict(zip(TERMS, (0.7, -3.0, 11.0, 0.0), strict=True))
    compare(name, STACK, batch_of(STACK), factors=factors, masking_strategy="rlhf", **BOTH_KLS)


def test_twice_through_one_graph():
    losses = losses_of("GRPOLoss", model_of(), STACK, masking_strategy="rlhf", **BOTH_KLS)
    grads = []
    for loss in losses:
        output = loss(batch_of(STACK))
        total = sum(getattr(output, name) for name in TERMS)
        total.backward(retain_graph=True)
        output.loss_kl_to_ref.backward(retain_graph=True)
        total.backward()
        grads.append({name: p.grad for name, p in loss.named_parameters()})
    for name, exact in grads[2].items():
        error = (grads[0][name] - exact).abs().max()
        allowed = 4 * (grads[1][name] - exact).abs().max() + 1e-5 * exact.abs().max()
        assert error <= allowed, name


def frozen(part: str) -> Any:
    model = model_of()
    model.get_submodule(part).requires_grad_(False)
    return model


def adapted(*modules: str) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=list(modules), init_lora_weights=False)
    model = model_of()
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).eval()


MODELS = {
    "llama": lambda: model_of("llama"),
    "tied": lambda: model_of("llama", tie_word_embeddings=True),
    "a frozen head": lambda: frozen("lm_head"),
    "a frozen decoder": lambda: frozen("model"),
    "a frozen layer": lambda: frozen("model.layers.0"),
    "adapters": lambda: adapted("q_proj", "down_proj"),
    "adapters of the head": lambda: adapted("lm_head"),  # it is no plain product then
    "training": lambda: model_of().train(),
}


@pytest.mark.parametrize("title", MODELS)
def test_models(title):
    model = MODELS[title]()
    compare("GRPOLoss", STACK, batch_of(STACK), model, masking_strategy="rlhf", **BOTH_KLS)


def test_the_data_stays_as_it_is():
    for form in FORMS:
        data = batch_of(form, prompts=False)
        before = copy.deepcopy(data)
        loss = losses_of("GRPOLoss", model_of(), form, masking_strategy="rlhf")[0]
        loss(data)
        assert set(map(str, data.keys(True))) == set(map(str, before.keys(True)))
