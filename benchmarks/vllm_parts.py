"""Where a vLLM worker's part of an update goes: `python -m benchmarks.vllm_parts`.

Prints, in milliseconds, the median of each part over the updates, and of a plain copy of the same
bytes in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from typing import Any

import torch

from .bench_vllm import LAYERS, MEMORY, engine, qwen2

UPDATES = 20


def parts(worker: Any) -> dict[str, float]:
    """The seconds of each part of one load, in the worker's process.

    Args:
        worker: of an engine that has loaded a version of its channel.
    """
    import time

    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
        layerwise,
    )

    taken = dict.fromkeys(("initialize", "pack", "place", "load", "finalize", "copy"), 0.0)

    def timed(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken[name] += time.perf_counter() - start

        return run

    transfer = worker.weight_transfer_engine
    model, config = transfer.model, transfer.vllm_config.model_config
    methods = {type(m.quant_method) for m in model.modules() if hasattr(m, "quant_method")}
    former = {kind: kind.process_weights_after_loading for kind in methods}
    place = layerwise._copy_and_restore_kernel_tensors
    for kind, method in former.items():
        kind.process_weights_after_loading = timed("pack", method)
    layerwise._copy_and_restore_kernel_tensors = timed("place", place)
    try:
        reader = transfer._reader
        with reader.lease() as lease:
            views = lease.views
            weights = [(name, views[i]) for name, i in reader.layout.view_of.items()]
            copies = [torch.empty_like(view) for view in views]
            timed("initialize", layerwise.initialize_layerwise_reload)(model)
            timed("load", model.load_weights)(weights)
            timed("finalize", layerwise.finalize_layerwise_reload)(model, config)
            torch._foreach_copy_(copies, views)  # touches the pages
            timed("copy", torch._foreach_copy_)(copies, views)
    finally:
        layerwise._copy_and_restore_kernel_tensors = place
        for kind, method in former.items():
            kind.process_weights_after_loading = method
    taken["load"] -= taken["pack"] + taken["place"]
    return taken


def measure(dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of each part, the medians of ``UPDATES`` updates."""
    from fusedrl import WeightChannel
    from fusedrl.vllm import EngineWeights

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        model = qwen2(folder, dtype, LAYERS)
        with engine(folder, dtype) as llm, WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, llm)
            weights.update()
            [first] = llm.collective_rpc(parts)
            found = [llm.collective_rpc(parts)[0] for _ in range(UPDATES)]
    return {name: 1e3 * statistics.median(one[name] for one in found) for name in first}


def main() -> None:
    """Measure, and print a line of JSON for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="torch's CPU threads (default: 2)")
    torch.set_num_threads(parser.parse_args().threads)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to run parts() in the worker
    for dtype in (torch.bfloat16, torch.float32):
        figures = {name: round(value, 1) for name, value in measure(dtype).items()}
        print(json.dumps({"dtype": str(dtype), "load average": os.getloadavg()[0], **figures}))


if __name__ == "__main__":
    main()
