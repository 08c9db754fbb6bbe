"""TRL's trainers with and without the patch: the same steps, on our functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

import trl
from datasets import Dataset
from one_thread import one_thread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import fusedrl
from fusedrl.integrations import _trl_head
from fusedrl.integrations import trl as ours

__all__ = ["one_thread"]

TEXTS = ["the cat sat on the mat", "a dog ran in the park", "no cat ran", "the dog sat"]
PAIRS = {
    "prompt": TEXTS,
    "chosen": [" and slept", " and barked at it", " today", " down"],
    "rejected": [" nowhere", " no", " in the", " on a cat mat"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and its tokenizer, in one directory."""
    folder = tmp_path_factory.mktemp("model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [text for column in PAIRS.values() for text in column],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<end>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def called(monkeypatch):
    """Counts the calls of the fused ops, by their name."""
    counts = {"token_log_probs": 0, "linear_token_log_probs": 0}

    def counting(name, op):
        def count(*args, **options):
            counts[name] += 1
            return op(*args, **options)

        return count

    for module, name in ((ours, "token_log_probs"), (_trl_head, "linear_token_log_probs")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counts


def options(out: Any, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "disable_tqdm": True,
        **more,
    }


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


def grpo(folder: str, out: Any) -> Any:
    return trl.GRPOTrainer(
        folder,
        reward_funcs=by_length,
        args=trl.GRPOConfig(
            **options(out), num_generations=2, max_completion_length=6, beta=0.1, temperature=0.9
        ),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
    )


def rloo(folder: str, out: Any) -> Any:
    return trl.RLOOTrainer(
        folder,
        reward_funcs=by_length,
        args=trl.RLOOConfig(**options(out), num_generations=2, max_completion_length=6, beta=0.1),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
    )


def dpo(folder: str, out: Any) -> Any:
    args = trl.DPOConfig(**options(out))
    return trl.DPOTrainer(folder, args=args, train_dataset=Dataset.from_dict(PAIRS))


def kto(folder: str, out: Any) -> Any:
    rows = {"prompt": TEXTS, "completion": PAIRS["chosen"], "label": [True, False, True, False]}
    args = trl.KTOConfig(**options(out))
    return trl.KTOTrainer(folder, args=args, train_dataset=Dataset.from_dict(rows))


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


def tpo(folder: str, out: Any) -> Any:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    rows = {**PAIRS, "reference": PAIRS["chosen"][::-1]}
    args = TPOConfig(**options(out))
    return TPOTrainer(folder, args=args, train_dataset=Dataset.from_dict(rows))


def trained(make: Any, folder: str, out: Any) -> tuple[list[dict[str, float]], Any]:
    """What two steps log, times aside, and the weights after them."""
    torch.manual_seed(0)
    trainer = make(folder, out)
    trainer.train()
    logs = [
        {k: v for k, v in entry.items() if isinstance(v, float) and "time" not in k}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return logs, trainer.model.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "op"),
    [
        (grpo, "linear_token_log_probs"),
        (rloo, "linear_token_log_probs"),
        (dpo, "linear_token_log_probs"),
        (kto, "linear_token_log_probs"),
        (sft, "linear_token_log_probs"),
        (cpo, "token_log_probs"),
        (tpo, "token_log_probs"),
    ],
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
