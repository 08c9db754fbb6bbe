"""Batches of GRPO and RLOO trainers, and one step of a loss over them, for tests."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tiny_trl import TEXTS, by_length, options, save_model

import fusedrl
from fusedrl import native
from fusedrl.models import capabilities

OLD, REF, TOOLS = "old_per_token_logps", "ref_per_token_logps", "tool_mask"
SEQUENCE = {"importance_sampling_level": "sequence"}
PLAIN_KL = {"beta": 0.1, "use_bias_correction_kl": False}
WIDTH = 6
LENGTHS = (6, 4, 1, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def calls(monkeypatch):
    """How many rows each call of the head's compiled op gets, but for those that try a model."""
    native.require("_C")
    importlib.import_module("fusedrl.ops.linear_token_log_probs")  # takes an overload of the op
    op, rows = torch.ops.fusedrl.linear_token_log_probs, []

    def count(*args, **options):
        rows.append(len(args[0]))
        return op(*args, **options)

    count.default = op.default  # read where a dispatch mode sees the op first
    monkeypatch.setattr(torch.ops.fusedrl, "linear_token_log_probs", count)
    compare = capabilities.compare_parts

    def uncounted(*args):
        before = len(rows)
        found = compare(*args)
        del rows[before:]
        return found

    monkeypatch.setattr(capabilities, "compare_parts", uncounted)
    return rows


@pytest.fixture
def said(caplog):
    """A function of what fusedrl has logged, ."""
    caplog.set_level(logging.WARNING, "fusedrl")
    return lambda: [record.message for record in caplog.records if record.name == "fusedrl"]


def grpo(folder: str, out: Any, peft: Any = None, **more: Any) -> Any:
    defaults = {"num_generations": 2, "max_completion_length": WIDTH, "temperature": 0.9}
    return trl.GRPOTrainer(
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


def step(trainer: Any, inputs: dict[str, Any], model: Any = None) -> tuple[Any, Any, Any]:
    """The loss, its gradients and the metrics of one batch."""
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(model or trainer.model, inputs)
    loss.backward()
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


def both(make: Any, inputs: Any) -> tuple[Any, Any, Any]:
    """A step as TRL makes it and one under the patch, and the trainer of the latter."""
    theirs = make()
    inputs = near(theirs, inputs)
    expected = step(theirs, inputs)
    with fusedrl.patch_trl():
        ours = make()
        return step(ours, inputs), expected, ours
