"""GRPO with vLLM, which generates in bfloat16; a float32 trainer publishes to a weight channel.

A tiny untrained model stands in for yours, and learns in a minute to answer in vowels.
``python vllm_grpo.py 2`` stops after two updates. Every token has the version of the weights that
generated it, and the loss corrects for the precision of the engine.
"""

from __future__ import annotations

import argparse
import string
import tempfile
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from fusedrl import (
    WeightChannel,
    importance_weights,
    linear_policy_loss,
    linear_token_log_probs,
)
from fusedrl.vllm import EngineWeights

QUESTIONS = ["How are you?", "What is 2 + 2?", "Name a colour.", "Is it late?"]
# Number of answers to a question.
GROUP = 16
# Number of tokens of an answer.
TOKENS = 12
PAD = 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character."""
    characters = ["<pad>", "<eos>", *string.ascii_letters, *string.digits, *" \n?+."]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(folder: str) -> Any:
    """An untrained model; it is saved with its tokenizer for the engine."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        # vLLM needs a head size of at least 32.
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def reward(text: str) -> float:
    """The fraction of vowels in an answer."""
    return sum(c in "aeiou" for c in text) / TOKENS


def step(model: Any, optimizer: Any, rollouts: list[Any]) -> tuple[float, float]:
    """One update; returns the mean reward and the log-prob difference of engine and trainer."""
    answers = [answer for rollout in rollouts for answer in rollout.outputs]
    prompts = [rollout.prompt_token_ids for rollout in rollouts for _ in rollout.outputs]
    length = max(map(len, prompts)) + TOKENS
    tokens = torch.full((len(answers), length), PAD)
    generated = torch.zeros(len(answers), length, dtype=torch.bool)
    rollout_log_probs = torch.zeros(len(answers), length)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer.token_ids)
        tokens[row, :end] = torch.tensor([*prompt, *answer.token_ids])
        generated[row, start:end] = True
        rollout_log_probs[row, start:end] = torch.tensor(
            [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]
        )
    rewards = torch.tensor([reward(answer.text) for answer in answers]).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

    hidden = model.model(tokens, attention_mask=tokens != PAD).last_hidden_state
    head = model.lm_head.weight
    with torch.no_grad():
        scored = linear_token_log_probs(hidden, head, tokens, generated, shift=True)
    weights, _ = importance_weights(scored.log_probs, rollout_log_probs, generated, high=2.0)
    result = linear_policy_loss(
        hidden,
        head,
        tokens,
        advantages.flatten(),
        generated,
        token_weights=weights,
        shift=True,
    )
    result.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    differences = (result.log_probs - rollout_log_probs)[generated]
    return rewards.mean().item(), differences.abs().mean().item()


def main(updates: int) -> None:
    """Generate, train and publish; each update is one version of the weights."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        llm = LLM(
            folder,
            dtype="bfloat16",
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config=WeightTransferConfig(backend="fusedrl"),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampling = SamplingParams(n=GROUP, max_tokens=TOKENS, logprobs=0)
    with WeightChannel.create(model, dtype=torch.bfloat16) as channel:
        weights = EngineWeights(channel, llm)
        for _ in range(updates):
            rollouts = llm.generate(QUESTIONS, sampling, use_tqdm=False)
            mean, difference = step(model, optimizer, rollouts)
            [span] = rollouts[0].outputs[0].weight_versions
            print(
                f"weights {span.version}: reward {mean:.2f}, "
                f"{difference:.4f} nats per token between engine and trainer"
            )
            weights.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("updates", type=int, nargs="?", default=40, help="updates to run")
    main(parser.parse_args().updates)
