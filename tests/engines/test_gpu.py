"""A ``vllm.LLM`` on a GPU that a trainer on the same one feeds."""

import pytest

pytest.importorskip("vllm")

from tiny_engines import completion, expected, offline, tiny_model, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_engine_on_a_gpu_has_the_weights_of_each_update(tmp_path, device):
    model = tiny_model(tmp_path, hidden_size=256)  # heads of 64
    with offline(tmp_path, dtype="bfloat16", gpu_memory_utilization=0.3) as llm:
        model.cuda().bfloat16()
        with WeightChannel.create(model, device=device) as channel:
            weights = EngineWeights(channel, llm)
            for version in range(1, 6):
                train(model)
                assert weights.update() == version
                found = completion(llm, tokens=1)
                [span] = found.weight_versions
                assert span.version == str(version)
                # More tokens may differ where two are nearly as likely in bfloat16.
                assert list(found.token_ids) == expected(model, tokens=1)
