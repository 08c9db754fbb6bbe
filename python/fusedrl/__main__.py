"""``python -m fusedrl``."""

from fusedrl.cli import main

raise SystemExit(main())
