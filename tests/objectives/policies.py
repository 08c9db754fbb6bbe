"""Tiny policies, batches of their answers in every representation, and losses of both kinds."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from chat_templates import CHATML, with_markers
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import grpo as torchrl_grpo
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import fusedrl
from fusedrl.demo.models import make_tokenizer

ANSWERS = ["I am well, thank you!", "Paris.", "4"]
QUESTIONS = ["How are you?", "And the capital of France?", "2 + 2?"]
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
]
CHATS[0] = CHATS[0] + CHATS[1]  # of two turns
NAMES = ("GRPOLoss", "CISPOLoss", "DAPO")
OUTPUTS = (
    *("loss_objective", "clip_fraction", "kl_approx", "ESS", "entropy", "loss_entropy"),
    *("loss_kl_to_ref", "kl_to_ref", "loss_kl_to_inference", "kl_to_inference"),
)
# How a batch may lie in a tensordict, by what the actor reads, and whether the actor pads.
STACK, PADDED = ("tokens", "stack", False), ("tokens", "padded", True)
FORMS = [
    ("history", "stack", False),
    ("history", "stack", True),
    PADDED,
    STACK,
    ("text", "stack", False),
]
RLHF: dict[str, Any] = {"masking_strategy": "rlhf", "kl_to_ref_coeff": 0.1}
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


@cache
def tokenizer() -> Any:
    made = make_tokenizer([*QUESTIONS, *ANSWERS] * 3, size=320)
    made.chat_template = with_markers(CHATML)
    return made


def model_of(kind: str = "qwen2", **options: Any) -> Any:
    """A random model with a wide spread of logits."""
    sizes = {"vocab_size": len(tokenizer()), **_SIZES, **options}
    torch.manual_seed(3)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()


def actor_of(model: Any, form: tuple[str, str, bool], **options: Any) -> TransformersWrapper:
    mode, _, pad_output = form
    options = {"input_mode": mode, "pad_output": pad_output, **options}
    return TransformersWrapper(
        model, tokenizer=tokenizer(), generate=False, return_log_probs=True, **options
    )


class Row(NamedTuple):
    """One sample: tokens, masks, and log-probs of other policies."""

    text: str
    history: History
    tokens: Tensor
    assistant: Tensor
    old: Tensor
    ref: Tensor
    prompt: int


@cache
def rows(even: bool = False) -> list[Row]:
    """Chats with log-probs near those of a policy, so that some ratios are clipped.

    ``even``: of one length, that of the longest.
    """
    chats = [CHATS[0]] * 3 if even else CHATS
    histories = [History.from_chats([chat])[0] for chat in chats]
    data = TensorDict(history=ChatHistory(full=lazy_stack(histories)), batch_size=len(chats))
    with torch.no_grad(), set_list_to_stack(True):
        scored = actor_of(model_of(), ("history", "stack", False))(data.to_lazystack(0))
    texts = tokenizer().apply_chat_template(chats, tokenize=False)
    columns = (
        scored.get(key, as_list=True)
        for key in (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full"))
    )
    generator = torch.Generator().manual_seed(0)
    made = []
    for text, history, tokens, mask, own in zip(texts, histories, *columns, strict=True):
        old = own + 0.3 * torch.randn(len(own), generator=generator)
        ref = own + 0.5 * torch.randn(len(own), generator=generator)
        old[3] = torch.nan  # an alignment pad
        prompt = int(mask.nonzero()[0])
        old[prompt + 1] = torch.nan  # a missing one among those that count
        made.append(Row(text, history, tokens, mask.bool(), old, ref, prompt))
    return made


def batch_of(
    form: tuple[str, str, bool],
    chats: list[Row] | None = None,
    *,
    prompts: bool = True,
    per_token: bool = False,
) -> TensorDictBase:
    """Chats in a representation, with all that a loss reads."""
    mode, layout, _ = form
    chats = rows() if chats is None else chats
    with set_list_to_stack(True):
        data = _padded(chats) if layout == "padded" else _stack(chats, prompts)
        if mode == "history":
            data["history"] = ChatHistory(full=lazy_stack([row.history for row in chats]))
        elif mode == "text":
            data["text", "full"] = NonTensorStack(*(row.text for row in chats))
    width = max(len(row.tokens) for row in chats)
    if layout == "padded":
        width = data["tokens", "full"].shape[1]
    advantages = torch.randn(
        len(chats), width if per_token else 1, 1, generator=torch.Generator().manual_seed(1)
    )
    data["advantage"] = advantages
    return data


def _stack(chats: list[Row], prompts: bool) -> TensorDictBase:
    samples = []
    for row in chats:
        sample = {
            "tokens": {"full": row.tokens},
            "masks": {
                "all_attention_mask": torch.ones_like(row.assistant),
                "all_assistant_mask": row.assistant,
            },
            "log_probs": {"full": row.old},
            "next": {"ref_log_probs": {"full": row.ref}},
        }
        if prompts:
            sample["tokens"]["prompt"] = row.tokens[: row.prompt]
        samples.append(TensorDict(sample))
    return lazy_stack(samples)


def _padded(chats: list[Row]) -> TensorDictBase:
    """As a policy that pads writes them: prompts end in one column, answers begin in the next."""
    width = max(row.prompt for row in chats)
    answers = max(len(row.tokens) - row.prompt for row in chats)

    def column(values: list[Tensor], fill: Any) -> Tensor:
        before = [v[: row.prompt] for v, row in zip(values, chats, strict=True)]
        behind = [v[row.prompt :] for v, row in zip(values, chats, strict=True)]
        left = pad_sequence(before, True, fill, "left")
        right = pad_sequence(behind, True, fill, "right")
        assert left.shape[1] == width and right.shape[1] == answers
        return torch.cat((left, right), 1)

    pad = tokenizer().pad_token_id
    full = column([row.tokens for row in chats], pad)
    return TensorDict(
        tokens=TensorDict(full=full, prompt=full[:, :width]),
        masks=TensorDict(
            all_attention_mask=column([torch.ones_like(r.assistant) for r in chats], False),
            all_assistant_mask=column([row.assistant for row in chats], False),
        ),
        log_probs=TensorDict(full=column([row.old for row in chats], 0.0)),
        next=TensorDict(ref_log_probs=TensorDict(full=column([row.ref for row in chats], 0.0))),
        batch_size=len(chats),
    )


class Answer(NamedTuple):
    """What a loss gives: its outputs and the gradient of each parameter."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]
    kind: type


def answer_of(loss: Any, data: TensorDictBase, factors: dict[str, float] | None = None) -> Answer:
    """The outputs of a loss, and the gradients of its terms weighed by ``factors``."""
    loss.zero_grad()
    with set_list_to_stack(True):
        output = loss(data)
    outputs = {name: getattr(output, name) for name in OUTPUTS}
    outputs = {name: value for name, value in outputs.items() if value is not None}
    total = torch.zeros(())
    for name, value in outputs.items():
        if name.startswith("loss_") and (factors is None or factors.get(name, 0)):
            weights = torch.linspace(1, 2, value.numel()).view(value.shape)  # differ, where several
            total = total + (1 if factors is None else factors[name]) * (value * weights).sum()
    total.backward()
    grads = {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}
    return Answer({n: v.detach() for n, v in outputs.items()}, grads, type(output))


def losses_of(name: str, model: Any, form: tuple[str, str, bool], **options: Any) -> list[Any]:
    """Ours, torchrl's, and torchrl's in float64, of models of the same weights."""
    kinds = (getattr(fusedrl, name), *[getattr(torchrl_grpo, name)] * 2)
    models = (model, copy.deepcopy(model), copy.deepcopy(model).double())
    return [kind(actor_of(m, form), **options) for kind, m in zip(kinds, models, strict=True)]


def assert_same(ours: Answer, theirs: Answer, truth: Answer) -> None:
    """Ours is as near to float64 as torchrl's, but for sums in another order.

    A value goes through sums of a few thousand terms, each of which may round by an epsilon of the
    largest; the errors of two orders differ by about the root of their number.
    """
    assert ours.kind is theirs.kind
    columns = ((answer.outputs, answer.grads) for answer in (ours, theirs, truth))
    for mine, other, exact in zip(*columns, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value.shape == other[name].shape and value.dtype == other[name].dtype, name
            size = exact[name].abs().max().item()
            error = (value.double() - exact[name]).abs().max().item()
            allowed = 4 * (other[name].double() - exact[name]).abs().max().item()
            allowed += 64 * torch.finfo(torch.float32).eps * max(size, 1e-3)
            assert error <= allowed, f"{name}: {error:.3g} of {size:.3g}, allowed {allowed:.3g}"
