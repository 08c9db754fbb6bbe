"""GRPO with torchrl: a policy learns to answer in digits while its worker makes the next answers.

``python grpo.py`` makes a tiny model, then prints a line for each batch. ``fusedrl demo`` runs the
same loop, and shows afterwards where the policy drifted.
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

# The number of answers to a question.
GROUP = 8
KL_COEFF = 0.002
# What is known of one batch: its figures, and its questions and answers.
Turns = dict[str, Any]


def train(
    reference: str | Path,
    policy: str | Path,
    batches: int = 24,
    seed: int = 0,
    rewards: dialogs.Rewards = dialogs.digits,
) -> list[Turns]:
    """Train the model in the folder ``reference``, save it in ``policy``; a dict for each batch."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model, frozen = (AutoModelForCausalLM.from_pretrained(reference).eval() for _ in range(2))

    def scores(model: Any, key: str) -> TransformersWrapper:
        # Which tokens are the assistant's is known to the conversation, and not to its tokens.
        reads: dict[str, Any] = {"input_mode": "history", "generate": False}
        return TransformersWrapper(
            model, tokenizer=tokenizer, return_log_probs=True, log_probs_key=key, **reads
        )

    def make_env() -> Any:
        """Called in the worker, where each answer is scored with the weights that made it."""
        torch.manual_seed(seed)
        env = dialogs.make_env(tokenizer, GROUP, rewards)
        reference = scores(frozen.requires_grad_(False), "ref_log_probs")
        return env.append_transform(RetrieveKL("from_collector", reference, add_to_reward=False))

    # A token of this tokenizer is a byte, and those beyond ASCII are no text by themselves.
    no_text = [i for i in range(len(tokenizer)) if not tokenizer.decode([i]).isascii()]
    model.generation_config.suppress_tokens = no_text
    sampling = {"max_new_tokens": 16, "do_sample": True}
    answers = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
    buffer = ReplayBuffer(
        # The rows differ in length.
        storage=LazyStackStorage(GROUP),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP),
        batch_size=GROUP,
    )
    loss_of = GRPOLoss(scores(model, "log_probs"), masking_strategy="rlhf")
    # RetrieveKL writes the sampled log-probs there.
    loss_of.set_keys(sample_log_prob=("next", "log_probs", "full"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    known: list[Turns] = []
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
            came = time.perf_counter()
            turns, newest = batch.reshape(-1), collector.policy_version
            # Rows of different lengths are no tensor: as_list=True gives each by itself.
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
            # This is one version; the worker goes on meanwhile.
            collector.update_policy_weights_()
            done = time.perf_counter()
            known.append(
                {
                    "version": turns["policy_version"].min().item(),
                    "newest": newest,
                    "reward": reward.mean().item(),
                    "kl": kl.mean().item(),
                    "waiting": came - began,
                    "training": trained - came,
                    "publishing": done - trained,
                    "prompts": list(turns["query"]),
                    "completions": list(turns["text", "response"]),
                }
            )
            print(
                "version {version:.0f} (newest {newest:.0f}): reward {reward:.2f}, "
                "KL {kl:.1f} nats an answer".format(**known[-1]),
                flush=True,
            )
            began = done
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    return known


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", nargs="?", type=int, default=24)
    parser.add_argument("--steps", type=int, default=100, help="of the model that is trained")
    arguments = parser.parse_args()
    # These are torch's and torchrl's own.
    warnings.filterwarnings("ignore")
    # The collector's process has the other core.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_reference(Path(folder, "reference"), steps=arguments.steps)
        train(Path(folder, "reference"), Path(folder, "policy"), arguments.batches)
