"""Processes that start at once, and have nothing of the test's own process.

Those that are spawned import for seconds; these are forks of one that has imported and done
nothing.
"""

from __future__ import annotations

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "fusedrl.channel",
        "fusedrl.collectors",
        "torchrl.modules.llm",
        "torchrl.testing.mocking_classes",
        "transformers.models.qwen2.modeling_qwen2",
    ]
)
