"""GRPO with TRL, with TRL's functions or, with ``--patched``, the fused ones.

``python trl_grpo.py`` makes a small model, trains it to give short answers, and prints the KL of
each step, the median time of a step, and the peak memory of training above the models.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import fusedrl
from fusedrl.demo.models import make_model, make_tokenizer

PROMPTS = ["How are you?", "What is 2 + 2?", "Name a colour.", "Is it late?"] * 16


def short_answers(completions: list[str], **_: Any) -> list[float]:
    """A reward for each answer."""
    return [1 - len(text) / 100 for text in completions]


def peak_mib() -> float:
    # KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(folder: Path, steps: int, length: int, classes: int) -> None:
    tokenizer = make_tokenizer(PROMPTS)
    tokenizer.save_pretrained(folder / "model")
    make_model(classes).save_pretrained(folder / "model")
    trainer = GRPOTrainer(
        str(folder / "model"),
        reward_funcs=short_answers,
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            max_steps=steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=length,
            # Generate once for four steps, so that the median step does not generate.
            num_iterations=4,
            learning_rate=1e-3,
            # Weight of the KL to the reference.
            beta=0.1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            # Remove these two on a GPU.
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.remove_callback(PrinterCallback)
    before = peak_mib()
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "step_time" in entry]
    print("KL", *(f"{entry['kl']:.4f}" for entry in logged))
    seconds = statistics.median(entry["step_time"] for entry in logged)
    print(f"{seconds:.2f} s a step, {peak_mib() - before:.0f} MiB for training")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patched", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--classes", type=int, default=32000, help="vocabulary size")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    if arguments.patched:
        fusedrl.patch_trl()
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), arguments.steps, arguments.length, arguments.classes)
