"""An ``AsyncLLM`` of two workers whose adapters are updated while its requests run."""

import asyncio
import copy

import pytest
import torch
from engine_log_probs import sampled, vary, worst_difference
from peft import LoraConfig, get_peft_model
from tiny_engines import in_loop, tiny_model

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

TOKENS, PROMPTS = 60, [[5, 6, 7, 8], [9, 10], [40, 41, 42, 43, 44, 45]]


@pytest.fixture(scope="module")
def engine(folder, model, loop):
    adapters = {"enable_lora": True, "max_lora_rank": 8, "tensor_parallel_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with in_loop(loop, folder, **adapters) as engine:
            yield engine


def adapted(folder, rank):
    torch.manual_seed(rank)
    model = get_peft_model(
        tiny_model(folder), LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear")
    )
    train_adapters(model)
    return model.eval()


@torch.no_grad()
def train_adapters(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * 0.05)


def test_tokens_are_of_the_adapters_that_they_name(engine, loop, folder):
    model = adapted(folder, 4)
    start, states = copy.deepcopy(model.state_dict()), {}

    async def main(weights):
        async def update():
            state = vary(model, start, "lora_")
            states[await weights.update_async()] = state

        await update()
        generating = asyncio.gather(
            *(
                sampled(engine, f"{number}", prompt, TOKENS, weights.lora_request)
                for number, prompt in enumerate(PROMPTS * 4)
            )
        )
        while not generating.done():
            await update()
            await asyncio.sleep(0.05)
        return await generating

    with (
        WeightChannel.create(model, adapters="only") as channel,
        EngineWeights(channel, engine) as weights,
    ):
        answers = loop.run(main(weights))
        loop.run(engine.remove_lora(weights.lora_request.lora_int_id))
    assert sum(len(answer.spans) > 1 for answer in answers) > len(answers) / 2
    assert worst_difference(model, states, answers) < 1e-4
    assert worst_difference(model, states, answers, shift=1) > 0.01


def test_what_one_worker_refuses_none_has(engine, loop, folder):
    model = adapted(folder, 4)

    async def differing(weights):
        states = {weights.version: model.state_dict()}
        answer = await sampled(engine, "a", PROMPTS[0], TOKENS, weights.lora_request)
        return worst_difference(model, states, [answer])

    async def main(weights, others):
        await weights.update_async()
        assert await differing(weights) < 1e-4
        for _ in range(2):
            with pytest.raises(Exception, match=r"worker 0: .*rank 16.*worker 1: .*rank 16"):
                await others.update_async()
            assert await differing(weights) < 1e-4
        train_adapters(model)
        await weights.update_async()
        assert await differing(weights) < 1e-4

    with (
        WeightChannel.create(model, adapters="only") as channel,
        WeightChannel.create(adapted(folder, 16), adapters="only") as another,
        EngineWeights(channel, engine) as weights,
        EngineWeights(another, engine) as others,
    ):
        loop.run(main(weights, others))
        loop.run(engine.remove_lora(weights.lora_request.lora_int_id))
