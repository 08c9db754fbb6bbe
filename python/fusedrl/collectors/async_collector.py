"""torchrl's ``AsyncCollector``: a collector in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl._utils import _get_mp_ctx
from torchrl.collectors._base import BaseCollector
from torchrl.collectors._constants import DEFAULT_EXPLORATION_TYPE
from torchrl.collectors.utils import (
    _maybe_normalize_replay_buffer_tensordict_device,
    split_trajectories,
)
from torchrl.envs.utils import ExplorationType

from fusedrl.channel import WeightHandle
from fusedrl.collectors import inner
from fusedrl.collectors.async_arguments import (
    DEVICES,
    check_arguments,
    collector_options,
    dialog_options,
    environment,
    is_of_dialogs,
    only,
)
from fusedrl.collectors.async_updates import AsyncUpdates, tracker_of
from fusedrl.collectors.plain_batches import Mappings
from fusedrl.collectors.progress import check_progress, progress_bar
from fusedrl.collectors.queues import QueueBuffer
from fusedrl.collectors.sealed import Job, Sealed
from fusedrl.collectors.worker_process import SHUTDOWN_S, WorkerProcess
