"""The loop of a collector whose environment is a pool, where each dialog runs at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, nullcontext
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torch import nn
from torchrl.envs import ProcessorAsyncEnvPool

from fusedrl.channel.ranks import interrupted_later
from fusedrl.collectors.options import DialogOptions, Policy, check_total
from fusedrl.collectors.turns import TurnLoop, call_by_length, ended
from fusedrl.collectors.versions import Versions
from fusedrl.compat import torchrl
from fusedrl.compat.tensordict import copy_of

SLICE_S = 0.05  # within which Ctrl-C takes effect while environments step


class PoolLoop(TurnLoop):
    """Runs the dialogs of an ``AsyncEnvPool``, and takes each turn as soon as it is done.

    If an environment raises, or Ctrl-C breaks off its step, all running dialogs end, and the next
    turn begins new ones. A pool of processes cannot go on then. A dialog that ends is a batch.
    """

    at_once = True

    def __init__(self, env: Any, options: DialogOptions, versions: Versions) -> None:
        super().__init__(env, options, versions)
        self._total = check_total("total_dialog_turns", options.total_dialog_turns)
        self._completed = options.completed
        self._in_processes = isinstance(env, ProcessorAsyncEnvPool)
        self._checked: tuple[Any, Any] = (None, None)  # a follower and a policy
        self._running = False  # whether dialogs do
        self._failed: BaseException | None = None  # what ended a pool of processes
        # The version of each turn that an environment steps; nothing is carried meanwhile.
        self._asked: dict[int, Any] = {}
        # Dialogs that wait because the rest of the budget may be used up by others.
        self._waiting: dict[int, TensorDictBase] = {}

    def _check(self, env: Any, options: DialogOptions) -> None:
        # torchrl 0.14.1 looks up the environment of a tensordict in the flattened list of indices,
        # in which one of several rows has several: it steps some twice and others never.
        sizes = [tuple(size) for size in env.env_batch_sizes if size.numel() > 1]
        if sizes:
            raise ValueError(
                f"env: expected a pool of environments with one dialog each, got batch_size="
                f"{sizes[0]}; give AsyncEnvPool an environment for each dialog"
            )

    def batch(self, policy: Policy, check: Callable[[], None]) -> TensorDictBase:
        """As for :class:`TurnLoop`; the policy is called for some while other environments step.

        Where environments compute with the policy, updates wait for them; weights of a channel,
        which nobody waits for, are a ``ValueError``.
        """
        follower = self._versions.follower
        if self._checked != (follower, policy):
            scoring = self._scoring(policy if follower is None else follower.module)
            if scoring and follower is not None:
                raise ValueError(
                    "env: expected environments of a pool that leave the policy alone, whose "
                    f"weights change while they step, got a {type(scoring[0]).__name__} that "
                    "computes with it; score with a model of its own, or outside of a pool"
                )
            if scoring:
                self._versions.settle = self._wait
            self._checked = follower, policy
        return super().batch(policy, check)

    def _scoring(self, policy: Any) -> list[Any]:
        """The parts of environments that compute with the policy; processes cannot reach it."""
        own = {
            id(parameter)
            for module in (policy, getattr(policy, "model", None))
            if isinstance(module, nn.Module)
            for parameter in module.parameters()
        }
        return [
            part
            for env in getattr(self.env, "envs", ())
            for part in env.modules()
            if getattr(part, "takes_policy", False)
            or torchrl.will_take_policy(part)
            or any(id(parameter) in own for parameter in part.parameters(recurse=False))
        ]

    @contextmanager
    def _pool(self) -> Iterator[None]:
        """Use the pool in this block; if it is broken off, the dialogs end."""
        if self._failed is not None:
            raise RuntimeError(
                "env: expected a pool whose environments run, got one of processes where one has "
                "failed (see the cause); make another pool and another collector"
            ) from self._failed
        self._running = False
        try:
            yield
        except BaseException as error:
            if self._in_processes:
                self._failed = error
            raise
        self._running = True

    def _wait(self, seconds: float = float("inf"), least: int | None = None) -> bool:
        """Wait for the end of steps in threads, of all or so many; returns whether they ended."""
        steps, deadline = torchrl.steps_under_way(self.env), time.monotonic() + seconds
        running, most = set(steps), 0 if least is None else max(len(steps) - least, 0)
        while len(running) > most and time.monotonic() < deadline:
            with interrupted_later():
                running = wait(running, SLICE_S, FIRST_COMPLETED).not_done
        return len(running) <= most

    def _receive(self, receive: Callable[[int], Any], least: int) -> Any:
        """What so many environments return. Ctrl-C breaks the wait off, not what comes after it."""
        self._wait(least=least)
        # A pool of threads takes locks that their steps need to end.
        with nullcontext() if self._in_processes else interrupted_later():
            return receive(least)

    def _turn(self, policy: Policy) -> None:
        """Take turns that are done, and ask for the next of their dialogs."""
        if not self._running:
            self.restart()
            with self._pool():
                with interrupted_later():
                    torchrl.begin_resets(self.env)
                self._begin(self._receive(self.env.async_reset_recv, self.env.num_envs))
        if self._carried is not None:
            self._ask(policy)
        self._take(policy)

    def _ask(self, policy: Policy) -> None:
        """Call the policy, and let the environments take their step."""
        indices = torchrl.env_indices(self.env, self._carried)
        with self._versions.call() as version:
            # The policy is called again, and may write there, while the environments step.
            answers = copy_of(call_by_length(policy, self._carried))
            with interrupted_later(), self._pool():  # all of them step, or none
                self.env.async_step_and_maybe_reset_send(answers)
                self._asked.update(dict.fromkeys(indices, version))
                self._carried = None  # only now, so that a policy that raises is called again

    def _take(self, policy: Policy) -> None:
        """Wait for the first environments that have stepped, and keep their turns."""
        least = self.env.min_get if self._completed else self.env.num_envs
        least = min(least, len(self._asked))  # fewer dialogs run once the budget is used up
        with self._pool():
            turn, self._carried = self._receive(self.env.async_step_and_maybe_reset_recv, least)
            indices = torchrl.env_indices(self.env, turn)
            rows = [
                self._own(row, self._asked.pop(index), self._ids[index])
                for index, row in zip(indices, turn.unbind(0), strict=True)
            ]
            self._keep(lazy_stack(rows), ended(turn), indices)
            goes_on = self._ran < self._total
            if self._completed and not goes_on:
                self._hold(indices)
        if self._completed and goes_on:
            self._ask(policy)

    def _hold(self, indices: list[int]) -> None:
        """Near the end of the budget, run only the dialogs that can use it, the longest first."""
        self._waiting.update(zip(indices, self._carried.unbind(0), strict=True))
        self._carried = None
        if not self._asked:
            batches: Any = self._batches
            longest = max(self._waiting, key=batches.length)
            self._carried = lazy_stack([self._waiting.pop(longest)])

    def restart(self, finished: bool = False) -> None:
        """As for :class:`TurnLoop`; waits for environments that step."""
        self._wait()
        if not torchrl.forget_steps(self.env) and self._asked:
            with self._pool():
                self._receive(self.env.async_step_and_maybe_reset_recv, len(self._asked))
        self._ran += len(self._asked)
        self._asked, self._waiting, self._running = {}, {}, False
        super().restart(finished)
