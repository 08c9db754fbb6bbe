"""The options of a scoring job; does not import torch or transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedrl.scoring.errors import ScoreError

ESTIMATORS = ("k1", "k3")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# The arguments of transformers' apply_chat_template, which are no variables of a template.
_RESERVED = {
    *("messages", "conversation", "add_generation_prompt", "tokenize", "chat_template"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
TEMPERATURES = (1e-30, 1e30)  # the range of the ops


@dataclass(frozen=True)
class Settings:
    """The options of ``fusedrl score``; see ``fusedrl score --help``.

    Raises:
        ScoreError: a value is out of its range.

    Example:
        >>> from fusedrl.scoring import Settings
        >>> Settings(estimator="k1", limit=100).temperature
        1.0
    """

    base: str | None = None
    estimator: str | None = None
    forward_kl: bool = False
    temperature: float = 1.0
    device: str = "auto"
    dtype: str = "auto"
    max_tokens_per_batch: int | None = None
    chat_template: Path | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    limit: int | None = None
    report_chats: int = 50
    rollout_bound: float = 2.0
    strict: bool = False

    def __post_init__(self) -> None:
        """Validate the options, before anything is loaded."""
        for name, known in (("estimator", (None, *ESTIMATORS)), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ScoreError(
                    f"{name}: expected one of {', '.join(map(str, known))}, got "
                    f"{getattr(self, name)!r}; "
                    f"leave it out for {getattr(type(self), name)!r}"
                )
        if taken := _RESERVED & self.chat_template_kwargs.keys():
            raise ScoreError(
                f"chat_template_kwargs: expected variables of the template, got {sorted(taken)}, "
                "which scoring sets; leave them out"
            )
        low, high = TEMPERATURES
        if not low <= self.temperature <= high:
            raise ScoreError(
                f"temperature: expected from {low:g} to {high:g}, got {self.temperature!r}; "
                "1.0 leaves the logits as they are"
            )
        if not 0 < self.rollout_bound <= TEMPERATURES[1]:
            raise ScoreError(
                f"rollout_bound: expected a number above 0, got {self.rollout_bound!r}; "
                "2.0 is usual"
            )
        for name in ("max_tokens_per_batch", "context", "limit", "report_chats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScoreError(
                    f"{name}: expected at least 1, got {value!r}; leave it out for the default"
                )
