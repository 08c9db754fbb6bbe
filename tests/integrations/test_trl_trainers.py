"""TRL's trainers of log-probs alone, with and without the patch: the same steps, on our functions.

Those of GRPO, RLOO and DPO are in ``test_trl_sharing.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

import trl
from datasets import Dataset
from one_thread import one_thread
from tiny_trl import PAIRS, TEXTS, options, save_model, trained
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import fusedrl
from fusedrl.integrations import trl as ours
from fusedrl.integrations import trl_head

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and its tokenizer, in one directory."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def called(monkeypatch):
    """Counts the calls of the fused ops, by their name."""
    places = [(ours, "token_log_probs"), (trl_head, "linear_token_log_probs")]
    counts = {name: 0 for _, name in places}

    def counting(name, op):
        def count(*args, **options):
            counts[name] += 1
            return op(*args, **options)

        return count

    for module, name in places:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counts


def sft(folder: str, out: Any) -> Any:
    args = trl.SFTConfig(**options(out))
    return trl.SFTTrainer(folder, args=args, train_dataset=Dataset.from_dict({"text": TEXTS}))


def cpo(folder: str, out: Any) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer(
        Qwen2ForCausalLM.from_pretrained(folder),
        args=CPOConfig(**options(out)),
        train_dataset=Dataset.from_dict(PAIRS),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "op"), [(sft, "linear_token_log_probs"), (cpo, "token_log_probs")]
)
def test_steps_under_the_patch_are_those_without_it(make, op, folder, called, tmp_path):
    expected_logs, expected = trained(make, folder, tmp_path)
    assert sum(called.values()) == 0
    with fusedrl.patch_trl():
        logs, weights = trained(make, folder, tmp_path)
    assert called[op] >= 2
    assert len(logs) == 2
    for ours_of_step, theirs_of_step in zip(logs, expected_logs, strict=True):
        assert ours_of_step == pytest.approx(theirs_of_step, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
