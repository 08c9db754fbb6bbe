"""What we need of peft's private names."""

from __future__ import annotations

from fusedrl.compat.library import Library

PEFT = Library("peft", tried="0.21.2")

# What a layer with adapters computes changes with these.
ADAPTER_SWITCHES = PEFT.names(
    "peft.tuners.tuners_utils:BaseTunerLayer",
    ("_disable_adapters", "_active_adapter"),
    "log-probs have to follow which adapters are on",
)
