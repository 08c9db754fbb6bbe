"""Load the policy and its reference, and check that they are complete and share a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fusedrl.scoring.checkpoint import check_causal, check_complete, check_kind
from fusedrl.scoring.errors import ScoreError, reason


class ModelPair(NamedTuple):
    """Two models in evaluation mode on one device; ``context`` is the shorter of their contexts.

    ``classes`` is how many of their logits are of tokens, where they have other numbers of them.
    """

    policy: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    context: int | None
    classes: int | None


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
        ScoreError: a model does not load, is not causal, or has other weights than its
            configuration describes; the vocabularies differ; there is no chat template; or the
            device cannot be used.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device.startswith("cpu"):
        dtype = "float32"
    tokenizer = _load(AutoTokenizer, "policy", policy)
    _check_same_vocabulary(tokenizer, _load(AutoTokenizer, "reference", reference))
    if template is None and not tokenizer.chat_template:
        raise ScoreError(
            f"policy: the tokenizer of {policy!r} has no chat template; pass --chat-template FILE"
        )
    loaded = [
        _model(role, name, device, dtype, tokenizer)
        for role, name in (("policy", policy), ("reference", reference))
    ]
    models, widths = [model for model, _ in loaded], {width for _, width in loaded}
    contexts = [
        getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models
    ]
    context = min((c for c in contexts if c), default=None)
    classes = None if len(widths) == 1 else 1 + max(tokenizer.get_vocab().values())
    return ModelPair(models[0], models[1], tokenizer, torch.device(device), context, classes)


def read_template(path: Path | None) -> str | None:
    """The text of a chat template; ``None`` without a path.

    Raises:
        ScoreError: the file cannot be read, is not UTF-8, or is empty.
    """
    if path is None:
        return None
    try:
        # A byte order mark would be rendered at the start of every chat, so it is dropped.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScoreError(
            f"chat_template: cannot read {path}: {reason(error)}; pass a Jinja template in UTF-8"
        ) from error
    if not text.strip():
        raise ScoreError(
            f"chat_template: expected a Jinja template, got the empty file {path}; "
            "leave it out for the policy's own"
        )
    return text


def _model(
    role: str, name: str, device: str, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, int]:
    check_kind(role, name, _load(AutoConfig, role, name))
    # Missing or misshapen weights would be drawn at random. They are listed instead, and refused.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loading = _load(AutoModelForCausalLM, role, name, dtype=dtype, **options)
    check_complete(role, name, model, loading)
    try:
        model = model.eval().to(device)
        width = check_causal(role, name, model, tokenizer)
    # No such device, which a CPU build asserts; no memory; or no such kernel for the device.
    except (RuntimeError, AssertionError) as error:
        raise ScoreError(
            f"{role}: {name!r} cannot compute on {device}: {reason(error)}; "
            "try another --device or --dtype"
        ) from error
    size = 1 + max(tokenizer.get_vocab().values())
    if width < size:
        raise ScoreError(
            f"{role}: expected logits for the {size} tokens of the vocabulary, got {width} from "
            f"{name!r}; resize its embeddings"
        )
    return model, width


def _load(kind: Any, role: str, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # the parsers of weights and tokenizers raise many types
        what = {AutoTokenizer: "tokenizer", AutoConfig: "configuration"}.get(kind, "model")
        absent = "" if Path(name).is_dir() else " (there is no such directory)"
        raise ScoreError(
            f"{role}: cannot load a {what} from {name!r}{absent}: {reason(error)}; "
            "pass a directory that save_pretrained wrote, or a name on the hub"
        ) from error


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
