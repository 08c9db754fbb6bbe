"""What Ray's workers import in the tests."""

from __future__ import annotations

from typing import Any

import ray
import ray_dialogs  # noqa: F401
import ray_models  # noqa: F401
import torchrl.objectives.llm  # noqa: F401

title: Any = ray._raylet  # type: ignore[attr-defined]
title.setproctitle("ray forks")  # remembers where the environment lies, before it is replaced
