"""Supervised fine-tuning and distillation: torchrl's losses and ours, with their gradients."""

from __future__ import annotations

import importlib
import string
from collections.abc import Iterator
from typing import Any

import torch

from . import peers
from .bench_grpo_step import SIZES, VOCAB, network, tokenizer, wrapper
from .harness import Case, Run

NEEDS = {peers.TORCHRL, peers.TRANSFORMERS}
DEVICES = {"cpu"}

OP = "SFT and distillation"
SIZE = SIZES["cpu"]


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """SFT alone and with a KL to a reference, and distillation, as torchrl estimates it."""
    losses: dict[str, tuple[str, dict[str, Any]]] = {
        "SFTLoss": ("SFTLoss", {}),
        "SFTLoss, KL to a reference": ("SFTLoss", {"kl_to_ref_coeff": 0.1}),
        "DistillationLoss": ("DistillationLoss", {}),
    }
    data = conversations()
    for title, (name, options) in list(losses.items())[: 1 if quick else None]:
        yield Case(
            op=OP,
            setting=f"{title} + backward: {SIZE.dialogs} conversations, {SIZE.question} + "
            f"{SIZE.answer} tokens, hidden {SIZE.hidden}, V {VOCAB}",
            make_input=data.copy,
            contenders={
                "torchrl": step("torchrl.objectives.llm", name, options),
                "fusedrl": step("fusedrl", name, options),
            },
            answer=lambda loss: loss,
            host_bound=True,
        )


def step(package: str, name: str, options: dict[str, Any]) -> Run:
    """The loss of a batch and its gradients, by the class of a package."""
    model = network(0, SIZE)
    loss = getattr(importlib.import_module(package), name)(
        wrapper(model), tokenizer=tokenizer(), **options
    )

    def run(data: Any) -> torch.Tensor:
        output = loss(data)
        fields = (value for key, value in output.items() if key.startswith("loss_"))
        total = torch.stack([value for value in fields if value is not None]).sum()
        total.backward()
        model.zero_grad()
        return total.detach()

    return run


def conversations() -> Any:
    """Questions that differ, with answers and their log-probs under another model."""
    from tensordict import TensorDict, set_list_to_stack
    from torchrl.data.llm import History
    from torchrl.modules.llm.policies import ChatHistory

    from fusedrl import RetrieveLogProb

    letters = string.ascii_letters
    chats = [
        [
            {"role": "user", "content": (letters[i:] + letters[:i]) * 4},
            {
                "role": "assistant",
                "content": (letters[-i:] + letters[:-i] + letters)[: SIZE.answer],
            },
        ]
        for i in range(SIZE.dialogs)
    ]
    for chat in chats:
        chat[0]["content"] = chat[0]["content"][: SIZE.question]
    with set_list_to_stack(True):
        history = ChatHistory(full=History.from_chats(chats))
        data = TensorDict(history=history, batch_size=len(chats)).to_lazystack(0)
    transform = RetrieveLogProb(wrapper(network(1, SIZE)), assistant_only=True)
    rows = transform(data.copy()).get(("log_probs", "full"), as_list=True)
    column = torch.nested.as_nested_tensor(list(rows), layout=torch.strided)
    for key in ("ref_log_probs", "teacher_log_probs"):
        data = data.set(("next", key, "full"), column)
    return data
