"""The policy and its reference: loaded, and checked to read the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fusedrl.scoring.chats import ScoreError


class ModelPair(NamedTuple):
    """Two models in evaluation mode on one device; ``context`` is the shorter of their contexts."""

    policy: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    context: int | None


def load_pair(
    policy: str, reference: str, device: str, dtype: str, template: str | None
) -> ModelPair:
    """Load both models and the policy's tokenizer.

    Args:
        policy: directory or hub name.
        reference: directory or hub name; its tokenizer must have the policy's vocabulary.
        device: a torch device, or ``"auto"``: CUDA where there is one.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: float32 on the CPU, the
            checkpoint's own elsewhere.
        template: a chat template that replaces the tokenizer's own.

    Raises:
        ScoreError: a model that does not load, two vocabularies, no chat template, no device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise ScoreError(f"device: cannot compute on {device!r}: {why}") from error
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    tokenizer = _load(AutoTokenizer, "policy", policy)
    _check_same_vocabulary(tokenizer, _load(AutoTokenizer, "reference", reference))
    if not tokenizer.is_fast:
        raise ScoreError(
            f"policy: expected a fast tokenizer, which knows where each token lies in the text, "
            f"got {type(tokenizer).__name__}; save a tokenizer.json beside the model"
        )
    if template is None and not tokenizer.chat_template:
        raise ScoreError(
            f"policy: the tokenizer of {policy!r} has no chat template; pass --chat-template FILE"
        )
    models = []
    for role, name in (("policy", policy), ("reference", reference)):
        model = _load(AutoModelForCausalLM, role, name, dtype=dtype).eval().to(device)
        width = model.get_output_embeddings().weight.shape[0]
        if width < len(tokenizer):
            raise ScoreError(
                f"{role}: expected logits for the {len(tokenizer)} tokens of the vocabulary, "
                f"got {width} from {name!r}; resize its embeddings"
            )
        models.append(model)
    contexts = [
        getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models
    ]
    context = min((c for c in contexts if c), default=None)
    return ModelPair(models[0], models[1], tokenizer, torch.device(device), context)


def _load(kind: type, role: str, name: str, **options: str) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        what = "tokenizer" if kind is AutoTokenizer else "model"
        absent = "" if Path(name).is_dir() else " (there is no such directory)"
        raise ScoreError(f"{role}: cannot load a {what} from {name!r}{absent}: {why}") from error


def _check_same_vocabulary(
    policy: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase
) -> None:
    ours, theirs = policy.get_vocab(), reference.get_vocab()
    if ours == theirs:
        return
    token = min(
        (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)),
        key=lambda t: (ours.get(t, len(ours)), t),
    )
    raise ScoreError(
        f"reference: expected the policy's vocabulary ({len(ours)} tokens), got another one "
        f"({len(theirs)} tokens): {token!r} is {ours.get(token)} in the policy's and "
        f"{theirs.get(token)} in the reference's. Log-probs of different tokens cannot be "
        "compared; use the model that the policy was tuned from as the reference"
    )
