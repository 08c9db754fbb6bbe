"""Losses that TRL's trainers do not tell, or tell wrongly; and the patch of their methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

import trl
from one_thread import one_thread
from trl_losses import (
    OLD,
    REF,
    SEQUENCE,
    batch,
    both,
    calls,
    check_same,
    folder,
    grpo,
    near,
    said,
    step,
)

import fusedrl
from fusedrl.integrations import trl_loss

__all__ = ["calls", "folder", "one_thread", "said"]

pytestmark = pytest.mark.filterwarnings("ignore")

NOT_PLANNED = [
    ({"loss_type": "sapo"}, (OLD,), "loss_type='sapo'"),
    ({"loss_type": "vespo"}, (OLD,), "loss_type='vespo'"),
    ({"top_entropy_quantile": 0.5}, (OLD,), "top_entropy_quantile"),
    ({"off_policy_mask_threshold": 0.01}, (OLD,), "off_policy_mask_threshold"),
    ({"beta": 0.1}, (OLD, REF), "use_bias_correction_kl"),
    ({"beta": 0.1, "loss_type": "grpo", **SEQUENCE}, (REF,), "use_bias_correction_kl"),
    ({"delta": 1.05}, (OLD,), "delta=1.05"),
]


@pytest.mark.parametrize(("config", "columns", "reason"), NOT_PLANNED)
def test_what_is_not_known_beforehand_is_logged_and_runs_as_trl_has_it(
    config, columns, reason, folder, calls, said, tmp_path
):
    found, expected, trainer = both(lambda: grpo(folder, tmp_path, **config), batch(*columns))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 0
    (message,) = said()
    assert message.startswith("trl: GRPOTrainer: ") and reason in message
    with fusedrl.patch_trl():
        step(trainer, batch(*columns))
    assert len(said()) == 1


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


@pytest.mark.parametrize("sharded", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharded_and_compiled_models_are_left_to_trl(sharded, folder, calls, said, tmp_path):
    with fusedrl.patch_trl():
        trainer = grpo(folder, tmp_path)
        setattr(trainer, sharded, True)
        step(trainer, batch(OLD))
        setattr(trainer, sharded, False)
        trainer.args.torch_compile = True
        step(trainer, batch(OLD))
    assert calls["linear_policy_loss"] == 0
    assert ["sharded" in said()[0], "compiled" in said()[1]] == [True, True]


class Sharpened(trl.GRPOTrainer):
    """Does something with log-probs that its options do not tell."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        log_probs, *others = super()._get_per_token_logps_and_entropies(*args, **options)
        return (log_probs * torch.linspace(1, 2, log_probs.shape[1]), *others)


@pytest.mark.parametrize("config", [{}, {"entropy_coef": 0.1}])
def test_a_loss_that_is_not_the_planned_one_has_its_own_gradients(
    config, folder, calls, said, tmp_path
):
    make = lambda: grpo(folder, tmp_path, kind=Sharpened, **config)  # noqa: E731
    found, expected, trainer = both(make, batch(OLD))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 1
    (message,) = said()
    assert message.startswith("trl: Sharpened: the gradient of its loss is not the one of its opt")
    with fusedrl.patch_trl():
        for _ in range(trl_loss.MOST_MISSES):
            found = step(trainer, near(trainer, batch(OLD)))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == trl_loss.MOST_MISSES
    assert len(said()) == 2 and f"{trl_loss.MOST_MISSES} times" in said()[1]


class OtherBatch(trl.GRPOTrainer):
    """Scores completions that are not those of its batch."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, *args: Any, **o: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(model, ids.flip(0), *args, **o)


def test_rows_of_another_batch_are_seen(folder, calls, said, tmp_path):
    make = lambda: grpo(folder, tmp_path, kind=OtherBatch)  # noqa: E731
    found, expected, _ = both(make, batch(OLD))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 0
    reason = "the head got other rows than those of the completions"
    assert said() == [f"trl: OtherBatch: {reason}; its loss is not fused"]


def test_gradients_that_overflow_do_not_count_as_others(folder, calls, said, tmp_path):
    """As they do where the scale of a loss in half precision is too large."""
    with fusedrl.patch_trl(["ChunkedLogProbFunction"]):
        trainer = grpo(folder, tmp_path)
        inputs = near(trainer, batch(OLD))
        expected = step(trainer, inputs, torch.inf)
    with fusedrl.patch_trl():
        for _ in range(trl_loss.MOST_MISSES):
            found = step(trainer, inputs, torch.inf)
        step(trainer, inputs)
    assert calls["linear_policy_loss"] == trl_loss.MOST_MISSES + 1
    assert not said()
    assert any(gradient.isnan().any() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, equal_nan=True)


NAMES = ["GRPOTrainer._compute_loss", "RLOOTrainer._compute_loss"]


def test_a_loss_is_not_patched_without_its_head_or_with_other_arguments(monkeypatch, said):
    with pytest.raises(ValueError, match="speaks to ChunkedLogProbFunction, which is not replaced"):
        fusedrl.patch_trl(NAMES)

    def other(self, model, inputs, more):
        raise AssertionError

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", other)
    with fusedrl.patch_trl() as report:
        assert trl.GRPOTrainer._compute_loss is other
        assert NAMES[0] not in {change.name for change in report}
        assert NAMES[1] in {change.name for change in report}
    assert any("GRPOTrainer._compute_loss takes other arguments" in line for line in said())
    with pytest.raises(ValueError, match=r"leave GRPOTrainer\._compute_loss out"):
        fusedrl.patch_trl(["ChunkedLogProbFunction", NAMES[0]])
