"""The console with which ``fusedrl score`` prints."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """A rich console that leaves a pipe that nobody reads to :func:`fusedrl.cli.main`."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich would exit with 1, which is the code of a failed check."""
        raise  # rich calls this while it handles the BrokenPipeError
