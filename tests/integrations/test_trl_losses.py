"""The losses of TRL's GRPO and RLOO trainers, with gradients that are made with the log-probs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

from one_thread import one_thread
from tiny_trl import trained
from trl_losses import (
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

# Options of GRPOTrainer and columns of the batch: those that take three products, and four.
THREE = [
    ({}, ()),
    ({"epsilon": 0.1, "epsilon_high": 0.3}, (OLD,)),
    ({"loss_type": "grpo"}, (OLD, TOOLS)),
    ({"loss_type": "bnpo", "delta": 1.3}, (OLD,)),
    ({"loss_type": "dr_grpo"}, (OLD,)),
    ({"loss_type": "luspo"}, (OLD,)),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, (OLD, TOOLS)),
    ({"loss_type": "cispo"}, ()),
    ({"loss_type": "grpo", **SEQUENCE}, (TOOLS,)),
    ({"loss_type": "luspo", **SEQUENCE, "beta": 0.1, "use_bias_correction_kl": False}, (REF,)),
    ({"loss_type": "cispo", "epsilon_high": 0.9, **SEQUENCE}, ()),
    ({"beta": 0.1}, (REF, TOOLS)),
    ({"loss_type": "grpo", "beta": 0.1}, (REF,)),
    (PLAIN_KL, (OLD, REF)),
    ({"entropy_coef": 0.05}, (OLD,)),
    ({"loss_type": "grpo", "entropy_coef": 0.05, **PLAIN_KL}, (OLD, REF, TOOLS)),
    ({"entropy_coef": 0.05, "use_adaptive_entropy": True}, ()),
    ({"cast_lm_head_to_fp32": True}, (OLD,)),
]
FOUR = [
    ({"loss_type": "grpo", **SEQUENCE}, (OLD, TOOLS)),
    ({"loss_type": "luspo", **SEQUENCE}, (OLD,)),
    ({"loss_type": "dapo", **SEQUENCE, "entropy_coef": 0.1, **PLAIN_KL}, (OLD, REF)),
    ({"loss_type": "cispo", "epsilon_high": 1.2, **SEQUENCE}, (OLD,)),
]


@pytest.mark.parametrize(("config", "columns"), THREE + FOUR)
def test_a_loss_and_its_gradients_and_metrics_are_those_of_trl(
    config, columns, folder, calls, said, tmp_path
):
    found, expected, _ = both(lambda: grpo(folder, tmp_path, **config), batch(*columns))
    check_same(found, expected)
    first = 1 if (config, columns) in FOUR else 0  # log-probs of sequences, before their gradients
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": first}
    assert not said()


def test_the_batches_of_these_tests_are_clipped(folder, tmp_path):
    trainer = grpo(folder, tmp_path, epsilon=0.1, epsilon_high=0.3)
    _, _, metrics = step(trainer, near(trainer, batch(OLD)))
    assert all(metrics[f"clip_ratio/{side}"][0] > 0 for side in ("low_mean", "high_mean"))


def test_rloo_is_that_of_trl(folder, calls, said, tmp_path):
    found, expected, _ = both(lambda: rloo(folder, tmp_path), batch("old_logps"))
    check_same(found, expected)
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": 1}
    assert not said()


def test_importance_weights_of_vllm_weigh_the_tokens(folder, calls, said, tmp_path):
    def make():
        trainer = grpo(folder, tmp_path, beta=0.1, use_bias_correction_kl=False)
        trainer.use_vllm = True
        return trainer

    for shape in ((4, WIDTH), (4, 1)):
        inputs = batch(OLD, REF, "importance_sampling_ratio")
        weights = inputs["importance_sampling_ratio"]
        inputs["importance_sampling_ratio"] = weights[: shape[0], : shape[1]]
        found, expected, _ = both(make, inputs)
        check_same(found, expected)
    assert calls == {"linear_policy_loss": 2, "linear_token_log_probs": 0}
    assert not said()


@pytest.mark.parametrize("differ", ["advantages", "importance weights"])
@pytest.mark.parametrize("columns", [(), (OLD,)], ids=["on policy", "off policy"])
def test_weights_of_tokens_under_a_ratio_of_sequences(
    columns, differ, folder, calls, said, tmp_path
):
    """The ratio spreads the gradient evenly, also where it is 1: what a token gets is the mean."""

    def make():
        trainer = grpo(folder, tmp_path, loss_type="grpo", **SEQUENCE)
        trainer.use_vllm = differ != "advantages"
        return trainer

    inputs = batch(*columns, "importance_sampling_ratio")
    if differ == "advantages":
        inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(-1, 3, WIDTH)
    found, expected, _ = both(make, inputs)
    check_same(found, expected)
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": 1}
    assert not said()


def test_rows_that_are_compacted_as_on_a_gpu(folder, calls, said, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    config = {"loss_type": "grpo", "entropy_coef": 0.05, **PLAIN_KL}
    found, expected, _ = both(lambda: grpo(folder, tmp_path, **config), batch(OLD, REF, TOOLS))
    check_same(found, expected)
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": 0}
    assert not said()


@pytest.mark.parametrize("compact", [True, False])
def test_a_batch_without_a_token_that_counts(compact, folder, calls, said, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: compact)
    inputs = batch(OLD)
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    found, expected, _ = both(lambda: grpo(folder, tmp_path), inputs)
    check_same(found, expected)
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
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": 0}
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
    assert calls["linear_policy_loss"] == frozen
    assert bool(said()) != frozen


def test_half_precision_equals_the_head_alone(folder, calls, said, tmp_path):
    """Their log-probs are the same, and gradients are rounded to bfloat16 once in both."""
    with fusedrl.patch_trl(["ChunkedLogProbFunction"]):
        trainer = grpo(folder, tmp_path)
        trainer.model.bfloat16()
        inputs = near(trainer, batch(OLD))
        expected = step(trainer, inputs)
    with fusedrl.patch_trl():
        found = step(trainer, inputs)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    for name, values in expected[2].items():
        assert found[2][name] == pytest.approx(values, rel=1e-5, nan_ok=True), name
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).float().norm()
        assert error <= 2**-7 * gradient.float().norm(), name
    assert calls["linear_policy_loss"] == 1
    assert not said()


CONFIGS = [
    {"num_iterations": 2, "epsilon": 1e-3},
    {"beta": 0.1, "loss_type": "bnpo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "entropy_coef": 0.01},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "loss_type": "cispo"},
]


@pytest.mark.heavy
@pytest.mark.parametrize("config", CONFIGS)
def test_two_steps_under_the_patch_are_those_without_it(config, folder, calls, said, tmp_path):
    def make(folder, out):
        return grpo(folder, out, **config)

    expected_logs, expected = trained(make, folder, tmp_path)
    assert calls["linear_policy_loss"] == 0
    with fusedrl.patch_trl():
        logs, weights = trained(make, folder, tmp_path)
    assert calls["linear_policy_loss"] == 2 * config.get("gradient_accumulation_steps", 1)
    assert not said()
    for ours_of_step, theirs_of_step in zip(logs, expected_logs, strict=True):
        assert ours_of_step == pytest.approx(theirs_of_step, rel=1e-4, abs=1e-5)
    # Adam divides small gradients by their own size, and with them their rounding.
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
