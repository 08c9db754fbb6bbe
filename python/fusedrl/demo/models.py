"""Train a tiny chat model on the bundled chats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fusedrl.ops import token_log_probs
from fusedrl.scoring.chats import Chat, parse_chats
from fusedrl.scoring.records import read_records
from fusedrl.scoring.tokenization import TokenizedChat, tokenize_chat

CHATS = Path(__file__).parent / "chats.jsonl"
CONTEXT = 1024
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_reference(folder: Path, *, steps: int = 100, seed: int = 0) -> None:
    """Train a tiny model on the bundled chats and save it for ``from_pretrained``.

    Tokens are bytes, so that tokenising an answer again gives the sampled tokens.

    Args:
        folder: output directory, created if necessary.
        steps: optimiser steps with 4 chats each.
        seed: seeds the initial weights and the order of the chats.
    """
    tokenizer = make_tokenizer([""], size=0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model(len(tokenizer))
        tokenizer.save_pretrained(folder)
        model.config.save_pretrained(folder)
        # Train with the tokenizer that scoring will load: for Qwen2, AutoTokenizer replaces the
        # saved pre-tokenizer.
        loaded = AutoTokenizer.from_pretrained(folder)
        with one_thread():
            chats = [tokenize_chat(chat, loaded) for chat in bundled_chats()]
            _train(model, chats, steps, 5e-3, random.Random(seed))
        model.save_pretrained(folder)


def bundled_chats() -> list[Chat]:
    """The conversations in ``CHATS``."""
    return [chat for record in read_records(CHATS).rows for chat in parse_chats(record)]


def make_tokenizer(texts: list[str], size: int = 1500) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on ``texts``, with a chat template without generation markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
        model_max_length=CONTEXT,
    )


def make_model(vocabulary: int) -> Qwen2ForCausalLM:
    """An untrained Qwen2 with 225,000 parameters plus 96 for each token of the vocabulary."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=96,
            intermediate_size=288,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=_SPECIAL.index("<|im_end|>"),
            pad_token_id=_SPECIAL.index("<|endoftext|>"),
        )
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, since synchronisation would dominate in such small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(
    model: Qwen2ForCausalLM,
    chats: list[TokenizedChat],
    steps: int,
    rate: float,
    shuffle: random.Random,
) -> None:
    """Maximise the log-probs of the assistant tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    # Ten steps of warm-up, then linear decay: the full rate is unstable at first.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / steps)
    )
    model.train()
    for _ in range(steps):
        batch = shuffle.sample(chats, 4)
        tokens = pad_sequence([torch.tensor(c.token_ids) for c in batch], batch_first=True)
        mask = pad_sequence([torch.tensor(c.turns) >= 0 for c in batch], batch_first=True)
        # Causal attention with right padding: no scored token attends to padding.
        logits = model(input_ids=tokens, use_cache=False).logits
        log_probs = token_log_probs(logits, tokens, mask, shift=True).log_probs
        loss = -log_probs.sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
