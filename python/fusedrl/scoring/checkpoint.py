"""Refuse checkpoints that are not complete causal language models.

transformers loads others with at most a log line: it initialises missing weights at random, ignores
unexpected weights, and loads encoders, which see the tokens that they should predict. The log-probs
of such a model would look plausible.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fusedrl.scoring.errors import ScoreError, reason

_OTHER_HEADS = re.compile(
    r"For\w*(Classification|QuestionAnswering|MultipleChoice|MaskedLM|PreTraining|Prediction)$"
)


def check_kind(role: str, name: str, config: Any) -> None:
    """Refuse a checkpoint whose configuration is not that of a causal language model.

    Raises:
        ScoreError: it is an encoder-decoder, or has another head than a causal LM.
    """
    classes = getattr(config, "architectures", None) or []
    other = [made for made in classes if _OTHER_HEADS.search(made)]
    if getattr(config, "is_encoder_decoder", False):
        got = f"an encoder-decoder ({config.model_type})"
    elif other and len(other) == len(classes):
        got = other[0]
    else:
        return
    raise ScoreError(
        f"{role}: expected a causal language model, got {got} from {name!r}; "
        "pass a model for AutoModelForCausalLM"
    )


def check_complete(role: str, name: str, model: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Refuse weights that do not match ``config.json``.

    Args:
        role: ``"policy"`` or ``"reference"``.
        name: the directory or hub name of the model.
        model: the model as loaded.
        loading: the loading info of ``from_pretrained(output_loading_info=True)``.

    Raises:
        ScoreError: a weight is missing, has another shape, or belongs to a layer or expert that
            the model does not have, or the quantization is not supported. Other unexpected weights,
            such as a value head, are ignored.
    """
    known = {_kind(key) for key in model.state_dict()}
    unexpected = sorted(key for key in loading["unexpected_keys"] if _kind(key) in known)
    misshapen = sorted(tuple(item) for item in loading["mismatched_keys"])
    missing = sorted(loading["missing_keys"])
    quantization = getattr(model.config, "quantization_config", None)
    if misshapen:
        key, *shapes = misshapen[0]
        found, expected = (tuple(shape) for shape in shapes)
        problem = f"expected {key} of shape {expected}, got {found}"
    elif missing:
        problem = f"{len(missing)} weights are missing, such as {missing[0]}"
    elif unexpected:
        problem = f"{len(unexpected)} weights are not in the model, such as {unexpected[0]}"
    elif quantization is not None and getattr(model, "hf_quantizer", None) is None:
        problem = f"transformers does not support its quantization: {quantization}"
    else:
        return
    raise ScoreError(
        f"{role}: the weights of {name!r} do not match its config.json: {problem}; "
        "save the model again with save_pretrained"
    )


def check_finite(role: str, name: str, model: torch.nn.Module) -> None:
    """Refuse weights that are not finite, the result of diverged training.

    Raises:
        ScoreError: a weight is NaN or infinite.
    """
    for key, weight in model.named_parameters():
        parts = (part.float() for part in weight.detach().flatten().split(1 << 20))
        # A sum needs no extra memory; it may overflow, so check the elements if it is not finite.
        if not all(bool(x.sum().isfinite()) or bool(x.isfinite().all()) for x in parts):
            raise ScoreError(
                f"{role}: expected finite weights, got NaN or infinite ones in {key} of {name!r}; "
                "pass a checkpoint from before the training diverged"
            )


def _kind(key: str) -> str:
    """The name of a parameter, with layer and expert numbers replaced."""
    return re.sub(r"\d+", "#", key)


@torch.inference_mode()
def check_causal(role: str, name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Run the model on eight tokens to check that it is causal; returns its number of logits.

    Raises:
        ScoreError: the model fails on eight tokens, or its logits depend on later tokens.
    """
    vocabulary = set(tokenizer.get_vocab().values())
    ids = sorted(vocabulary - set(tokenizer.all_special_ids)) or sorted(vocabulary)
    start, end, other = ([ids[i % len(ids)] for i in range(k, k + 4)] for k in (0, 4, 5))
    try:
        logits = [
            model(input_ids=torch.tensor([row], device=model.device)).logits[0]
            for row in (start + end, start + other)
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ScoreError(
            f"{role}: {name!r} returns no logits: {reason(error)}; pass a causal language model"
        ) from error
    before, after = (row[: len(start)].float() for row in logits)
    # Grouping rows by expert causes small differences; those of an untrained encoder are 0.01.
    least = max(1e-3, 8 * torch.finfo(logits[0].dtype).eps)
    if (before - after).abs().max() > least * before.std():
        raise ScoreError(
            f"{role}: expected a causal language model, got one from {name!r} whose logits depend "
            "on later tokens, such as an encoder; pass a decoder-only model"
        )
    return logits[0].shape[-1]
