"""Refuse checkpoints that are not complete causal language models.

transformers loads others too and only logs a line: it draws missing weights at random, leaves out
weights that have no place, and loads encoders, which read the tokens that they have to predict. The
log-probs of such a model would look like any others.
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
    """Refuse a checkpoint whose configuration says that it is not a causal language model.

    Raises:
        ScoreError: it is an encoder-decoder, or its head does not predict the next token.
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
        "pass one that AutoModelForCausalLM loads"
    )


def check_complete(role: str, name: str, model: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Refuse weights that do not belong to the model that ``config.json`` describes.

    Args:
        role: ``"policy"`` or ``"reference"``.
        name: the directory or hub name of the model.
        model: the model as loaded.
        loading: what ``from_pretrained(output_loading_info=True)`` says of it.

    Raises:
        ScoreError: a weight is missing, has another shape, or belongs to a layer or expert that
            the model does not have, or transformers left out the quantization. Other weights
            without a place, such as those of a value head, are ignored.
    """
    own = {_kind(key) for key in model.state_dict()}
    further = sorted(key for key in loading["unexpected_keys"] if _kind(key) in own)
    misshapen = sorted(tuple(item) for item in loading["mismatched_keys"])
    missing = sorted(loading["missing_keys"])
    quantization = getattr(model.config, "quantization_config", None)
    if misshapen:
        key, *shapes = misshapen[0]
        found, expected = (tuple(shape) for shape in shapes)
        problem = f"expected {key} of shape {expected}, got {found}"
    elif missing:
        problem = f"{len(missing)} weights are missing, such as {missing[0]}"
    elif further:
        problem = f"{len(further)} weights have no place in the model, such as {further[0]}"
    elif quantization is not None and getattr(model, "hf_quantizer", None) is None:
        problem = f"its quantization is not known to transformers: {quantization}"
    else:
        return
    raise ScoreError(
        f"{role}: the weights of {name!r} do not fit its config.json: {problem}; "
        "save the model again with save_pretrained"
    )


def check_finite(role: str, name: str, model: torch.nn.Module) -> None:
    """Refuse weights that are not finite, as training that diverged leaves them.

    Raises:
        ScoreError: a weight is NaN or infinite.
    """
    for key, weight in model.named_parameters():
        parts = (part.float() for part in weight.detach().flatten().split(1 << 20))
        # A sum reads once, and takes no memory; one that is not finite may only be too large.
        if not all(bool(x.sum().isfinite()) or bool(x.isfinite().all()) for x in parts):
            raise ScoreError(
                f"{role}: expected finite weights, got NaN or infinite ones in {key} of {name!r}; "
                "pass a checkpoint from before the training diverged"
            )


def _kind(key: str) -> str:
    """The name of a parameter without the numbers of its layer and expert."""
    return re.sub(r"\d+", "#", key)


@torch.inference_mode()
def check_causal(role: str, name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of logits of a model, after a trial that shows that the model is causal.

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
            f"{role}: {name!r} computes no logits: {reason(error)}; pass a causal language model"
        ) from error
    before, after = (row[: len(start)].float() for row in logits)
    # The grouping of experts' rows makes small differences; an untrained encoder's are 0.01.
    least = max(1e-3, 8 * torch.finfo(logits[0].dtype).eps)
    if (before - after).abs().max() > least * before.std():
        raise ScoreError(
            f"{role}: expected a causal language model, got one from {name!r} whose logits depend "
            "on the tokens that follow, as an encoder's do; pass a decoder"
        )
    return logits[0].shape[-1]
