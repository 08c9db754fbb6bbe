"""importance_weights beside TRL's own correction."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch

from fusedrl import importance_weights

MODES = [f"{level}_{mode}" for level in ("token", "sequence") for mode in ("truncate", "mask")]


def ratio_of_trl(log_probs, rollout_log_probs, mask, mode, low, high):
    """What the statements of TRL's trainer that correct for vLLM make of a batch."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="no trl")
    source = textwrap.dedent(inspect.getsource(trainer.GRPOTrainer._generate_and_score_completions))
    wanted = "vllm_importance_sampling_ratio"
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and f"{wanted} =" in ast.unparse(node.body)
    ]
    innermost = min(blocks, key=lambda node: len(ast.unparse(node)))
    scope = {
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
        "old_per_token_logps": log_probs,
        "sampling_per_token_logps": rollout_log_probs,
        "completion_mask": mask.int(),
        "tool_mask": None,
        "torch": torch,
        "math": math,
    }
    exec(compile(ast.unparse(innermost.body), "trl", "exec"), scope)
    return scope[wanted]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.8, 1.2), (0.9, None)])
@pytest.mark.parametrize("missing", [False, True])
def test_weights_are_those_of_trl(mode, low, high, missing):
    mask = torch.arange(40) < torch.tensor([40, 3, 17, 1, 29, 40])[:, None]
    rollout = -2 * torch.rand(6, 40)
    log_probs = rollout + 0.2 * torch.randn(6, 40)
    if missing:  # of what vLLM could not score
        rollout[0, :3] = rollout[2, 5] = float("nan")
    theirs = ratio_of_trl(log_probs, rollout, mask, mode, low, high).expand_as(log_probs)
    level, kind = mode.split("_")
    options = {"level": level, "mode": kind, "low": low, "high": high, "nan": "missing"}
    ours = importance_weights(log_probs, rollout, mask, **options).weights
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-6, atol=1e-6)
    assert (ours[~mask] == 0).all()
