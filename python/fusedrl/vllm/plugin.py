"""How a vLLM engine finds the weight channel: an entry point that each of its processes calls."""

from __future__ import annotations

import logging

from fusedrl.compat.vllm import register_backend
from fusedrl.vllm.engines import BACKEND

logger = logging.getLogger("fusedrl")


def register() -> None:
    """Make ``backend="fusedrl"`` known to this process's vLLM; may be called again.

    A vLLM without weight transfer is left alone, so that engines start which do not ask for the
    backend. To those that do, vLLM says that there is no such option.
    """
    try:
        register_backend(BACKEND, "fusedrl.vllm.worker", "ChannelWeightTransferEngine")
    except ImportError:
        logger.info(
            "vllm: expected weight transfer (0.31 or later) for backend='fusedrl', got none"
        )
