"""Steps of TRL's trainers and of torchrl's recipe on a GPU: those under a patch are those without.

``make gpu`` runs them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

import trl
from datasets import Dataset
from fusedrl.benchmarks.bench_grpo_step import SIZES, Step
from tiny_trl import PAIRS, TEXTS, options, trained
from trl_losses import PLAIN_KL, calls, folder, grpo

import fusedrl

__all__ = ["calls", "folder"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"
SLOW = {"learning_rate": 1e-3, "use_cpu": False}


def sft(folder: str, out: Any, **more: Any) -> Any:
    args = trl.SFTConfig(**options(out, **SLOW, **more))
    return trl.SFTTrainer(folder, args=args, train_dataset=Dataset.from_dict({"text": TEXTS}))


def dpo(folder: str, out: Any, **more: Any) -> Any:
    args = trl.DPOConfig(**options(out, **SLOW, **more))
    return trl.DPOTrainer(folder, args=args, train_dataset=Dataset.from_dict(PAIRS))


def policy(folder: str, out: Any, **more: Any) -> Any:
    return grpo(folder, out, **SLOW, **more)


CASES = {
    "sft": (sft, {}),
    "dpo": (dpo, {}),
    "grpo": (policy, {}),
    "grpo, kl": (policy, PLAIN_KL),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_steps_of_trl(case, bf16, folder, calls, tmp_path):
    make, config = CASES[case]

    def steps() -> tuple[Any, Any]:
        logs, weights = trained(lambda *at: make(*at, **config, bf16=bf16), folder, tmp_path)
        return logs, torch.cat([x.flatten().float() for x in weights.values()])

    expected_logs, expected = steps()
    assert expected.device.type == DEVICE and not calls
    with fusedrl.patch_trl():
        logs, weights = steps()
    assert len(calls) >= 2
    rel, off, far = (5e-2, 1e-2, 1e-2) if bf16 else (2e-4, 2e-5, 1e-4)
    for ours, theirs in zip(logs, expected_logs, strict=True):
        assert ours == pytest.approx(theirs, rel=rel, abs=off)
    assert (weights - expected).norm() <= far * expected.norm()


def test_a_step_of_torchrls_recipe():
    plain, patched = (Step(patched, DEVICE, SIZES["cpu"]) for patched in (False, True))
    batch = plain.generate()
    results = []
    for step in (plain, patched):
        scored = step.score(batch.copy())
        loss = step.learn(scored)
        grads = [x.grad.flatten() for x in step.model.parameters() if x.grad is not None]
        kl = torch.cat([row.flatten() for row in scored.get(("next", "kl_penalty"), as_list=True)])
        results.append((loss, torch.cat(grads), kl))
        assert loss.device.type == DEVICE
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()
