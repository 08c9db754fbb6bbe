"""vLLM's connector that keeps keys and values in files, with a way to drop them."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (  # pyright: ignore[reportMissingImports]
    ExampleConnector,
)


class DroppingConnector(ExampleConnector):
    """Forgets its files when it is told to."""

    refuses = ".refuses"

    def reset_cache(self) -> bool:
        """Delete them, unless there is one that says otherwise."""
        folder = Path(self._storage_path)
        if (folder / self.refuses).exists():
            return False
        shutil.rmtree(folder)
        folder.mkdir()
        return True
