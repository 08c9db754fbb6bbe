"""GRPO while the next answers are generated: a trainer, and a collector in a process of its own.

A tiny model made on the spot stands in for yours. The reward wants short answers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from kl_penalty import QUESTIONS, ShortAnswers
from tensordict import NonTensorStack, TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper

from fusedrl import AsyncCollector, LLMCollector
from fusedrl.demo.models import make_model, make_tokenizer
from fusedrl.models import causal_log_probs

GROUP = 8  # answers to a question
BATCHES = 6


def make_env() -> Any:
    """Each question to all dialogs of a group; made in the collector's process."""
    questions = torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS for _ in range(GROUP)],
        batch_size=GROUP,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )
    env = TransformedEnv(ChatEnv(batch_size=(GROUP,), tokenizer=make_tokenizer(QUESTIONS)))
    env.append_transform(DataLoadingPrimer(dataloader=questions))
    return env.append_transform(ShortAnswers())


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The clipped objective of one group, whose advantages are its standardised rewards."""
    rewards = torch.stack([row.sum() for row in batch.get(("next", "reward"), as_list=True)])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    answers = batch.get(("tokens", "response"), as_list=True)
    tokens = batch.get(("tokens", "full"), as_list=True)
    lengths = [len(row) for row in tokens]
    # All of an answer but its first token, for which torchrl's wrapper has no log-prob.
    kept = torch.cat(
        [torch.arange(len(t)) > len(t) - len(a) for t, a in zip(tokens, answers, strict=True)]
    )
    now = causal_log_probs(model, torch.cat(tokens), lengths, kept)[kept]  # no padding, kept only
    then = torch.cat([row[1:] for row in batch.get(("log_probs", "response"), as_list=True)])
    ratio = torch.exp(now - then)
    gain = advantages.repeat_interleave(torch.tensor([len(row) - 1 for row in answers]))
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def main() -> None:
    """A few updates, each one version of the weights that the collector takes when it can."""
    warnings.filterwarnings("ignore")  # torch's and torchrl's own
    torch.manual_seed(0)
    tokenizer = make_tokenizer(QUESTIONS)
    policy = TransformersWrapper(
        make_model(len(tokenizer)),
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 12, "do_sample": True},
        return_log_probs=True,
    )
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    with AsyncCollector(
        make_env,
        policy,
        collector_class=LLMCollector,
        frames_per_batch=GROUP,
        total_frames=GROUP * BATCHES,
        track_policy_version=True,
        max_staleness=4,
    ) as collector:
        for number, batch in enumerate(collector):
            loss = loss_of(policy.model, batch.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            made_by = batch["policy_version"].flatten().tolist()
            newest = collector.policy_version
            collector.update_policy_weights_()  # one version; generation goes on meanwhile
            print(f"batch {number}: made by version {made_by[0]}, newest was {newest}")


if __name__ == "__main__":
    main()
