"""How a vLLM engine finds the weight channel: an entry point that each of its processes calls."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
from typing import Any

from fusedrl.compat.vllm import register_backend
from fusedrl.vllm.engines import BACKEND

# The oldest vLLM whose interface the transfer engine implements. Before 0.31, `receive_weights` and
# `start_weight_update` have other signatures.
OLDEST = (0, 31)

logger = logging.getLogger("fusedrl")


def register() -> None:
    """Make ``backend="fusedrl"`` known to this process's vLLM; may be called again.

    A vLLM without weight transfer is left alone, so that engines start which do not ask for the
    backend. To those that do, vLLM says that there is no such option.
    """
    try:
        register_backend(BACKEND, __name__, transfer_engine.__name__)
    except ImportError:
        logger.info(
            "vllm: expected weight transfer (0.31 or later) for backend='fusedrl', got none"
        )


def transfer_engine(*arguments: Any, **named: Any) -> Any:
    """Make a worker's end of a channel, with the arguments that vLLM passes.

    Raises:
        RuntimeError: this version of vLLM passes other arguments.
    """
    from vllm import __version__ as version

    check_version(version)
    # This import fails with older versions of vLLM.
    from fusedrl.vllm.transfer_engine import ChannelWeightTransferEngine

    return ChannelWeightTransferEngine(*arguments, **named)


def check_version(version: str) -> None:
    """Raise ``RuntimeError`` unless a version of vLLM is one that the backend works with."""
    numbers = version.split(".")
    try:
        release = int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        return  # a build of a branch, which says nothing
    if release < OLDEST:
        raise RuntimeError(
            f"vllm: expected 0.31 or 0.32 for backend='fusedrl', got {version}; upgrade vLLM"
        )
