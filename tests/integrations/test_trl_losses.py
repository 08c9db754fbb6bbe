"""The losses of TRL's GRPO and RLOO trainers, with gradients that are made with the log-probs."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

import trl
from datasets import Dataset
from one_thread import one_thread
from tiny_trl import TEXTS, by_length, options, save_model, trained

import fusedrl
from fusedrl.integrations import _trl_log, _trl_loss

__all__ = ["one_thread"]

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 6
LENGTHS = (6, 4, 1, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of compiled ops, by their name."""
    counts = {"linear_policy_loss": 0, "linear_token_log_probs": 0}
    for name in counts:
        op = getattr(torch.ops.fusedrl, name)

        def count(*args, name=name, op=op):
            counts[name] += 1
            return op(*args)

        monkeypatch.setattr(torch.ops.fusedrl, name, count)
    return counts


@pytest.fixture
def said(monkeypatch, caplog):
    """A function of what fusedrl has logged, as if it had logged nothing before."""
    monkeypatch.setattr(_trl_log, "_said", set())
    caplog.set_level(logging.WARNING, "fusedrl")
    return lambda: [record.message for record in caplog.records if record.name == "fusedrl"]


def grpo(folder: str, out: Any, peft: Any = None, kind: Any = None, **more: Any) -> Any:
    defaults = {"num_generations": 2, "max_completion_length": WIDTH, "temperature": 0.9}
    return (kind or trl.GRPOTrainer)(
        folder,
        reward_funcs=by_length,
        args=trl.GRPOConfig(**options(out, **{**defaults, **more})),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        peft_config=peft,
    )


def rloo(folder: str, out: Any, **more: Any) -> Any:
    args = trl.RLOOConfig(
        **options(out), num_generations=2, max_completion_length=WIDTH, beta=0.1, **more
    )
    train = Dataset.from_dict({"prompt": TEXTS})
    return trl.RLOOTrainer(folder, reward_funcs=by_length, args=args, train_dataset=train)


def batch(*columns: str) -> dict[str, Any]:
    """What a trainer is given, of completions of the lengths above; old log-probs are far off."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(4, 4, WIDTH, generator=generator)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]])
    everything = {
        "prompt_ids": torch.randint(2, 250, (4, 3), generator=generator),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, 250, (4, WIDTH), generator=generator),
        "completion_mask": mask,
        "advantages": torch.tensor([0.7, -1.1, 0.9, 0.4]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": (normal[0] * 0.3 - 8) * mask,
        "ref_per_token_logps": (normal[1] * 0.5 - 8) * mask,
        "old_logps": torch.tensor([-60.0, -40.0, -9.0, 0.0]),
        "tool_mask": (normal[2] > -0.5).long(),
        "importance_sampling_ratio": normal[3].exp(),
    }
    always = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    return {name: everything[name] for name in (*always, "num_items_in_batch", *columns)}


def near(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch with old log-probs near those of the model, so that some ratios are clipped."""
    with torch.no_grad():
        log_probs, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1),
            torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1),
            WIDTH,
        )
    shift = torch.arange(log_probs.numel()).cos().mul(0.5).view(log_probs.shape)
    moved = (log_probs + shift) * inputs["completion_mask"]
    changed = {"old_per_token_logps": moved, "old_logps": moved.sum(1) + 0.1}
    return {name: changed.get(name, value) for name, value in inputs.items()}


def step(trainer: Any, inputs: dict[str, Any], scale: float = 1.0) -> tuple[Any, Any, Any]:
    """The loss, its gradients and the metrics of one batch."""
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, inputs)
    (loss * scale).backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    return loss.detach(), gradients, metrics


def check_same(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    """Equal up to the rounding of float32, of gradients relative to the largest of a parameter."""
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5, abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).abs().max()
        assert error <= 2e-5 * gradient.abs().max(), name
    assert found[2].keys() == expected[2].keys()
    for name, values in expected[2].items():
        assert found[2][name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), name


OLD, REF, TOOLS = "old_per_token_logps", "ref_per_token_logps", "tool_mask"
SEQUENCE = {"importance_sampling_level": "sequence"}
PLAIN_KL = {"beta": 0.1, "use_bias_correction_kl": False}

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


def both(make: Any, inputs: Any, scale: float = 1.0) -> tuple[Any, Any, Any]:
    """A step as TRL makes it and one under the patch, and the trainer of the latter."""
    theirs = make()
    inputs = near(theirs, inputs)
    expected = step(theirs, inputs, scale)
    with fusedrl.patch_trl():
        ours = make()
        return step(ours, inputs, scale), expected, ours


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


@pytest.mark.parametrize("advantages", ["per token", "zero"])
def test_advantages_of_tokens_and_of_nothing(advantages, folder, calls, said, tmp_path):
    inputs = batch(OLD)
    spread = inputs["advantages"][:, None] * torch.linspace(-1, 1, WIDTH)
    inputs["advantages"] = spread if advantages == "per token" else torch.zeros(4)
    found, expected, _ = both(lambda: grpo(folder, tmp_path), inputs)
    check_same(found, expected)
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": 0}
    assert not said()


def test_a_loss_scale_reaches_the_gradients(folder, calls, said, tmp_path):
    found, expected, _ = both(lambda: grpo(folder, tmp_path), batch(OLD), 1024.0)
    check_same(found, expected)
    assert not said()


def test_rows_that_are_compacted_as_on_a_gpu(folder, calls, said, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    config = {"loss_type": "grpo", "entropy_coef": 0.05, **PLAIN_KL}
    found, expected, _ = both(lambda: grpo(folder, tmp_path, **config), batch(OLD, REF, TOOLS))
    check_same(found, expected)
    assert calls == {"linear_policy_loss": 1, "linear_token_log_probs": 0}
    assert not said()


def test_nothing_is_made_ahead_without_gradients(folder, calls, tmp_path):
    with fusedrl.patch_trl():
        trainer = grpo(folder, tmp_path)
        inputs = near(trainer, batch(OLD))
        calls.update(dict.fromkeys(calls, 0))
        trainer.current_gradient_accumulation_steps = 1
        with torch.no_grad():
            trainer.compute_loss(trainer.model, inputs)
    assert calls == {"linear_policy_loss": 0, "linear_token_log_probs": 1}


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
        for _ in range(_trl_loss.MOST_MISSES):
            found = step(trainer, near(trainer, batch(OLD)))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == _trl_loss.MOST_MISSES
    assert len(said()) == 2 and f"{_trl_loss.MOST_MISSES} times" in said()[1]


def test_a_loss_as_planned_between_others_keeps_the_plans(folder, calls, said, tmp_path):
    with fusedrl.patch_trl():
        trainer = grpo(folder, tmp_path, kind=Sharpened)
        for _ in range(_trl_loss.MOST_MISSES):
            step(trainer, batch(OLD))
            step(trainer, {**batch(OLD), "advantages": torch.zeros(4)})
    assert calls["linear_policy_loss"] == 2 * _trl_loss.MOST_MISSES


class OtherBatch(trl.GRPOTrainer):
    """Scores completions that are not those of its batch."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, *args: Any, **o: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(model, ids.flip(0), *args, **o)


def test_rows_of_another_batch_are_seen(folder, calls, said, tmp_path):
    make = lambda: grpo(folder, tmp_path, kind=OtherBatch)  # noqa: E731
    found, expected, _ = both(make, batch(OLD))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 0
    assert said() == ["trl: OtherBatch: the head got other rows than those of the completions"]


def test_a_head_that_does_not_take_the_plan_is_logged(folder, calls, said, tmp_path):
    def make():
        trainer = grpo(folder, tmp_path)
        trainer.model.double()
        return trainer

    found, expected, _ = both(make, batch(OLD))
    check_same(found, expected)
    assert calls["linear_policy_loss"] == 0
    assert ["float64" in said()[0], "nor its loss" in said()[1], len(said())] == [True, True, 2]


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
        assert "off_policy_mask_threshold; only" in said()[0].replace("'", "")
        trainer.off_policy_mask_threshold = None
        check_same(step(trainer, near(trainer, inputs)), expected)


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


def test_the_report_says_which_losses_are_fused():
    with fusedrl.patch_trl() as report:
        in_part, printed = report.in_part, str(report)
    assert "loss_type sapo and vespo" in in_part["GRPOTrainer"]
    assert in_part["RLOOTrainer"].startswith("log-probs; the loss too")
    for name in ("GMPOTrainer", "DPOTrainer", "SFTTrainer"):
        assert in_part[name] == "log-probs; the loss is its own"
    assert f"\nin part:\n  A2POTrainer: {in_part['A2POTrainer']}" in printed
    with fusedrl.patch_trl(["ChunkedLogProbFunction"]) as report:
        assert report.in_part["GRPOTrainer"] == "log-probs; the loss is its own"


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
