"""Keys and values that an engine has from former weights do not reach answers of later ones."""

import copy
from types import SimpleNamespace

import pytest
import torch
from engine_connectors import DroppingConnector
from engine_log_probs import answer_to, vary, worst_difference
from tiny_engines import OPTIONS, has_spans, offline
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from fusedrl import WeightChannel
from fusedrl.compat.vllm import connectors_that_keep
from fusedrl.vllm import EngineWeights
from fusedrl.vllm.worker import clear_caches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_spans(), reason="this vLLM does not name versions"),
]

PROMPT = [5 + n * n % 400 for n in range(100)]  # of several blocks, which a connector stores
BLOCK = 32


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return tmp_path_factory.mktemp("stored")


def transfer(stored, name, **options):
    extra = {"shared_storage_path": str(stored)}
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra, **options
    )


@pytest.fixture(scope="module")
def llm(folder, model, stored):
    connector = transfer(
        stored, DroppingConnector.__name__, kv_connector_module_path="engine_connectors"
    )
    with offline(folder, kv_transfer_config=connector, block_size=BLOCK) as llm:
        yield llm


@pytest.fixture
def weights(llm, model):
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        yield weights


def answered(llm, prompt=PROMPT, tokens=8):
    settings = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)
    [request] = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
    return answer_to(prompt, request.outputs[0])


def test_a_connector_drops_what_it_has_of_former_weights(llm, model, weights, stored):
    start = copy.deepcopy(model.state_dict())
    for _ in range(3):
        state = vary(model, start)
        version = weights.update()
        for _ in range(2):  # the second time from the connector
            assert worst_difference(model, {version: state}, [answered(llm)]) < 1e-4
        assert any(stored.iterdir())
    model.load_state_dict(start)


def test_an_update_fails_if_the_connector_refuses(llm, model, weights, stored):
    version = weights.update()
    refusal = stored / DroppingConnector.refuses
    refusal.touch()
    with pytest.raises(RuntimeError, match="to be reset, got a refusal"):
        weights.update()
    assert llm.get_weight_version() == str(version)
    refusal.unlink()
    version = weights.update()
    assert worst_difference(model, {version: model.state_dict()}, [answered(llm)]) < 1e-4


@pytest.mark.parametrize(
    ("name", "extra", "keeping"),
    [
        ("ExampleConnector", {}, ["ExampleConnector"]),
        (
            "MultiConnector",
            {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]},
            ["ExampleConnector"],
        ),
        ("OffloadingConnector", {}, []),
    ],
)
def test_a_connector_that_keeps_what_it_has_is_known(folder, model, name, extra, keeping):
    connector = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
    )
    config = EngineArgs(str(folder), **OPTIONS).create_engine_config()
    config.kv_transfer_config = connector
    assert connectors_that_keep(config) == keeping


@pytest.mark.parametrize("connector", [None, "some"])
@pytest.mark.parametrize("size", [100, 70_001])
def test_caches_are_zeros_after_an_update(connector, size):
    memory = torch.full((size,), float("nan"))
    layers = {
        "one": SimpleNamespace(kv_cache=memory[3:]),
        "another": SimpleNamespace(kv_cache=[memory[: size // 2].view(-1, 2)]),
        "shared": SimpleNamespace(kv_cache=torch.ones(size).share_memory_()),
        "without": SimpleNamespace(),
    }
    config = SimpleNamespace(static_forward_context=layers)
    clear_caches(SimpleNamespace(compilation_config=config, kv_transfer_config=connector))
    assert not memory.any()
    assert not layers["shared"].kv_cache.any()
