"""Tiny policy and reference that really run, and conversations to score with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from one_thread import one_thread
from tensordict import NonTensorStack, TensorDict, TensorDictBase, set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fusedrl import RetrieveKL

from .dialogs import CHATS, GEN, LENGTHS, REF

__all__ = ["one_thread"]

QUESTIONS = ["How are you?", "What is the capital of France?"]


@pytest.fixture(autouse=True)
def _torchrl_conventions():
    with set_list_to_stack(True):
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE trained on the conversations, reloaded from disk as a user would."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((m["content"] for chat in CHATS for m in chat), trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def policy_model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **_TINY))
    return _reloaded(model, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def reference_model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Another architecture with other weights: with one model in both roles every KL is 0."""
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **_TINY))
    return _reloaded(model, tmp_path_factory.mktemp("reference"))


_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform predictions
}


def _reloaded(model: Any, folder: Any) -> Any:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def wrap(tokenizer: Any) -> Callable[..., TransformersWrapper]:
    """A log-prob wrapper of a model; options as in ``TransformersWrapper``."""

    def wrap(model: Any, log_probs_key: str = "log_probs", **options: Any) -> TransformersWrapper:
        defaults = {"input_mode": "history", "generate": False, "return_log_probs": True}
        return TransformersWrapper(
            model, log_probs_key=log_probs_key, **{"tokenizer": tokenizer, **defaults, **options}
        )

    return wrap


@pytest.fixture
def policy(wrap: Any, policy_model: Any) -> Callable[..., TransformersWrapper]:
    return lambda **options: wrap(policy_model, "gen_log_probs", **options)


@pytest.fixture
def reference(wrap: Any, reference_model: Any) -> Callable[..., TransformersWrapper]:
    return lambda **options: wrap(reference_model, "ref_log_probs", **options)


class OneReward(Transform):
    """A reward of 1 for every answer, shaped as torchrl's scorers shape it."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("reward", torch.ones(*next_tensordict.batch_size, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def chats(
    *transforms: Transform,
    tokenizer: Any,
    rows: int = 2,
    mode: str = "history",
    questions: Sequence[str] = QUESTIONS,
) -> TransformedEnv:
    """A ``ChatEnv`` that asks the questions, with a reward and the given transforms."""
    loader = torch.utils.data.DataLoader(
        [{"query": question} for question in questions] * 4,
        batch_size=rows,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )
    env = TransformedEnv(ChatEnv(batch_size=(rows,), tokenizer=tokenizer, input_mode=mode))
    for transform in (DataLoadingPrimer(dataloader=loader), OneReward(), *transforms):
        env.append_transform(transform)
    return env


@pytest.fixture
def chat_env(tokenizer: Any) -> Callable[..., TransformedEnv]:
    return partial(chats, tokenizer=tokenizer)


@pytest.fixture
def generating_policy(tokenizer: Any, policy_model: Any) -> TransformersWrapper:
    return TransformersWrapper(
        policy_model,
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 6, "do_sample": True},
    )


@pytest.fixture
def retrieve_kl(policy: Any, reference: Any) -> Callable[..., RetrieveKL]:
    """``RetrieveKL`` of both models, which pad alike."""

    def build(pad_output: bool = False, **options: Any) -> RetrieveKL:
        return RetrieveKL(*(make(pad_output=pad_output) for make in (policy, reference)), **options)

    return build


@pytest.fixture
def samples() -> list[dict]:
    """Packed log-probs of two models, and a reward a token."""
    return [
        {GEN: torch.randn(n), REF: torch.randn(n), "reward": torch.randn(n, 1)} for n in LENGTHS
    ]
