"""Load policy and reference, and check that they are complete and share a vocabulary."""

from __future__ import annotations

import re
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

from fusedrl.scoring.checkpoint import check_causal, check_complete, check_finite, check_kind
from fusedrl.scoring.errors import ScoreError, reason

_REMEDY = "pass a directory written by save_pretrained, or a name on the hub"
_BASE = "pass the model that the adapters were trained on, with equal vocabulary size, as --base"


class Source(NamedTuple):
    """A model to load, with the directory of its adapters in ``adapter``, if any."""

    role: str
    model: str
    adapter: str | None = None
    revision: str | None = None  # of the model


class ModelPair(NamedTuple):
    """Two models in evaluation mode on one device; ``context`` is the smaller context length.

    ``classes`` is the number of logits that belong to tokens, if the models have different widths.
    """

    policy: Any
    reference: Any
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    context: int | None
    classes: int | None


def load_pair(
    policy: str,
    reference: str,
    device: str,
    dtype: str,
    template: str | None,
    base: str | None = None,
) -> ModelPair:
    """Load both models and the policy's tokenizer.

    Args:
        policy: directory or hub name of a model, or directory of adapters.
        reference: directory or hub name; its tokenizer must have the policy's vocabulary.
        device: a torch device, or ``"auto"``: CUDA where there is one.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: float32 on the CPU, the
            dtype of the checkpoint elsewhere.
        template: a chat template that replaces the tokenizer's template.
        base: the base model of adapters; ``None`` for the one in their configuration.

    Raises:
        ScoreError: a model does not load or is not a complete causal LM, the vocabularies differ,
            there is no chat template, or the device cannot be used.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device.startswith("cpu"):
        dtype = "float32"
    sources = [_source("policy", policy, base), _source("reference", reference, base)]
    if base is not None and not any(source.adapter for source in sources):
        raise ScoreError("base: expected adapters as policy or reference, got none; leave it out")
    tokenizer, other = map(_tokenizer, sources)
    _check_same_vocabulary(tokenizer, other)
    if template is None and not tokenizer.chat_template:
        raise ScoreError(
            f"policy: the tokenizer of {policy!r} has no chat template; pass --chat-template FILE"
        )
    loaded = [_model(source, device, dtype, tokenizer) for source in sources]
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
        # utf-8-sig: a byte order mark would be rendered at the start of every chat.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScoreError(
            f"chat_template: cannot read {path}: {reason(error)}; pass a Jinja template in UTF-8"
        ) from error
    if not text.strip():
        raise ScoreError(
            f"chat_template: expected a Jinja template, got the empty file {path}; "
            "leave it out for the policy's template"
        )
    return text


def _source(role: str, name: str, base: str | None) -> Source:
    if not Path(name, "adapter_config.json").exists():
        return Source(role, name)
    from peft import PeftConfig

    config = _load(PeftConfig, role, name)
    if config.is_prompt_learning:
        raise ScoreError(
            f"{role}: expected adapters of weights, got {config.peft_type.value} from {name!r}, "
            "which adds virtual tokens and is not supported; use another adapter type"
        )
    if base is not None:
        return Source(role, base, name)
    if not config.base_model_name_or_path:
        raise ScoreError(f"{role}: the adapters in {name!r} have no base model; pass --base MODEL")
    return Source(role, config.base_model_name_or_path, name, config.revision)


def _tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer in the directory of the adapters, if there is one, or else the model's."""
    name, remedy, options = source.adapter or source.model, _REMEDY, {}
    if source.adapter is not None and not Path(source.adapter, "tokenizer_config.json").exists():
        name, remedy, options = source.model, _BASE, {"revision": source.revision}
    tokenizer = _load(AutoTokenizer, source.role, name, remedy, **options)
    # Without a vocabulary file, transformers makes a tokenizer with special tokens only.
    if set(tokenizer.get_vocab()) <= set(tokenizer.added_tokens_encoder):
        raise ScoreError(
            f"{source.role}: expected a tokenizer with a vocabulary in {name!r}, got only special "
            "tokens; save it there with tokenizer.save_pretrained"
        )
    return tokenizer


def _model(
    source: Source, device: str, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, int]:
    role, name, adapter, revision = source
    remedy, revision_option = (_REMEDY, {}) if adapter is None else (_BASE, {"revision": revision})
    check_kind(role, name, _load(AutoConfig, role, name, remedy, **revision_option))
    # Mismatched weights are listed by the loading info, and check_complete refuses them.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **revision_option}
    model, loading = _load(AutoModelForCausalLM, role, name, remedy, dtype=dtype, **options)
    check_complete(role, name, model, loading)
    if adapter is not None:
        model, name = _adapted(role, model, adapter), adapter
    check_finite(role, name, model)
    try:
        model = model.eval().to(device)
        width = check_causal(role, name, model, tokenizer)
    # No such device (an AssertionError in CPU builds), no memory, or no kernel for the dtype.
    except (RuntimeError, AssertionError) as error:
        raise ScoreError(
            f"{role}: {name!r} does not run on {device}: {reason(error)}; "
            "try another --device or --dtype"
        ) from error
    size = 1 + max(tokenizer.get_vocab().values())
    if width < size:
        raise ScoreError(
            f"{role}: expected logits for the {size} tokens of the vocabulary, got {width} from "
            f"{name!r}; resize its embeddings"
        )
    return model, width


def _adapted(role: str, model: PreTrainedModel, name: str) -> Any:
    """Load the adapters of a directory into the model, and check that all their weights match."""
    from peft import PeftConfig, PeftModelForCausalLM

    try:
        adapted = PeftModelForCausalLM(model, PeftConfig.from_pretrained(name))
        loading = adapted.load_adapter(name, "default")
    except Exception as error:  # a mismatched weight, a missing file or layer
        problem = reason(error)
    else:
        # Unexpected weights outside of layers are harmless copies, such as tied embeddings.
        other = [key for key in loading.unexpected_keys if re.search(r"\.\d+\.", key)]
        if not loading.missing_keys and not other:
            return adapted
        problem = f"expected {loading.missing_keys[:1]}, got {other[:1]}"
    raise ScoreError(
        f"{role}: the adapters in {name!r} do not match {model.name_or_path!r}: {problem}; {_BASE}"
    )


def _load(kind: Any, role: str, name: str, remedy: str = _REMEDY, **options: Any) -> Any:
    folder = Path(name)
    # A name on the hub has one slash at most; others would be looked up there, too.
    if not folder.exists() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ScoreError(
            f"{role}: expected a directory, got {name!r}, which is not there; {remedy}"
        )
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # parsers of weights and tokenizers raise many types
        what = {AutoTokenizer: "tokenizer", AutoConfig: "configuration"}.get(kind, "model")
        absent = "" if folder.is_dir() else " (there is no such directory)"
        if checkpoints := sorted(folder.glob("checkpoint-*/"), key=lambda c: (len(c.name), c.name)):
            remedy = f"pass one of its checkpoints, such as {checkpoints[-1]}"
        raise ScoreError(
            f"{role}: cannot load a {what} from {name!r}{absent}: {reason(error)}; {remedy}"
        ) from error


def _check_same_vocabulary(
    policy: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase
) -> None:
    policy_ids, reference_ids = policy.get_vocab(), reference.get_vocab()
    if policy_ids == reference_ids:
        return
    token = min(
        (
            t
            for t in policy_ids.keys() | reference_ids.keys()
            if policy_ids.get(t) != reference_ids.get(t)
        ),
        key=lambda t: (policy_ids.get(t, len(policy_ids)), t),
    )
    raise ScoreError(
        f"reference: expected the policy's vocabulary ({len(policy_ids)} tokens), got another one "
        f"({len(reference_ids)} tokens): the ID of {token!r} is {policy_ids.get(token)} in the "
        f"policy and {reference_ids.get(token)} in the reference; use the model that the policy "
        "was trained from"
    )
