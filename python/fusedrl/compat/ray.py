"""What we need of Ray's private names."""

from __future__ import annotations

from fusedrl.compat.library import Library

RAY = Library("ray", tried="2.60.0")
