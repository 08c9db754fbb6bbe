"""The entry point that makes the channel known to vLLM, called in each of its processes."""

from __future__ import annotations

import logging

from fusedrl.compat.vllm import register_backend
from fusedrl.vllm.engines import BACKEND

logger = logging.getLogger("fusedrl")


def register() -> None:
    """Register ``backend="fusedrl"`` with this process's vLLM; may be called again.

    A vLLM without weight transfer is left alone, so that engines without the backend start. For
    engines with it, vLLM reports an unknown option.
    """
    try:
        register_backend(BACKEND, "fusedrl.vllm.worker", "ChannelWeightTransferEngine")
    except ImportError:
        logger.info(
            "vllm: expected weight transfer (0.31 or later) for backend='fusedrl', got none"
        )
