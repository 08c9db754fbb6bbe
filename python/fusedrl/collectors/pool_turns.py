"""Collection loop for an ``AsyncEnvPool``, in which dialogs advance independently."""

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

SLICE_S = 0.05  # longest delay of Ctrl-C while environments step


class PoolLoop(TurnLoop):
    """Runs the dialogs of an ``AsyncEnvPool`` and collects each turn as soon as it is done.

    After an exception or Ctrl-C during a step, all running dialogs end and the next turn begins new
    ones; a pool of processes cannot be used any more. Each finished dialog is a batch.
    """

    batch_per_dialog = True

    def __init__(self, env: Any, options: DialogOptions, versions: Versions) -> None:
        super().__init__(env, options, versions)
        self._total = check_total("total_dialog_turns", options.total_dialog_turns)
        self._completed = options.completed
        self._in_processes = isinstance(env, ProcessorAsyncEnvPool)
        self._checked: tuple[Any, Any] = (None, None)  # a follower and a policy
        self._running = False  # whether dialogs are running
        self._failed: BaseException | None = None  # the error that broke a pool of processes
        # The versions of the turns whose environments are stepping, by index of the environment.
        self._stepping: dict[int, Any] = {}
        # Dialogs on hold because other dialogs may use up the remaining budget.
        self._on_hold: dict[int, TensorDictBase] = {}

    def _check(self, env: Any, options: DialogOptions) -> None:
        # torchrl 0.14.1 looks up the environment of a tensordict in the flattened list of indices,
        # where an environment with several rows has several entries: some step twice, some never.
        sizes = [tuple(size) for size in env.env_batch_sizes if size.numel() > 1]
        if sizes:
            raise ValueError(
                f"env: expected a pool of environments with one dialog each, got batch_size="
                f"{sizes[0]}; pass AsyncEnvPool one environment for each dialog"
            )

    def batch(self, policy: Policy, check: Callable[[], None]) -> TensorDictBase:
        """As for :class:`TurnLoop`; the policy runs for some dialogs while others step.

        If environments compute with the policy, weight updates wait for them; a channel, whose
        updates do not wait, is a ``ValueError`` then.
        """
        follower = self._versions.follower
        if self._checked != (follower, policy):
            scoring = self._parts_using_policy(policy if follower is None else follower.module)
            if scoring and follower is not None:
                raise ValueError(
                    "env: expected a pool whose environments do not use the policy, since its "
                    f"weights change while they step, got a {type(scoring[0]).__name__} that "
                    "computes with it; score with a separate model, or outside of a pool"
                )
            if scoring:
                self._versions.settle = self._wait
            self._checked = follower, policy
        return super().batch(policy, check)

    def _parts_using_policy(self, policy: Any) -> list[Any]:
        """Parts of the environments that compute with the policy (never those in processes)."""
        of_policy = {
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
            or any(id(parameter) in of_policy for parameter in part.parameters(recurse=False))
        ]

    @contextmanager
    def _pool(self) -> Iterator[None]:
        """Context for calls of the pool; an exception ends the running dialogs."""
        if self._failed is not None:
            raise RuntimeError(
                "env: expected a running pool, got one of processes in which one failed (see the "
                "cause); make another pool and another collector"
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
        """Wait for ``least`` steps in threads (default: all); returns whether they ended."""
        steps, deadline = torchrl.steps_under_way(self.env), time.monotonic() + seconds
        running, most = set(steps), 0 if least is None else max(len(steps) - least, 0)
        while len(running) > most and time.monotonic() < deadline:
            with interrupted_later():
                running = wait(running, SLICE_S, FIRST_COMPLETED).not_done
        return len(running) <= most

    def _receive(self, receive: Callable[[int], Any], least: int) -> Any:
        """Receive the results of ``least`` environments; Ctrl-C can interrupt only the wait."""
        self._wait(least=least)
        # A pool of threads holds locks here that running steps need.
        with nullcontext() if self._in_processes else interrupted_later():
            return receive(least)

    def _turn(self, policy: Policy) -> None:
        """Collect finished turns, and start the next turns of their dialogs."""
        if not self._running:
            self.restart()
            with self._pool():
                with interrupted_later():
                    torchrl.begin_resets(self.env)
                self._begin(self._receive(self.env.async_reset_recv, self.env.num_envs))
        if self._carried is not None:
            self._start_steps(policy)
        self._collect_turns(policy)

    def _start_steps(self, policy: Policy) -> None:
        """Call the policy and start the environment steps."""
        indices = torchrl.env_indices(self.env, self._carried)
        with self._versions.call() as version:
            # The policy may be called again and reuse its output while the environments step.
            answers = copy_of(call_by_length(policy, self._carried))
            with interrupted_later(), self._pool():  # all environments step, or none
                self.env.async_step_and_maybe_reset_send(answers)
                self._stepping.update(dict.fromkeys(indices, version))
                self._carried = None  # last, so that a policy that raised is called again

    def _collect_turns(self, policy: Policy) -> None:
        """Wait for the first environments to finish their steps, and store their turns."""
        least = self.env.min_get if self._completed else self.env.num_envs
        least = min(least, len(self._stepping))  # near the end of the budget fewer dialogs run
        with self._pool():
            turn, self._carried = self._receive(self.env.async_step_and_maybe_reset_recv, least)
            indices = torchrl.env_indices(self.env, turn)
            rows = [
                self._tagged(row, self._stepping.pop(index), self._ids[index])
                for index, row in zip(indices, turn.unbind(0), strict=True)
            ]
            self._store(lazy_stack(rows), ended(turn), indices)
            within_budget = self._turns_run < self._total
            if self._completed and not within_budget:
                self._put_on_hold(indices)
        if self._completed and within_budget:
            self._start_steps(policy)

    def _put_on_hold(self, indices: list[int]) -> None:
        """Put dialogs on hold at the end of the budget, and then run the longest one."""
        self._on_hold.update(zip(indices, self._carried.unbind(0), strict=True))
        self._carried = None
        if not self._stepping:
            batches: Any = self._batches
            longest = max(self._on_hold, key=batches.length)
            self._carried = lazy_stack([self._on_hold.pop(longest)])

    def restart(self, finished: bool = False) -> None:
        """As for :class:`TurnLoop`; waits for running steps."""
        self._wait()
        if not torchrl.forget_steps(self.env) and self._stepping:
            with self._pool():
                self._receive(self.env.async_step_and_maybe_reset_recv, len(self._stepping))
        self._turns_run += len(self._stepping)
        self._stepping, self._on_hold, self._running = {}, {}, False
        super().restart(finished)
