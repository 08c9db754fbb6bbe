"""What commands print tables with."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's, which leaves a pipe that nobody reads to :func:`fusedrl.cli.main`."""

    def on_broken_pipe(self) -> None:
        """Raise it again; rich would end the process with 1, the code of a failed check."""
        raise  # rich calls this where it has caught a BrokenPipeError
