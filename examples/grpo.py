"""GRPO with torchrl: a policy learns to answer in digits while a worker generates rollouts.

``python grpo.py`` trains a tiny model and prints a line for each batch. ``fusedrl demo`` runs the
same loop, and then shows where the policy drifted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl import AsyncCollector, GRPOLoss, LLMCollector, RetrieveKL
from fusedrl.demo import dialogs, make_reference

# Number of answers to a question.
GROUP = 8
KL_COEFF = 0.002
# Metrics, questions and answers of one batch.
Turns = dict[str, Any]


def train(
    reference: str | Path,
    policy: str | Path,
    batches: int = 24,
    seed: int = 0,
    rewards: dialogs.Rewards = dialogs.digits,
) -> list[Turns]:
    """Train the model in ``reference`` and save it in ``policy``; returns a dict for each batch."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model, frozen = (AutoModelForCausalLM.from_pretrained(reference).eval() for _ in range(2))

    def log_prob_wrapper(model: Any, key: str) -> TransformersWrapper:
        # History input, since tokens alone do not show which are the assistant's.
        reads: dict[str, Any] = {"input_mode": "history", "generate": False}
        return TransformersWrapper(
            model, tokenizer=tokenizer, return_log_probs=True, log_probs_key=key, **reads
        )

    def make_env() -> Any:
        """Called in the worker, which scores each answer with the weights that made it."""
        torch.manual_seed(seed)
        env = dialogs.make_env(tokenizer, GROUP, rewards)
        reference = log_prob_wrapper(frozen.requires_grad_(False), "ref_log_probs")
        return env.append_transform(RetrieveKL("from_collector", reference, add_to_reward=False))

    # Tokens are bytes; suppress non-ASCII ones, which are not valid text alone.
    not_ascii = [i for i in range(len(tokenizer)) if not tokenizer.decode([i]).isascii()]
    model.generation_config.suppress_tokens = not_ascii
    sampling = {"max_new_tokens": 16, "do_sample": True}
    answers = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
    buffer = ReplayBuffer(
        # The rows differ in length.
        storage=LazyStackStorage(GROUP),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP),
        batch_size=GROUP,
    )
    loss_of = GRPOLoss(log_prob_wrapper(model, "log_probs"), masking_strategy="rlhf")
    # The key of the log-probs that RetrieveKL writes.
    loss_of.set_keys(sample_log_prob=("next", "log_probs", "full"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    history: list[Turns] = []
    with AsyncCollector(
        make_env,
        answers,
        collector_class=LLMCollector,
        dialog_turns_per_batch=GROUP,
        total_dialog_turns=GROUP * batches,
        track_policy_version=True,
    ) as collector:
        began = time.perf_counter()
        for batch in collector:
            received = time.perf_counter()
            turns, newest = batch.reshape(-1), collector.policy_version
            # as_list=True: rows of different lengths cannot be stacked.
            kl = torch.stack([row.sum() for row in turns.get(("next", "kl_penalty"), as_list=True)])
            reward = turns["next", "reward"]
            turns["next", "reward"] = reward - KL_COEFF * kl.view_as(reward)
            buffer.extend(turns)
            for sample in buffer:
                losses = loss_of(sample)
                optimizer.zero_grad()
                (losses.loss_objective + losses.loss_entropy).backward()
                optimizer.step()
            trained = time.perf_counter()
            # Publishes one version; the worker continues meanwhile.
            collector.update_policy_weights_()
            done = time.perf_counter()
            history.append(
                {
                    "version": turns["policy_version"].min().item(),
                    "newest": newest,
                    "reward": reward.mean().item(),
                    "kl": kl.mean().item(),
                    "waiting": received - began,
                    "training": trained - received,
                    "publishing": done - trained,
                    "prompts": list(turns["query"]),
                    "completions": list(turns["text", "response"]),
                }
            )
            print(
                "version {version:.0f} (newest {newest:.0f}): reward {reward:.2f}, "
                "KL {kl:.1f} nats per answer".format(**history[-1]),
                flush=True,
            )
            began = done
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", nargs="?", type=int, default=24)
    parser.add_argument("--steps", type=int, default=100, help="training steps of the reference")
    arguments = parser.parse_args()
    # Warnings of torch and torchrl.
    warnings.filterwarnings("ignore")
    # Leave the other cores to the worker.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_reference(Path(folder, "reference"), steps=arguments.steps)
        train(Path(folder, "reference"), Path(folder, "policy"), arguments.batches)
