"""Lets a queue take the place of a replay buffer."""

from __future__ import annotations

import logging
import queue
from typing import Any

from tensordict import TensorDictBase

logger = logging.getLogger("fusedrl")


class QueueBuffer:
    """Puts each element of a batch into a bounded queue, which drops its oldest when it is full.

    Args:
        queue: a queue with ``put_nowait`` and ``get_nowait`` like those of :class:`queue.Queue`,
            such as a queue of multiprocessing or of Ray.
    """

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.dropped = 0

    def extend(self, batch: TensorDictBase) -> None:
        """Put the elements along the first dimension, in order."""
        for turn in batch.unbind(0):
            while True:
                try:
                    self.queue.put_nowait(turn)
                    break
                except queue.Full:  # Ray's error is a subclass
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self.queue.get_nowait()
        except queue.Empty:  # a reader has taken it first
            return
        self.dropped += 1
        if self.dropped == 1:
            logger.warning(
                "LLMCollector: the queue is full, its oldest turns are dropped; read faster, or "
                "make it larger (this is said once, QueueBuffer.dropped counts)"
            )
