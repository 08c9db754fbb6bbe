"""Losses that TRL's trainers do not tell, or tell wrongly; and the patch of their methods."""

from __future__ import annotations

import importlib
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
from fusedrl.ops import _dispatch

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


def test_a_loss_as_planned_between_others_keeps_the_plans(folder, calls, said, tmp_path):
    with fusedrl.patch_trl():
        trainer = grpo(folder, tmp_path, kind=Sharpened)
        for _ in range(trl_loss.MOST_MISSES):
            step(trainer, batch(OLD))
            step(trainer, {**batch(OLD), "advantages": torch.zeros(4)})
    assert calls["linear_policy_loss"] == 2 * trl_loss.MOST_MISSES


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


def test_a_head_that_does_not_take_the_plan_is_logged(folder, calls, said, tmp_path):
    def make():
        trainer = grpo(folder, tmp_path)
        trainer.model.double()
        return trainer

    found, expected, _ = both(make, batch(OLD))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 0
    assert ["float64" in said()[0], "not asked of the fused head" in said()[1], len(said())] == [
        True,
        True,
        2,
    ]


def test_a_device_without_a_compiled_op(folder, calls, said, tmp_path, monkeypatch):
    choose = _dispatch.choose

    def without(impl, op, *args, **options):
        return "reference" if op == "linear_policy_loss" else choose(impl, op, *args, **options)

    monkeypatch.setattr(_dispatch, "choose", without)
    found, expected, _ = both(lambda: grpo(folder, tmp_path), batch(OLD))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 0
    assert said() == ["trl: GRPOTrainer: there is no compiled op for cpu; its loss is not fused"]


def test_a_loss_that_is_not_finite_is_that_of_trl(folder, calls, said, tmp_path):
    inputs = batch(OLD)
    with fusedrl.patch_trl(["ChunkedLogProbFunction"]):
        trainer = grpo(folder, tmp_path)
        inputs = near(trainer, inputs)
        inputs[OLD][1, 0] = -1000.0  # where the advantage is negative
        expected = step(trainer, inputs)
    assert expected[0] == torch.inf
    with fusedrl.patch_trl():
        found = step(trainer, inputs)
    assert found[0] == torch.inf
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, equal_nan=True)


@pytest.mark.parametrize("overflows", ["ratio", "scale"])
def test_gradients_that_overflow_do_not_count_as_others(overflows, folder, calls, said, tmp_path):
    """A clipped ratio that is infinite gives NaN in TRL, as a loss scale that is too large does."""
    scale, inputs = (torch.inf, batch(OLD)) if overflows == "scale" else (1.0, batch(OLD))
    with fusedrl.patch_trl(["ChunkedLogProbFunction"]):
        trainer = grpo(folder, tmp_path)
        good = inputs = near(trainer, inputs)
        if overflows == "ratio":
            inputs = {**good, OLD: good[OLD].clone()}
            inputs[OLD][0, 0] = -300.0  # where the advantage is positive
        expected = step(trainer, inputs, scale)
    with fusedrl.patch_trl():
        for _ in range(trl_loss.MOST_MISSES):
            found = step(trainer, inputs, scale)
        step(trainer, good)
    assert calls["linear_policy_loss"] == trl_loss.MOST_MISSES + 1
    assert not said()
    assert any(gradient.isnan().any() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, equal_nan=True)


def test_a_trainer_without_what_a_plan_reads_runs_as_trl_has_it(folder, calls, said, tmp_path):
    def make():
        trainer = grpo(folder, tmp_path)
        trainer.args.steps_per_generation = 1
        return trainer

    inputs = {**batch(OLD)}
    trainer = make()
    expected = step(trainer, near(trainer, inputs))
    with fusedrl.patch_trl():
        trainer = make()
        del trainer.off_policy_mask_threshold
        with pytest.raises(AttributeError, match="off_policy_mask_threshold"):
            step(trainer, inputs)
        assert "attribute 'off_policy_mask_threshold'; its loss is not fused" in said()[0]
        trainer.off_policy_mask_threshold = None
        check_same(step(trainer, near(trainer, inputs)), expected)


NAMES = ["GRPOTrainer._compute_loss", "RLOOTrainer._compute_loss"]


def test_the_patch_changes_the_two_methods_and_puts_them_back():
    classes = (trl.GRPOTrainer, trl.RLOOTrainer)
    before = [vars(cls)["_compute_loss"] for cls in classes]
    with fusedrl.patch_trl() as report:
        assert (trl.GRPOTrainer, trl.RLOOTrainer) == classes
        assert all(
            vars(cls)["_compute_loss"] is not old for cls, old in zip(classes, before, strict=True)
        )
        assert set(NAMES) <= {change.name for change in report}
        again = fusedrl.patch_trl()
        assert len(again) == 0 and set(NAMES) <= set(again.already)
        again.revert()
        assert vars(classes[0])["_compute_loss"] is not before[0]
    assert [vars(cls)["_compute_loss"] for cls in classes] == before
    gmpo = importlib.import_module("trl.experimental.gmpo").GMPOTrainer
    own = vars(gmpo)["_compute_loss"]
    with fusedrl.patch_trl():
        assert vars(gmpo)["_compute_loss"] is own


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


def test_a_trainer_that_cannot_be_imported_stops_no_other(monkeypatch, said):
    real = importlib.import_module

    def broken(name, package=None):
        if name == "trl.trainer.grpo_trainer":
            raise OSError("libcuda.so")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    with fusedrl.patch_trl() as report:
        assert NAMES[0] not in {change.name for change in report}
        assert NAMES[1] in {change.name for change in report}
    assert any("cannot be imported: OSError: libcuda.so; left out" in line for line in said())
