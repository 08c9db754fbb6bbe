"""RetrieveLogProb and RetrieveKL end to end: conversations in, log-probs, KL and reward out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import peers
from .harness import Case, Run

NEEDS = {peers.TORCHRL, peers.TRANSFORMERS}

VOCAB, QUICK_VOCAB = 151936, 32000
WORDS = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("l", "nt", "r", "sk")]
LEAST = {128: 5.0, 512: 3.0}  # hidden size -> least speed-up over torchrl
MEMORY_SHARE = 1 / 8  # of torchrl's three copies of the logits
OVERHEAD = 1.15  # RetrieveKL over the two decoders and the kept rows' products
PACKED_GOAL = 1.5  # ragged conversations, over one padded batch
RAGGED = ((128, VOCAB, 2), (512, 32000, 4))  # hidden size, vocabulary, layers
QUICK_RAGGED = ((128, QUICK_VOCAB, 2),)
KEY = ("log_probs", "full")


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Even conversations at two widths, then both models, then ragged ones."""
    even = conversations([270] * 8)
    vocab = QUICK_VOCAB if quick else VOCAB
    widths = list(LEAST)[: 1 if quick else None]
    for hidden in widths:
        yield log_prob_case(even, hidden, vocab, device)
    for hidden in widths:
        yield kl_case(even, hidden, vocab, device)
    ragged = conversations(torch.linspace(32, 1024, 16).int().tolist())
    for hidden, vocab, layers in QUICK_RAGGED if quick else RAGGED:
        yield ragged_case(ragged, hidden, vocab, layers, device)


def conversations(lengths: Sequence[int]) -> list[list[dict[str, str]]]:
    """A question and an answer each, of about so many tokens, 30% of them the assistant's."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(max(words, 1)))

    return [
        [
            {"role": "user", "content": text(int(0.7 * n) - 10)},
            {"role": "assistant", "content": text(int(0.3 * n) - 3)},
        ]
        for n in lengths
    ]


@cache
def tokenizer() -> Any:
    """A byte-level BPE that knows the words."""
    from fusedrl.demo.models import make_tokenizer

    return make_tokenizer([" ".join(WORDS)] * 3, size=1000)


@cache
def model(hidden: int, seed: int, device: str, vocab: int = VOCAB, layers: int = 2) -> Any:
    """A random Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
    )
    return Qwen2ForCausalLM(config).eval().to(device)


def wrapper(network: Any, key: str = "log_probs") -> Any:
    """As torchrl scores conversations."""
    from torchrl.modules.llm import TransformersWrapper

    return TransformersWrapper(
        network,
        tokenizer=tokenizer(),
        input_mode="history",
        generate=False,
        return_log_probs=True,
        log_probs_key=key,
        device=network.device,
    )


def data(chats: Any, reward_on: str | None = None) -> Any:
    """The conversations as a collector delivers them, with rewards on a device if it is named."""
    from tensordict import TensorDict, lazy_stack
    from torchrl.data.llm import History
    from torchrl.modules.llm.policies import ChatHistory

    history = lazy_stack([History.from_chats([chat])[0] for chat in chats])
    td = TensorDict(history=ChatHistory(full=history), batch_size=(len(chats),)).to_lazystack(0)
    if reward_on is not None:
        td["reward"] = torch.ones(len(chats), 1, 1, device=reward_on)
    return td


class Tokens:
    """The tokens of the conversations, and which of them are the assistant's."""

    def __init__(self, chats: Any, device: str):
        from fusedrl.transforms.wrapper_tokens import read, reading_of

        reading = reading_of(wrapper(model(128, 0, device, QUICK_VOCAB)), True, None, None)
        batch = read(reading, data(chats))
        assert batch.mask is not None
        self.rows = [row.to(device) for row in batch.rows(batch.tokens)]
        self.masks = batch.rows(batch.mask)
        self.kept = int(batch.mask.sum())
        self.padded = len(self.rows) * max(batch.lengths)

    def decode(self, network: Any) -> Tensor:
        """The decoder over every sequence alone: the real tokens and nothing else."""
        states = [
            network.model(input_ids=row[None], use_cache=False).last_hidden_state[0]
            for row in self.rows
        ]
        return torch.cat([x[:-1][m[1:]] for x, m in zip(states, self.masks, strict=True)])


def bare(tokens: Tokens, networks: Sequence[Any]) -> Run:
    """The forwards of the decoders over the real tokens, and the kept rows' products."""
    head = networks[0].lm_head.weight
    logits = head.new_zeros(tokens.kept, len(head))  # there before the clock starts

    @torch.no_grad()
    def run(_: Any) -> None:
        for network in networks:
            torch.mm(tokens.decode(network), network.lm_head.weight.T, out=logits)

    return run


def log_prob_case(chats: Any, hidden: int, vocab: int, device: str) -> Case:
    """One model, beside torchrl's class on the same conversations."""
    from torchrl.envs.llm.transforms import RetrieveLogProb as Reference

    from fusedrl import RetrieveLogProb

    tokens = Tokens(chats, device)
    scored = wrapper(model(hidden, 0, device, vocab))
    theirs, ours = Reference(scored), RetrieveLogProb(scored)
    mib = 3 * 4 * tokens.padded * vocab / 2**20
    return Case(
        op="RetrieveLogProb",
        setting=f"{len(chats)} x ~270 tokens, 30% kept, hidden {hidden}, V {vocab}",
        make_input=lambda: data(chats),
        contenders={"torchrl": torch.no_grad()(theirs), "fusedrl": ours},
        timed_only={"decoder + head": bare(tokens, [scored.model])},
        truth=lambda _: truth(tokens, scored.model),
        answer=lambda td: torch.cat(td.get(KEY, as_list=True)),
        goals={"torchrl": LEAST[hidden]},
        most_extra_mib=MEMORY_SHARE * mib,
        host_bound=True,
    )


def kl_case(chats: Any, hidden: int, vocab: int, device: str) -> Case:
    """Policy and reference of one architecture: tokens once, log-probs, KL, penalised reward."""
    from torchrl.envs.llm.transforms import RetrieveKL as Reference

    from fusedrl import RetrieveKL

    tokens = Tokens(chats, device)
    networks = [model(hidden, seed, device, vocab) for seed in (0, 1)]
    pair = wrapper(networks[0]), wrapper(networks[1], "ref_log_probs")
    return Case(
        op="RetrieveKL",
        setting=f"{len(chats)} x ~270 tokens, 30% kept, hidden {hidden}, V {vocab}",
        make_input=lambda: data(chats, reward_on=device),
        contenders={
            "torchrl": torch.no_grad()(Reference(*pair, coeff=0.1)),
            "fusedrl": RetrieveKL(*pair, coeff=0.1),
        },
        timed_only={"2 decoders + heads": bare(tokens, networks)},
        truth=lambda _: 1 - 0.1 * (truth(tokens, networks[0]) - truth(tokens, networks[1])),
        answer=lambda td: torch.cat(td.get("reward", as_list=True)).flatten(),
        goals={"2 decoders + heads": 1 / OVERHEAD},
        host_bound=True,
    )


def ragged_case(chats: Any, hidden: int, vocab: int, layers: int, device: str) -> Case:
    """Lengths 32 to 1024: rows without padding, beside one padded batch through the same ops."""
    from fusedrl import RetrieveLogProb, linear_token_log_probs

    tokens = Tokens(chats, device)
    scored = wrapper(model(hidden, 0, device, vocab, layers))
    ours = RetrieveLogProb(scored)
    pad: Any = torch.nn.utils.rnn.pad_sequence
    ids = pad(tokens.rows, batch_first=True, padding_side="left")
    attended = pad([torch.ones_like(r) for r in tokens.rows], batch_first=True, padding_side="left")
    mask = pad(tokens.masks, batch_first=True, padding_side="left").to(device)

    @torch.no_grad()
    def padded(_: Any) -> Tensor:
        hidden = scored.model.model(ids, attended, use_cache=False).last_hidden_state
        head = scored.model.lm_head.weight
        found = linear_token_log_probs(hidden, head, ids, mask, shift=True).log_probs
        return found[attended.bool()]

    return Case(
        op="RetrieveLogProb",
        setting=f"{len(chats)} x 32 to 1024 tokens, hidden {hidden}, V {vocab}, {layers} layers",
        make_input=lambda: data(chats),
        contenders={"padded": padded, "fusedrl": ours},
        truth=lambda _: truth(tokens, scored.model),
        answer=lambda out: (
            out if isinstance(out, Tensor) else torch.cat(out.get(KEY, as_list=True))
        ),
        goals={"padded": PACKED_GOAL},
        host_bound=True,
    )


@torch.no_grad()
def truth(tokens: Tokens, network: Any) -> Tensor:
    """Log-probs from float64 logits of the kept rows of each sequence alone, packed."""
    hidden, weight = tokens.decode(network).double(), network.lm_head.weight.double()
    mask = torch.cat(tokens.masks)
    kept = torch.cat(tokens.rows)[mask.to(weight.device)]
    logits = torch.cat(
        [
            (block @ weight.T).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
            for block, ids in zip(hidden.split(32), kept.split(32), strict=True)
        ]
    )
    return logits.new_zeros(len(mask)).index_put(
        (mask.nonzero().squeeze(-1).to(logits.device),), logits
    )
