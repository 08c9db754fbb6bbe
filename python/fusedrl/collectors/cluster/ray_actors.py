"""Starts, calls and ends the actors of a collector, and turns what fails into errors."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

logger = logging.getLogger("fusedrl")

# Concurrency groups of an actor, with a thread each. Weights and versions arrive in neither, so
# that they need not wait for a batch.
BETWEEN = "between_batches"
UPDATES = "updates"  # the first actor numbers updates there, one after the other

SECONDS_MORE = 10.0  # that the first actor may take to say which actor is late


class ActorDied(RuntimeError):
    """The error of calling an actor that is dead."""


@dataclass(frozen=True)
class Started:
    """What the caller needs to know of an actor: where it runs, and the layout of its weights."""

    pid: int
    node: str
    layout: str | None


class Actors:
    """Starts actors, calls them, and ends them. A pickled copy has handles of the same actors.

    Args:
        timeout: seconds that Ray may take to place an actor, and that a call may take which does
            not wait for a batch.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.closed = True  # until the actors have started, and once they are being ended
        self.started: list[Started] = []
        self.handles: list[Any] = []
        self._cluster: str | None = None  # once actors run: outside of one, Ray would start it

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the cluster that this process is in."""
        import ray

        own = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
        vars(self).update(state, _cluster=own)

    def with_first(self, handle: Any) -> Actors:
        """The same actors with another handle of the first one."""
        others = copy.copy(self)
        others.handles = [handle, *self.handles[1:]]
        return others

    def require_open(self) -> None:
        """Raise ``RuntimeError`` after :meth:`close`, or after the end of the actors' cluster."""
        if self.closed:
            raise RuntimeError(
                "collector: expected one that runs, got one after shutdown(); make another"
            )
        if not self.is_reachable:
            raise RuntimeError(
                f"collector: expected Ray's cluster at {self._cluster}, where its actors are, got "
                "a process that has left it, since ray.shutdown() was called; make another "
                "collector"
            )

    @property
    def _ray(self) -> Any:
        import ray

        return ray

    @property
    def is_reachable(self) -> bool:
        """Whether this process is still in the cluster of the actors.

        Outside of any, almost every call of Ray's starts one.
        """
        return (
            self._ray.is_initialized()
            and self._ray.get_runtime_context().gcs_address == self._cluster
        )

    @property
    def indices(self) -> range:
        """The indices of the actors."""
        return range(len(self.handles))

    def start(
        self, kind: type, options: Sequence[dict[str, Any]], shared: Any, own: Sequence[Any]
    ) -> None:
        """Start an actor for each of Ray's options, and call its ``start``.

        No actor is left if one fails.

        Args:
            kind: the class of the actors.
            options: Ray's options for each actor.
            shared: the first argument of ``start``, which is the same for all.
            own: the second argument of ``start`` for each actor.

        Raises:
            TypeError: the arguments cannot be pickled.
            RuntimeError: Ray has no place for an actor.
        """
        shared, own = _stored(shared), [_stored(one) for one in own]
        groups = {"concurrency_groups": {BETWEEN: 1, UPDATES: 1}}
        self.handles = [self._ray.remote(**one, **groups)(kind).remote() for one in options]
        self._cluster = self._ray.get_runtime_context().gcs_address
        try:
            self._wait_for_places()
            self.closed = False
            self.started = self.each_its_own("start", [(shared, one) for one in own])
        except BaseException:
            self.kill()
            self.closed = True
            raise

    def _wait_for_places(self) -> None:
        ready = [handle.__ray_ready__.remote() for handle in self.handles]
        _, missing = self._ray.wait(ready, num_returns=len(ready), timeout=self.timeout)
        if not missing:
            return
        free = self._ray.available_resources()
        raise RuntimeError(
            f"timeout, num_cpus, num_gpus, remote_config: expected places for {len(ready)} actors "
            f"within {self.timeout} s, got {len(ready) - len(missing)}; of "
            f"{self._ray.cluster_resources()} free are {free}: raise timeout if that suffices, as "
            "processes start slowly on a busy machine; else ask for less, or add a machine"
        )

    def send(self, index: int, method: str, *args: Any, group: str | None = BETWEEN) -> Any:
        """Call a method of one actor, and return a reference to its answer.

        Args:
            index: the index of the actor.
            method: the name of the method.
            args: the arguments of the method.
            group: the concurrency group that runs it: by default between two batches.
        """
        self.require_open()
        bound = getattr(self.handles[index], method)
        return (bound if group is None else bound.options(concurrency_group=group)).remote(*args)

    def send_all(self, method: str, *args: Any, group: str | None = BETWEEN) -> Mapping[Any, int]:
        """As :meth:`send`, to every actor: their indices by the references to their answers."""
        return {self.send(index, method, *args, group=group): index for index in self.indices}

    def one(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of one actor, between two batches."""
        return self.answer(self.send(index, method, *args), index)

    def each(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every actor between two batches; its answers, in their order."""
        return self.wait(self.send_all(method, *args))

    def each_its_own(self, method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """As :meth:`each`, with arguments for each actor."""
        sent = enumerate(arguments)
        return self.wait({self.send(index, method, *own): index for index, own in sent})

    def update(self, method: str, *args: Any, waits: bool = False) -> Any:
        """Call a method of the first actor's :class:`Updates`, after those that were called before.

        Args:
            method: the name of the method.
            args: the arguments of the method.
            waits: whether the update waits for batches, for which there is no time limit.
        """
        until = None if waits else self.deadline() + SECONDS_MORE
        answer = self.send(0, "number", method, args, group=UPDATES)
        return self.wait({answer: 0}, until).pop()

    def deadline(self) -> float:
        """When an actor that is called now is late, on the clock of ``time.monotonic``."""
        return time.monotonic() + self.timeout

    def wait(self, answers: Mapping[Any, int], until: float | None = None) -> list[Any]:
        """All answers; the first failure is raised without waiting for others.

        Args:
            answers: the indices of actors, by the references to their answers.
            until: a :meth:`deadline`.

        Raises:
            RuntimeError: an actor is dead. An exception that an actor raised is raised as it is.
            TimeoutError: an actor does not answer in time.
        """
        got: dict[Any, Any] = {}
        waiting = list(answers)
        while waiting:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready, waiting = self._ray.wait(waiting, timeout=left)
            if not ready:
                late = ", ".join(self.name(answers[reference]) for reference in waiting)
                raise TimeoutError(
                    f"timeout: expected answers within {self.timeout} s, got none of {late}; raise "
                    "timeout if they take longer"
                )
            got.update(
                {reference: self.answer(reference, answers[reference]) for reference in ready}
            )
        return [got[reference] for reference in answers]

    def failures(self, answers: Mapping[Any, int], until: float | None) -> list[Exception]:
        """The errors of an update, at most one for each actor, once all have answered."""
        failed: list[Exception] = []
        for reference, index in answers.items():
            try:
                self.wait({reference: index}, until)
            except Exception as error:
                failed.append(error)
        return failed

    def answer(self, reference: Any, index: int) -> Any:
        """The answer of an actor, or its own exception.

        Raises:
            RuntimeError: the actor is dead, or its exception cannot be pickled.
        """
        errors = self._ray.exceptions
        unreadable = getattr(errors, "UnserializableException", errors.RayTaskError)  # not in 2.40
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            if type(error.cause) is errors.RayError:  # the exception could not be pickled
                self._raise_unpickled(index, error)
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except unreadable as error:
            self._raise_unpickled(index, error)
        except (errors.RayActorError, errors.ObjectLostError) as error:
            reason = re.sub(r"\s+", " ", str(error)).strip()
            raise ActorDied(
                f"collectors: expected living actors, got a dead one, {self.name(index)}: "
                f"{reason[:300]}; make another collector"
            ) from error

    def _raise_unpickled(self, index: int, error: Exception) -> NoReturn:
        last = str(error).rstrip().rsplit("\n", 1).pop()
        raise RuntimeError(
            f"collectors: expected an answer of {self.name(index)}, got {last}; its traceback is "
            "above, and the exception would be raised as it is if it could be pickled"
        ) from error

    def name(self, index: int) -> str:
        """The name of an actor in error messages."""
        if index >= len(self.started):
            return f"actor {index}"
        return f"actor {index} (pid {self.started[index].pid} on {self.started[index].node})"

    def close(self, close_env: bool, timeout: float) -> list[str]:
        """End all actors; returns the errors of those that did not close their environment.

        It may be called again, also if Ctrl-C interrupted the first call.
        """
        self.closed = True
        if not self.is_reachable:
            self.handles = []
        failed: list[str] = []
        try:
            ends = {handle.close.remote(close_env): n for n, handle in enumerate(self.handles)}
            late = list(ends)
            if ends:
                _, late = self._ray.wait(late, num_returns=len(ends), timeout=timeout)
            failed += [f"{self.name(ends[one])}: no end within {timeout} s" for one in late]
            for reference in ends.keys() - set(late):
                try:
                    self.answer(reference, ends[reference])
                except ActorDied as error:  # there is nothing to close
                    logger.warning("%s", error)
                except Exception as error:
                    failed.append(f"{self.name(ends[reference])}: {error}")
        finally:
            self.kill()
        return failed

    def kill(self) -> None:
        """End all actors at once."""
        for handle in self.handles if self.is_reachable else ():
            self._ray.kill(handle, no_restart=True)
        self.handles = []


def _stored(arguments: Any) -> Any:
    import ray

    try:
        return ray.put(arguments)
    except TypeError as error:
        raise TypeError(
            f"policy, env: expected what can be pickled for another process, got {error}; pass "
            "policy_factory=, and for env a function that makes it"
        ) from error


def start_ray(config: dict[str, Any] | None) -> None:
    """Start Ray, unless it runs already.

    Raises:
        RuntimeError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError("ray: expected it to be installed; pip install ray") from error
    if not ray.is_initialized():
        from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

        ray.init(**(DEFAULT_RAY_INIT_CONFIG if config is None else config))
