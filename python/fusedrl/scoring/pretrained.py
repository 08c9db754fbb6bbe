"""Load the policy and its reference, and check that they are complete and share a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateSyntaxError
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
        ScoreError: a model does not load, is not causal, or has other weights than its
            configuration describes; the vocabularies differ; there is no chat template; or the
            device cannot be used.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(device)
    if dtype == "auto" and torch.device(device).type == "cpu":
        dtype = "float32"
    tokenizer = _load(AutoTokenizer, "policy", policy)
    _check_same_vocabulary(tokenizer, _load(AutoTokenizer, "reference", reference))
    if not getattr(tokenizer, "is_fast", False):
        raise ScoreError(
            f"policy: expected a fast tokenizer, which knows where each token lies in the text, "
            f"got {type(tokenizer).__name__}; save a tokenizer.json beside the model"
        )
    _check_template(tokenizer, policy, template)
    models = [
        _model(role, name, device, dtype, tokenizer)
        for role, name in (("policy", policy), ("reference", reference))
    ]
    contexts = [
        getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models
    ]
    context = min((c for c in contexts if c), default=None)
    return ModelPair(models[0], models[1], tokenizer, torch.device(device), context)


def _check_device(device: str) -> None:
    try:
        torch.ones(1, device=device).item()  # Memory that cannot be read, as meta's, does not do.
    except Exception as error:  # Each kind of device has its own.
        raise ScoreError(
            f"device: cannot compute on {device!r}: {reason(error)}; 'cpu' is always there"
        ) from error


def _check_template(tokenizer: PreTrainedTokenizerBase, policy: str, template: str | None) -> None:
    if template is None and not tokenizer.chat_template:
        raise ScoreError(
            f"policy: the tokenizer of {policy!r} has no chat template; pass --chat-template FILE"
        )
    try:
        tokenizer.get_chat_template(template)
        tried = [{"role": "user", "content": ""}]
        tokenizer.apply_chat_template(tried, chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        name = "policy: the chat template" if template is None else "chat_template: the file"
        raise ScoreError(
            f"{name} is no Jinja template: line {error.lineno}: {reason(error)}; correct that line"
        ) from error
    except Exception:
        pass  # it compiles; whether it can render a conversation depends on the conversation


def _model(
    role: str, name: str, device: str, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    check_kind(role, name, _load(AutoConfig, role, name))
    # Missing or misshapen weights would be drawn at random. They are listed instead, and refused.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loading = _load(AutoModelForCausalLM, role, name, dtype=dtype, **options)
    check_complete(role, name, model, loading)
    try:
        model = model.eval().to(device)
        width = check_causal(role, name, model, tokenizer)
    except RuntimeError as error:  # No memory, or a kernel that the device does not have.
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
    return model


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
