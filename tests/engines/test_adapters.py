"""A peft model whose adapters reach a ``vllm.LLM``, alone or merged into its weights."""

import copy
from contextlib import ExitStack
from dataclasses import asdict

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from tiny_engines import PROMPT, completion, expected, offline, tiny_model, train

from fusedrl import WeightChannel
from fusedrl.channel.layout import Layout
from fusedrl.vllm import EngineWeights

RANK = 4
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def llm(folder):
    tiny_model(folder)
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 3}
    with offline(folder, **options) as llm:
        yield llm


@pytest.fixture
def adapted(folder):
    """Makes a peft model of the engine's own base, whose adapters have been trained."""

    def make(*, seed=1, **config):
        base = tiny_model(folder)
        torch.manual_seed(seed)
        options = {"r": RANK, "lora_alpha": 16, "target_modules": ALL_LINEAR, **config}
        model = get_peft_model(base, LoraConfig(**options)).eval()
        train_adapters(model)
        return model

    return make


@torch.no_grad()
def train_adapters(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def tokens_of(llm, **request):
    return list(completion(llm, **request).token_ids)


def versions_of(llm, **request):
    return [(s.version, s.start, s.end) for s in completion(llm, **request).weight_versions]


@pytest.fixture
def fed(llm):
    """Makes the channel of a model's adapters and what feeds the engine with them."""
    with ExitStack() as stack:

        def make(model):
            channel = stack.enter_context(WeightChannel.create(model, adapters="only"))
            weights = stack.enter_context(EngineWeights(channel, llm))
            stack.callback(lambda: llm.llm_engine.remove_lora(weights._adapters.update.number))
            return weights

        yield make


def test_a_failed_update_leaves_the_adapters_before_or_none(llm, adapted, fed, monkeypatch):
    model = adapted()
    with model.disable_adapter():
        base = expected(model)
    weights = fed(model)
    engine = weights._updates._engine
    name = engine.name

    def failing(label):
        if label == str(weights.channel.version):
            raise RuntimeError("no answer")
        return name(label)

    def fails():
        with monkeypatch.context() as patch:
            patch.setattr(engine, "name", failing)
            with pytest.raises(RuntimeError, match="no answer") as told:
                weights.update()
        assert "goes on with the version before" in told.value.__notes__[0]

    fails()
    assert weights.version is None
    assert not llm.llm_engine.list_loras()
    assert tokens_of(llm) == base
    version, tokens = weights.update(), expected(model)
    for _ in range(2):
        train_adapters(model)
        fails()
        assert weights.version == version
        assert tokens_of(llm, lora_request=weights.lora_request) == tokens
        assert versions_of(llm, lora_request=weights.lora_request) == [(str(version), 0, 12)]
    weights.update()
    assert tokens_of(llm, lora_request=weights.lora_request) == expected(model) != tokens


def test_a_failed_update_of_the_engines_own_weights_leaves_its_adapters(
    llm, adapted, fed, folder, monkeypatch
):
    base = tiny_model(folder)
    with (
        WeightChannel.create(base) as channel,
        EngineWeights(channel, llm) as own,
    ):
        own.update()
        model = adapted()
        weights = fed(model)
        version, tokens = weights.update(), expected(model)
        engine = own._updates._engine
        name, labels = engine.name, []

        def failing(label):
            labels.append(label)
            if label == "2":
                raise RuntimeError("no answer")
            return name(label)

        with torch.no_grad():
            for parameter in base.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        monkeypatch.setattr(engine, "name", failing)
        with pytest.raises(RuntimeError, match="no answer") as told:
            own.update()
        assert "2" in labels
        assert "goes on with the version before" in told.value.__notes__[0]
        assert list(llm.llm_engine.list_loras()) == [weights.lora_request.lora_int_id]
        assert tokens_of(llm, lora_request=weights.lora_request) == tokens
        assert versions_of(llm, lora_request=weights.lora_request) == [(str(version), 0, 12)]
        train_adapters(model)
        weights.update()
        assert tokens_of(llm, lora_request=weights.lora_request) == expected(model) != tokens


def test_requests_that_name_them_have_the_adapters_of_each_version(llm, adapted, fed):
    model = adapted()
    with model.disable_adapter():
        base = expected(model)
    weights = fed(model)
    seen = set()
    for version in range(1, 6):
        train_adapters(model)
        assert weights.update() == version
        assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)
        assert versions_of(llm, lora_request=weights.lora_request) == [(str(version), 0, 12)]
        assert tokens_of(llm) == base
        seen.add(tuple(expected(model)))
    assert len(seen) > 3
    assert tuple(base) not in seen


def test_log_probs_are_those_of_the_adapted_model(llm, adapted, fed):
    model = adapted()
    weights = fed(model)
    weights.update()
    answer = completion(llm, lora_request=weights.lora_request, logprobs=0)
    tokens = list(answer.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    got = torch.tensor([entry[t].logprob for entry, t in zip(answer.logprobs, tokens, strict=True)])
    torch.testing.assert_close(got, exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"v_proj": 3}},
        {"target_modules": r".*\.1\..*gate_proj"},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=["some layers", "rslora", "patterns", "one layer", "orthogonal"],
)
def test_kinds_of_adapters(llm, adapted, fed, config):
    model = adapted(**config)
    weights = fed(model)
    weights.update()
    assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)


def test_a_scaling_that_changes_is_that_of_the_next_version(llm, adapted, fed):
    model = adapted()
    weights = fed(model)
    weights.update()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_scale("default", 3.0)
    weights.update()
    assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)


def test_two_trainers_have_adapters_of_their_own(llm, adapted, fed):
    models = [adapted(seed=seed) for seed in (1, 2)]
    trainers = [fed(model) for model in models]
    for _ in range(2):
        for model, weights in zip(models, trainers, strict=True):
            train_adapters(model)
            weights.update()
        for model, weights in zip(models, trainers, strict=True):
            assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)
    assert expected(models[0]) != expected(models[1])


def test_adapters_stay_when_the_weights_below_them_are_updated(llm, adapted, fed, folder):
    model = adapted()
    weights = fed(model)
    weights.update()
    base = tiny_model(folder)
    with WeightChannel.create(base) as channel, EngineWeights(channel, llm) as own:
        start = copy.deepcopy(base.state_dict())
        train(base)
        own.update()
        assert tokens_of(llm) == expected(base)
        below = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                below[f"base_model.model.{name}"].copy_(parameter)
        assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)
        own.update(start)  # as the other tests expect it


def test_merged_adapters_are_the_weights_of_every_request(llm, adapted):
    model = adapted()
    with (
        WeightChannel.create(model, adapters="merged") as channel,
        EngineWeights(channel, llm) as weights,
    ):
        assert weights.lora_request is None
        for _ in range(3):
            train_adapters(model)
            weights.update()
            assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)
        adding = expected(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_("lora_" not in name)
        weights.update()  # the base again, as the other tests expect it
        assert tokens_of(llm) == expected(model) != adding


class TestRefused:
    """What is refused leaves the engine with the adapters that it has, and those go on."""

    @pytest.fixture(autouse=True)
    def goes_on(self, llm, adapted, fed):
        model = adapted()
        weights = fed(model)
        weights.update(version=100)
        yield
        assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)
        assert versions_of(llm, lora_request=weights.lora_request) == [("100", 0, 12)]
        train_adapters(model)
        assert weights.update() == 101
        assert tokens_of(llm, lora_request=weights.lora_request) == expected(model)

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"r": 16}, r"rank 16.*max_lora_rank=8"),
            ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.lora_A.*no such layer"),
        ],
        ids=["rank", "head"],
    )
    def test_adapters_that_the_engine_was_not_started_for(self, adapted, fed, config, said):
        weights = fed(adapted(**config))
        with pytest.raises(Exception, match=said):
            weights.update()
        with pytest.raises(RuntimeError, match="update"):
            _ = weights.lora_request

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            ({"intermediate_size": 128}, r"gate_proj.*expected 256 outputs, got 128"),
            ({"num_hidden_layers": 3}, r"layers\.2.*no such layer"),
        ],
        ids=["narrower", "deeper"],
    )
    def test_adapters_of_another_model(self, tmp_path, fed, sizes, said):
        other = tiny_model(tmp_path, **sizes)
        config = LoraConfig(r=RANK, target_modules=["gate_proj", "down_proj"])
        with pytest.raises(Exception, match=said):
            fed(get_peft_model(other, config)).update()

    def test_more_adapters_than_there_is_room_for(self, adapted, fed):
        for seed in (2, 3):
            fed(adapted(seed=seed)).update(version=100)
        with pytest.raises(Exception, match="remove_lora"):
            fed(adapted(seed=4)).update()

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"use_dora": True}, "lora_magnitude_vector"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"bias": "all"}, "bias: expected a weight of lora_A"),
            ({"init_lora_weights": "pissa"}, "pissa"),
        ],
        ids=["dora", "modules", "biases", "pissa"],
    )
    def test_adapters_that_vllm_has_not_got(self, adapted, fed, config, said):
        with pytest.raises(ValueError, match=said) as raised:
            fed(adapted(**config))
        assert "adapters='merged'" in str(raised.value)

    def test_two_adapters_of_one_model(self, adapted, fed):
        model = adapted()
        model.add_adapter("second", LoraConfig(r=RANK, target_modules=["q_proj"]))
        with pytest.raises(ValueError, match="one adapter, got default, second"):
            fed(model)

    def test_an_update_that_goes_around_them(self, llm, adapted):
        with WeightChannel.create(adapted(), adapters="only") as channel:
            channel.publish()
            llm.start_weight_update()
            info = {**asdict(channel.handle), "update": {"version": 1}}
            with pytest.raises(Exception, match="EngineWeights"):
                llm.update_weights({"update_info": info})


def test_a_name_of_adapters_that_a_channel_has_not(folder, llm):
    with (
        WeightChannel.create(tiny_model(folder)) as channel,
        pytest.raises(ValueError, match=r"lora_name: expected None .* adapters='only'"),
    ):
        EngineWeights(channel, llm, lora_name="policy")


def test_an_engine_that_was_started_without_adapters(adapted):
    from vllm.config import VllmConfig

    from fusedrl.vllm.lora_adapters import LoraWeights

    layout = Layout.of(adapted(), adapters="only")
    with pytest.raises(ValueError, match="enable_lora=True, max_lora_rank=4"):
        LoraWeights(torch.nn.Module(), VllmConfig(), layout)
