"""The losses of TRL's GRPO and RLOO trainers, which are TRL's own on the fused head."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

from one_thread import one_thread
from trl_losses import (
    LENGTHS,
    OLD,
    PLAIN_KL,
    REF,
    SEQUENCE,
    TOOLS,
    WIDTH,
    batch,
    both,
    calls,
    check_same,
    folder,
    grpo,
    near,
    rloo,
    said,
    step,
)

import fusedrl

__all__ = ["calls", "folder", "one_thread", "said"]

pytestmark = pytest.mark.filterwarnings("ignore")

SCORED = sum(LENGTHS)  # all that the head has to multiply
# Options of GRPOTrainer and columns of the batch.
LOSSES = [
    ({}, ()),
    ({"epsilon": 0.1, "epsilon_high": 0.3}, (OLD,)),
    ({"loss_type": "grpo"}, (OLD, TOOLS)),
    ({"loss_type": "bnpo", "delta": 1.3}, (OLD,)),
    ({"loss_type": "dr_grpo"}, (OLD,)),
    ({"loss_type": "luspo"}, (OLD,)),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, (OLD, TOOLS)),
    ({"loss_type": "cispo"}, ()),
    ({"loss_type": "sapo"}, (OLD,)),
    ({"loss_type": "vespo"}, (OLD,)),
    ({"loss_type": "grpo", **SEQUENCE}, (TOOLS,)),
    ({"loss_type": "grpo", **SEQUENCE}, (OLD, TOOLS)),
    ({"loss_type": "luspo", **SEQUENCE}, (OLD,)),
    ({"loss_type": "luspo", **SEQUENCE, "beta": 0.1, "use_bias_correction_kl": False}, (REF,)),
    ({"loss_type": "dapo", **SEQUENCE, "entropy_coef": 0.1, **PLAIN_KL}, (OLD, REF)),
    ({"loss_type": "cispo", "epsilon_high": 0.9, **SEQUENCE}, ()),
    ({"loss_type": "cispo", "epsilon_high": 1.2, **SEQUENCE}, (OLD,)),
    ({"loss_type": "grpo", "beta": 0.1, **SEQUENCE}, (REF,)),
    ({"beta": 0.1}, (REF, TOOLS)),
    ({"beta": 0.1}, (OLD, REF)),
    ({"loss_type": "grpo", "beta": 0.1}, (REF,)),
    (PLAIN_KL, (OLD, REF)),
    ({"delta": 1.05}, (OLD,)),
    ({"entropy_coef": 0.05}, (OLD,)),
    ({"loss_type": "grpo", "entropy_coef": 0.05, **PLAIN_KL}, (OLD, REF, TOOLS)),
    ({"entropy_coef": 0.05, "use_adaptive_entropy": True}, ()),
    ({"top_entropy_quantile": 0.5}, (OLD,)),
    ({"off_policy_mask_threshold": 0.01}, (OLD,)),
    ({"cast_lm_head_to_fp32": True}, (OLD,)),
]


@pytest.mark.parametrize(("config", "columns"), LOSSES)
def test_a_loss_and_its_gradients_and_metrics_are_those_of_trl(
    config, columns, folder, calls, said, tmp_path
):
    found, expected, _ = both(lambda: grpo(folder, tmp_path, **config), batch(*columns))
    check_same(found, expected)
    assert calls == [SCORED]
    assert not said()


def test_the_batches_of_these_tests_are_clipped(folder, tmp_path):
    trainer = grpo(folder, tmp_path, epsilon=0.1, epsilon_high=0.3)
    _, _, metrics = step(trainer, near(trainer, batch(OLD)))
    assert all(metrics[f"clip_ratio/{side}"][0] > 0 for side in ("low_mean", "high_mean"))


def test_rloo_is_that_of_trl(folder, calls, said, tmp_path):
    found, expected, _ = both(lambda: rloo(folder, tmp_path), batch("old_logps"))
    check_same(found, expected)
    assert calls == [SCORED]
    assert not said()


@pytest.mark.parametrize("config", [{"loss_type": "grpo", **SEQUENCE}, PLAIN_KL])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_importance_weights_of_vllm_weigh_the_tokens(config, width, folder, tmp_path):
    def make():
        trainer = grpo(folder, tmp_path, **config)
        trainer.use_vllm = True
        return trainer

    inputs = batch(OLD, REF, "importance_sampling_ratio")
    inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"][:, :width]
    found, expected, _ = both(make, inputs)
    check_same(found, expected)


def test_advantages_of_tokens(folder, tmp_path):
    inputs = batch(OLD)
    inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(-1, 3, WIDTH)
    config = {"loss_type": "grpo", **SEQUENCE}
    found, expected, _ = both(lambda: grpo(folder, tmp_path, **config), inputs)
    check_same(found, expected)


def test_a_batch_without_a_token_that_counts(folder, calls, said, tmp_path):
    inputs = batch(OLD)
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    found, expected, _ = both(lambda: grpo(folder, tmp_path), inputs)
    check_same(found, expected)
    assert calls == [0]
    assert not said()


def test_a_model_that_ddp_wraps(folder, calls, said, tmp_path):
    """It looks through the outputs for parameters without a gradient."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        expected = grpo(folder, tmp_path)
        inputs = near(expected, batch(OLD))
        expected = step(expected, inputs)
        with fusedrl.patch_trl():
            trainer = grpo(folder, tmp_path)
            wrapped = torch.nn.parallel.DistributedDataParallel(
                trainer.model, find_unused_parameters=True
            )
            found = step(trainer, inputs, model=wrapped)
    finally:
        torch.distributed.destroy_process_group()
    check_same(found, expected)
    assert calls == [SCORED]
    assert not said()


@pytest.mark.parametrize("frozen", [True, False])
def test_lora_with_a_frozen_head_and_prompt_tuning(frozen, folder, calls, said, tmp_path):
    peft = pytest.importorskip("peft")
    adapter = (
        peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        if frozen
        else peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )

    def make():
        torch.manual_seed(0)
        return grpo(folder, tmp_path, adapter)

    found, expected, _ = both(make, batch(OLD))
    check_same(found, expected)
    assert calls == [SCORED]
    assert not said()


@pytest.mark.parametrize(
    "sampler",
    [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"generation_kwargs": {"top_p": 0.9}}],
    ids=str,
)
def test_a_sampler_that_leaves_out_classes_is_warned_of_once(sampler, folder, said, tmp_path):
    with fusedrl.patch_trl():
        trainer = grpo(folder, tmp_path, **sampler)
        for _ in range(2):
            step(trainer, batch(OLD))
        (message,) = said()
        assert message.startswith("trl: GRPOTrainer: completions are sampled with ")
        [(name, value)] = sampler.get("generation_kwargs", sampler).items()
        assert f"{name}={value}" in message and "ratios, KL and gradients" in message
        step(grpo(folder, tmp_path, generation_kwargs={"top_k": 0}), batch(OLD))
    assert len(said()) == 1
