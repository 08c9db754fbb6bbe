"""What the tests of collectors share: the dialogs of ``tests/transforms``, and one thread."""

from __future__ import annotations

from one_thread import one_thread
from transforms.conftest import (
    _torchrl_conventions,
    chat_env,
    generating_policy,
    policy,
    policy_model,
    reference,
    reference_model,
    tokenizer,
    wrap,
)

__all__ = [
    "_torchrl_conventions",
    "chat_env",
    "generating_policy",
    "one_thread",
    "policy",
    "policy_model",
    "reference",
    "reference_model",
    "tokenizer",
    "wrap",
]
