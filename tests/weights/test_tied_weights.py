"""Weights of tied and untied language models in every form that a trainer has them in."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from counting_dialogs import Numbers
from models.tiny import model_of
from one_thread import one_thread
from sync_collecting import forked
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector

from fusedrl import (
    AsyncCollector,
    ChannelWeightSyncScheme,
    LLMCollector,
    MultiProcessedRemoteWeightUpdate,
    RayRemoteWeightUpdater,
    VanillaLocalWeightUpdater,
    WeightChannel,
)
from fusedrl.collectors.ray_llm_collector import DialogActor, stored

safetensors = pytest.importorskip("safetensors.torch")

__all__ = ["forked", "one_thread"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*DataParallel:UserWarning"),
]

KINDS = ["qwen2", "llama", "gemma"]
TIES = [pytest.param(True, id="tied"), pytest.param(False, id="untied")]
CPU = torch.device("cpu")
ON_DEMAND: dict[str, Any] = {"frames_per_batch": 4, "total_frames": -1, "prefetch": 0}


class Speaker(nn.Module):
    """A wrapper of a model; its action is made of all of the model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        logits = self.model(torch.arange(4)[None]).logits
        return (1000 * logits.double().abs().mean()).long().expand(seen.shape)


def policy_of(kind: str, tied: bool, seed: int = 0) -> TensorDictModule:
    model = copy.deepcopy(model_of(kind, tie_word_embeddings=tied))
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head is embedding) == tied
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # bfloat16 holds them: each form has the same values
            parameter.copy_(torch.randn_like(parameter).mul_(0.3).bfloat16())
    return TensorDictModule(Speaker(model), in_keys=["seen"], out_keys=["action"])


def clones(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def through_torch_save(module: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def through_safetensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Of tensors that share memory the file has one."""
    kept: dict[int, str] = {}
    state = module.state_dict()
    for name, tensor in state.items():
        kept.setdefault(tensor.data_ptr(), name)
    return safetensors.load(safetensors.save({name: state[name] for name in kept.values()}))


FORMS: dict[str, Callable[[TensorDictModule], Any]] = {
    "module": lambda p: p,
    "from_module": TensorDict.from_module,
    "clone": lambda p: TensorDict.from_module(p).data.clone(),
    "bfloat16": lambda p: TensorDict.from_module(p).data.to(torch.bfloat16),
    "dotted": lambda p: TensorDict.from_module(p).data.clone().flatten_keys("."),
    "state dict": lambda p: p.state_dict(),
    "dict of clones": clones,
    "nested dict": lambda p: TensorDict(clones(p)).unflatten_keys(".").to_dict(),
    "torch.save": through_torch_save,
    "safetensors": through_safetensors,
    "model": lambda p: p.module.model,
    "model's state dict": lambda p: p.module.model.state_dict(),
    "model's safetensors": lambda p: through_safetensors(p.module.model),
    "compiled": lambda p: clones(torch.compile(p.module.model)),
    "parallel": lambda p: nn.DataParallel(p.module.model).state_dict(),
    "parallel module": lambda p: nn.DataParallel(p.module.model),
}


def updates(kind: str, tied: bool, forms: Iterable[str] = FORMS) -> Iterator[tuple[str, Any, int]]:
    """Each form with weights of its own, and the action that they make."""
    for seed, name in enumerate(forms, 1):
        trained = policy_of(kind, tied, seed)
        yield name, FORMS[name](trained), action_of(trained)


def action_of(policy: TensorDictModule) -> int:
    return int(policy(TensorDict({"seen": torch.zeros(1)}))["action"])


def untie(policy: TensorDictModule) -> dict[str, torch.Tensor]:
    """What a trainer has whose two copies of one tensor went different ways."""
    weights = clones(policy)
    weights["module.model.lm_head.weight"][-1, -1] += 1
    return weights


UNTIED = "module.model.lm_head.weight.* expected the values of .*module.model.model.embed_tokens"


@pytest.mark.heavy
@pytest.mark.parametrize("tied", TIES)
@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_a_channel_publishes_each_form(kind, tied):
    policy = policy_of(kind, tied)
    with WeightChannel.create(policy_of(kind, tied)) as channel, channel.handle.open() as reader:
        for name, weights, action in updates(kind, tied):
            channel.publish(weights)
            assert reader.load_into(policy) == channel.version
            assert action_of(policy) == action, name
        if tied:
            with pytest.raises(ValueError, match=f"(?s){UNTIED}"):
                channel.publish(untie(policy))
        else:
            channel.publish(untie(policy))


@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("form", ["clone", "dict of clones", "safetensors"])
def test_a_channel_that_is_made_of_copies_is_read_by_a_tied_model(form, mode):
    policy, trained = policy_of("qwen2", True), policy_of("qwen2", True, 1)
    with WeightChannel.create(FORMS[form](trained)) as channel, channel.handle.open() as reader:
        channel.publish()
        reader.load_into(policy, mode)
        assert action_of(policy) == action_of(trained)
        if form == "safetensors":
            return
        apart = FORMS[form](trained)
        apart = TensorDict(apart).unflatten_keys(".")
        apart["module", "model", "lm_head", "weight"][-1, -1] += 1
        channel.publish(apart)
        with pytest.raises(ValueError, match="since the module has one tensor for both"):
            reader.load_into(policy, mode)
        assert action_of(policy) == action_of(trained)


def check_updates(collector: Any, kind: str, tied: bool) -> None:
    """Batches follow each update; weights that untie what is tied are refused, and change none."""
    batches = iter(collector)
    for name, weights, action in updates(kind, tied):
        collector.update_policy_weights_(weights)
        assert set(next(batches)["action"].flatten().tolist()) == {action}, name
    if not tied:
        return
    with pytest.raises(ValueError, match=f"(?s){UNTIED}"):
        collector.update_policy_weights_(untie(policy_of(kind, tied)))
    assert set(next(batches)["action"].flatten().tolist()) == {action}


@pytest.mark.heavy
@pytest.mark.parametrize("tied", TIES)
@pytest.mark.parametrize(
    "kind", ["qwen2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
@pytest.mark.parametrize("how", ["scheme", "updater"])
@pytest.mark.parametrize("make", [Collector, LLMCollector])
def test_a_collector_in_this_process_takes_each_form(make, how, kind, tied):
    policy = policy_of(kind, tied)
    options: dict[str, Any] = (
        {"weight_sync_schemes": {"policy": ChannelWeightSyncScheme()}}
        if how == "scheme"
        else {"weight_updater": VanillaLocalWeightUpdater(None, None)}
    )
    if make is Collector:
        collector = Collector(Numbers(), policy, frames_per_batch=4, total_frames=-1, **options)
    else:
        collector = LLMCollector(Numbers(), policy=policy, dialog_turns_per_batch=2, **options)
    try:
        check_updates(collector, kind, tied)
    finally:
        collector.shutdown()


@pytest.mark.heavy
@pytest.mark.parametrize("tied", TIES)
@pytest.mark.parametrize("how", ["scheme", "updater", "vanilla updater"])
def test_a_collector_in_another_process_takes_each_form(forked, how, tied):
    policy = policy_of("qwen2", tied)
    weights = TensorDict.from_module(policy)
    updater = {
        "scheme": None,
        "updater": MultiProcessedRemoteWeightUpdate(None, {CPU: weights}),
        "vanilla updater": VanillaLocalWeightUpdater(None, weights),
    }[how]
    with AsyncCollector(Numbers, policy, weight_updater=updater, **ON_DEMAND) as collector:
        check_updates(collector, "qwen2", tied)


@pytest.mark.heavy
@pytest.mark.parametrize("tied", TIES)
def test_an_actor_takes_each_form(tied, monkeypatch):
    """What runs in the actor of a RayLLMCollector, without Ray."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "put", lambda value: pickle.loads(pickle.dumps(value, protocol=5)))
    policy = policy_of("qwen2", tied)
    actor = DialogActor(0, env=Numbers(), policy=policy, dialog_turns_per_batch=2)
    for name, weights, action in updates("qwen2", tied):
        actor.update_policy_weights_(stored(weights))
        assert set(actor.next()["action"].flatten().tolist()) == {action}, name
    actor.shutdown()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_sent_to_ray_actors_has_the_policys_names(form):
    """torchrl's actors know no others, and die of them."""
    pytest.importorskip("ray")
    policy, trained = policy_of("qwen2", True), policy_of("qwen2", True, 1)
    for kept in (torch.compile(policy), policy):
        weights = TensorDict.from_module(kept)
        updater = RayRemoteWeightUpdater(weights, remote_collectors=[])
        sent = updater._maybe_map_weights(FORMS[form](trained))
        for name, tensor in sent.items(include_nested=True, leaves_only=True):
            assert tensor.shape == weights[name].shape
    with pytest.raises(ValueError, match=f"(?s){UNTIED}"):
        updater._maybe_map_weights(untie(trained))


@pytest.mark.parametrize("form", FORMS)
def test_an_updater_writes_each_form_once(form):
    for tied in (True, False):
        policy, trained = policy_of("gemma", tied), policy_of("gemma", tied, 1)
        head = policy.module.model.lm_head.weight
        weights = TensorDict.from_module(policy)
        VanillaLocalWeightUpdater(None, weights).update_weights(FORMS[form](trained))
        assert action_of(policy) == action_of(trained)
        assert policy.module.model.lm_head.weight is head
