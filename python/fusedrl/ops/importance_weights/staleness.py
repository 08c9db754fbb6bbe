"""Which tokens are older than a bound, by the versions of the weights that generated them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedrl.ops import _dispatch


def oldest_allowed(policy_version: Any, max_token_staleness: Any) -> int:
    """The oldest version that counts; a token without one, -1, never does."""
    for name, value, meaning in (
        ("policy_version", policy_version, "the version that trains"),
        ("max_token_staleness", max_token_staleness, "how many versions a token may be behind"),
    ):
        if isinstance(value, str):
            raise TypeError(
                f"{name}: expected an integer, got {value!r}: UUIDs have no age; count versions "
                "with PolicyVersion(version_type='int')"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"{name}: expected an integer >= 0 with max_token_staleness, got {value!r}; pass "
                f"{meaning}"
            )
    return max(policy_version - max_token_staleness, 0)


def check_versions(versions: Any) -> None:
    """Refuse what is no tensor of integers, such as UUIDs."""
    if not isinstance(versions, Tensor):
        raise TypeError(
            f"token_policy_version: expected a tensor of integers, got {_dispatch.kind(versions)}; "
            "count versions with PolicyVersion(version_type='int'), as UUIDs have no age"
        )
    if versions.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"token_policy_version: expected torch.int64, got {versions.dtype}; convert it with "
            ".long()"
        )
