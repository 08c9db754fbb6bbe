"""A torchrl collector whose rewards include a KL penalty.

Two tiny untrained models stand in for yours: change ``wrapper`` to use your model and tokenizer.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper

from fusedrl import RetrieveKL
from fusedrl.demo.models import make_model, make_tokenizer

QUESTIONS = ["How are you?", "What is 2 + 2?", "Name a colour.", "Is it late?"]


class ShortAnswers(Transform):
    """The reward of an answer is 1 minus 0.01 for each character."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        answers = tensordict["text"].response
        rewards = [[[1 - len(answer) / 100]] for answer in answers]
        return next_tensordict.set("reward", torch.tensor(rewards))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def main() -> None:
    """Collect two batches; print the KL and the penalised reward of each answer."""
    # Warnings of torch and torchrl.
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    tokenizer = make_tokenizer(QUESTIONS)

    def wrapper(**options: Any) -> TransformersWrapper:
        return TransformersWrapper(make_model(len(tokenizer)), tokenizer=tokenizer, **options)

    policy = wrapper(generate_kwargs={"max_new_tokens": 12, "do_sample": True})
    reference = wrapper(generate=False, return_log_probs=True, log_probs_key="ref_log_probs")

    questions = torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS * 2],
        batch_size=2,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer))
    env.append_transform(DataLoadingPrimer(dataloader=questions))
    env.append_transform(ShortAnswers())
    # This is the line to add.
    env.append_transform(RetrieveKL("from_collector", reference, coeff=0.05))

    collector = LLMCollector(env=env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8)
    for number, batch in enumerate(collector):
        turns = batch.reshape(-1)["next"]
        for kl, reward in zip(
            turns.get("kl_penalty", as_list=True), turns.get("reward", as_list=True), strict=True
        ):
            print(f"batch {number}: KL {kl.sum():6.2f} nats, reward a token {reward.mean():.3f}")
    collector.shutdown()


if __name__ == "__main__":
    main()
