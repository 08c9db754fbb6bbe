"""GRPO with torchrl's replay buffer, while another process generates the next answers.

A tiny model made on the spot stands in for yours, and learns in less than a minute to answer in
vowels. ``python grpo.py 4`` stops after four batches.
"""

from __future__ import annotations

import argparse
import string
import warnings
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torchrl.data import (
    Composite,
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage
from transformers import PreTrainedTokenizerFast

from fusedrl import AsyncCollector, GRPOLoss, LLMCollector, RetrieveKL
from fusedrl.demo.models import make_model

QUESTIONS = ["How are you?", "What is 2 + 2?", "Name a colour.", "Is it late?"]
GROUP = 8  # answers to a question
KL_COEFF = 0.002


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, so that an answer's text has the tokens that were sampled."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    characters = [*special, *string.ascii_letters, *string.digits, *" \n?+."]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[2],
        additional_special_tokens=[special[1]],
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


class Vowels(Transform):
    """The reward of an answer: the share of vowels in it."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        rewards = [
            [[sum(c in "aeiou" for c in answer) / max(len(answer), 1)]]
            for answer in tensordict["text"].response
        ]
        return next_tensordict.set("reward", torch.tensor(rewards))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def make_env() -> TransformedEnv:
    """Each question to all dialogs of a group; made in the collector's process."""
    questions = torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS for _ in range(GROUP)],
        batch_size=GROUP,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )
    env = TransformedEnv(ChatEnv(batch_size=(GROUP,), tokenizer=make_tokenizer()))
    env.append_transform(DataLoadingPrimer(dataloader=questions))
    env.append_transform(Vowels())
    # A chat has no end of its own, and MCAdvantage takes trajectories that are done: of one turn.
    return env.append_transform(StepCounter(max_steps=1))


def main(batches: int) -> None:
    """An update a batch, each one version of the weights, which the collector takes when it can."""
    warnings.filterwarnings("ignore")  # torch's and torchrl's own
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the collector's process has the other core
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer)).eval()

    def copy_of_weights() -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def frozen_copy() -> Any:
        copy = make_model(len(tokenizer)).eval().requires_grad_(False)
        copy.load_state_dict(model.state_dict())
        return copy

    def reads(model: Any, log_probs_key: str = "log_probs") -> TransformersWrapper:
        # The loss and the KL are over the assistant's tokens ("rlhf" below). Which these are, the
        # conversation says: tokens alone, without "history", do not.
        return TransformersWrapper(
            model,
            tokenizer=tokenizer,
            input_mode="history",
            generate=False,
            return_log_probs=True,
            log_probs_key=log_probs_key,
        )

    policy = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 12, "do_sample": True}
    )
    # The ratio and the KL are of the policy that sampled the answers, so the scorer gets the
    # weights of the version that made a batch: the trained model has newer ones by then.
    scorer = frozen_copy()
    score = RetrieveKL(reads(scorer), reads(frozen_copy(), "ref_log_probs"), add_to_reward=False)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(GROUP),  # of rows that differ in length
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP),
        batch_size=GROUP // 2,
    )
    loss_of = GRPOLoss(reads(model), masking_strategy="rlhf")
    # RetrieveKL writes where a step of an environment does; by default the loss reads at the root,
    # where a policy that generates leaves log-probs of the response only.
    loss_of.set_keys(sample_log_prob=("next", "log_probs", "full"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    with AsyncCollector(
        make_env,
        policy,
        collector_class=LLMCollector,
        dialog_turns_per_batch=GROUP,
        total_dialog_turns=GROUP * batches,
        track_policy_version=True,
    ) as collector:
        weights = {collector.policy_version: copy_of_weights()}
        for number, batch in enumerate(collector):
            turns = batch.reshape(-1)
            (version,) = set(turns["policy_version"].tolist())  # one call of the policy made them
            weights = {v: copy for v, copy in weights.items() if v >= version}
            scorer.load_state_dict(weights[version])
            score(turns)
            # Rows of different lengths are no tensor: as_list=True gives each by itself.
            kl = torch.stack([row.sum() for row in turns.get(("next", "kl_penalty"), as_list=True)])
            rewards = turns["next", "reward"]
            # One reward an answer: of a reward a token MCAdvantage makes an advantage a token,
            # which GRPOLoss pads on the right, and log-probs on the left.
            turns["next", "reward"] = rewards - KL_COEFF * kl.view_as(rewards)
            buffer.extend(turns)
            for sample in buffer:
                losses = loss_of(sample)
                optimizer.zero_grad()
                (losses.loss_objective + losses.loss_entropy).backward()
                optimizer.step()
            trained = copy_of_weights()
            collector.update_policy_weights_(trained)  # one version; generation goes on meanwhile
            weights[collector.policy_version] = trained
            print(
                f"batch {number}: reward {rewards.mean():.2f}, KL {kl.mean():.1f} nats, "
                f"made by version {version}, newest is {collector.policy_version}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", nargs="?", type=int, default=40)
    main(parser.parse_args().batches)
