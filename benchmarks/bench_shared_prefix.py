"""Answers to one prompt: the prompt computed once, beside once for each answer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from . import peers
from .harness import Case, Run

NEEDS = {peers.TORCHRL, peers.TRANSFORMERS}

OP = "Shared prefix"
VOCAB, HIDDEN, LAYERS = 32000, 512, 8
# Answers, tokens of the prompt and of each answer, least speed-up of the forward pass and of a
# step with gradients.
SETTINGS = (
    (8, 1024, 256, 2.7, 3.0),
    (8, 256, 256, None, None),
    (8, 512, 128, None, None),
    (2, 1024, 256, None, None),
    (16, 1024, 64, None, None),
    (8, 0, 256, None, None),  # nothing is shared
)
# Of the plot, log-probs alone: answers of so many tokens, their numbers, and tokens of the prompt.
GRID = f"{OP}, by answers and prompt"
GRID_ANSWER, GRID_ANSWERS, GRID_PROMPTS = 64, (2, 4, 8), (64, 256, 1024)
MEMORY = 0.5  # of the peak of a step without sharing


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Log-probs, then the loss of GRPO with its gradients."""
    settings = ((4, 256, 64, None, None),) if quick else SETTINGS
    for answers, prompt, answer, least, least_step in settings:
        data = Answers(answers, prompt, answer, device)
        yield Case(
            op=OP,
            setting=f"log-probs: {data}",
            make_input=lambda: None,
            contenders={"unshared": data.log_probs(False), "fusedrl": data.log_probs(True)},
            truth=data.truth,
            goals={"unshared": least} if least else {},
        )
        yield Case(
            op=OP,
            setting=f"GRPOLoss + backward: {data}",
            make_input=lambda: None,
            contenders={"unshared": data.step(False), "fusedrl": data.step(True)},
            goals={"unshared": least_step} if least_step else {},
        )
    if quick:
        return
    for answers, prompt in product(GRID_ANSWERS, GRID_PROMPTS):
        data = Answers(answers, prompt, GRID_ANSWER, device)
        yield Case(
            op=GRID,
            setting=str(data),
            make_input=lambda: None,
            contenders={"unshared": data.log_probs(False), "fusedrl": data.log_probs(True)},
        )


@cache
def model(device: str) -> Any:
    """A random Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64,
        max_position_embeddings=2048,
    )
    return Qwen2ForCausalLM(config).eval().to(device)


class Answers:
    """Random answers to a random prompt, in one batch."""

    def __init__(self, answers: int, prompt: int, answer: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        first = torch.randint(0, VOCAB, (prompt,), generator=generator).expand(answers, prompt)
        own = torch.randint(0, VOCAB, (answers, answer), generator=generator)
        self.tokens = torch.cat((first, own), 1).to(device)
        self.mask = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.mask[:, prompt:] = True
        self.prompt, self.model = prompt, model(device)

    def __str__(self) -> str:
        """What the settings of benchmarks say of them."""
        answers, length = self.tokens.shape
        answer = length - self.prompt
        return f"{answers} answers, {self.prompt} + {answer} tokens, hidden {HIDDEN} x {LAYERS}"

    def log_probs(self, share: bool) -> Run:
        """The log-probs of the answers, 0 for the prompts."""
        from fusedrl.models import causal_log_probs

        packed = self.tokens.flatten(), [self.tokens.shape[1]] * len(self.tokens)

        @torch.no_grad()
        def run(_: Any) -> Any:
            mask = self.mask.flatten()
            return causal_log_probs(self.model, *packed, mask, share_prefixes=share).log_probs

        return run

    @torch.no_grad()
    def truth(self, _: Any) -> Tensor:
        """The same from all logits of each sequence alone, in float64."""
        network = copy.deepcopy(self.model).double()
        rows = []
        for row, mask in zip(self.tokens, self.mask, strict=True):
            scores = network(row[None]).logits[0, :-1].log_softmax(-1)
            picked = scores.gather(-1, row[1:, None]).squeeze(-1)
            rows.append(torch.cat((picked.new_zeros(1), picked)) * mask)
        return torch.cat(rows)

    def step(self, share: bool) -> Run:
        """A step of GRPO without its optimizer."""
        from tensordict import TensorDict
        from torchrl.modules.llm import TransformersWrapper

        from fusedrl import GRPOLoss
        from fusedrl.demo.models import make_tokenizer

        rows = len(self.tokens)
        data = TensorDict(
            tokens=TensorDict(full=self.tokens, prompt=self.tokens[:, : self.prompt]),
            masks=TensorDict(all_attention_mask=torch.ones_like(self.mask)),
            log_probs=TensorDict(full=torch.where(self.mask, -10.0, torch.nan)),
            advantage=torch.linspace(-1, 1, rows, device=self.tokens.device).view(rows, 1, 1),
            batch_size=rows,
        )
        actor = TransformersWrapper(
            self.model,
            tokenizer=make_tokenizer(["a"]),
            input_mode="tokens",
            generate=False,
            return_log_probs=True,
            pad_output=True,
        )
        loss: Any = GRPOLoss(actor, entropy_coeff=0.01, share_prefixes=share)

        def run(_: Any) -> None:
            output = loss(data.copy())
            (output.loss_objective + output.loss_entropy).backward()
            self.model.zero_grad()

        return run
