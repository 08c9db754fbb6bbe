"""Starts, calls and ends the actors of a collector, and turns what fails into errors."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from fusedrl.collectors.cluster.dialog_actor import DialogActor, Started

logger = logging.getLogger("fusedrl")

BETWEEN = "between_batches"  # a concurrency group, so that weights need not wait for a batch
OF_ALL = {
    "async_shutdown",
    "increment_version",
    "init_updater",
    "iterator",
    "load_state_dict",
    "next",
    "receive_weights",
    "reset",
    "rollout",
    "set_weight_updater",
    "shutdown",
    "start",
    "update_policy_weights_",
}  # methods of a collector that change it
UPDATES = "updates"  # the first actor's group that numbers updates for handles in any process


class ActorDied(RuntimeError):
    """The error of calling an actor that is dead."""


@dataclass(frozen=True)
class Failures:
    """The first error of an update, and whether every actor itself refused the update."""

    first: Exception | None
    refused: bool


class Actors:
    """Starts an actor for each of the given options of Ray, calls them, and ends them.

    Args:
        options: Ray's options for each actor.
        timeout: seconds that Ray may take to place an actor, and that a call may take which does
            not wait for a batch.
    """

    def __init__(self, options: Sequence[dict[str, Any]], timeout: float) -> None:
        import ray

        self._ray: Any = ray
        self.timeout = timeout
        self.closed = True  # until the actors have started, and once they are being ended
        self.started: list[Started] = []
        self.handles: list[Any] = []
        self.shared = False  # whether other processes have handles of the collector
        self._cluster: str | None = None  # once actors run: outside of one, Ray would start it
        self._options = [{**one, "concurrency_groups": {BETWEEN: 1, UPDATES: 1}} for one in options]

    def __getstate__(self) -> dict[str, Any]:
        """Handles of the same actors, for another process."""
        kept = ("timeout", "closed", "started", "handles", "shared")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the Ray of this process."""
        import ray

        vars(self).update(state, _ray=ray)
        self._cluster = ray.get_runtime_context().gcs_address if ray.is_initialized() else None

    def share(self) -> Actors:
        """The actors as they are sent to the first one, which then calls :meth:`with_first`."""
        self.shared = True
        return self.with_first(None)

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
    def is_reachable(self) -> bool:
        """Whether this process is still in the cluster of the actors.

        Outside of any, almost every call of Ray's starts one.
        """
        if not self._ray.is_initialized():
            return False
        return self._ray.get_runtime_context().gcs_address == self._cluster

    def start(self, arguments: dict[str, Any], own: Sequence[dict[str, Any]], seed: int) -> None:
        """Make the collectors; no actor is left if one fails.

        Raises:
            TypeError: the arguments cannot be pickled.
            RuntimeError: Ray has no place for an actor.
        """
        shared, own = self._put(arguments), [self._put(one) for one in own]
        self.handles = [self._ray.remote(**one)(DialogActor).remote() for one in self._options]
        self._cluster = self._ray.get_runtime_context().gcs_address
        try:
            self._wait_for_places()
            answers = [
                handle.start.options(concurrency_group=BETWEEN).remote(
                    shared, index, len(own), seed + index, mine
                )
                for index, (handle, mine) in enumerate(zip(self.handles, own, strict=True))
            ]
            self.started = self.wait(answers, None)
            self.closed = False
        except BaseException:
            self.kill()
            raise

    def _put(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._ray.put(arguments)
        except TypeError as error:
            raise TypeError(
                f"policy, env: expected what can be pickled for another process, got {error}; pass "
                "policy_factory=, and for env a function that makes it"
            ) from error

    def _wait_for_places(self) -> None:
        ready = [handle.__ray_ready__.remote() for handle in self.handles]
        _, missing = self._ray.wait(ready, num_returns=len(ready), timeout=self.timeout)
        if not missing:
            return
        free = self._ray.available_resources()
        late = [one for one, ref in zip(self._options, ready, strict=True) if ref in missing]
        got = f"{len(ready)} actors within {self.timeout} s, got {len(ready) - len(missing)}"
        if all(_fits(options, free) for options in late):
            raise RuntimeError(
                f"timeout: expected processes of {got}; {free} are free, so that Ray has places "
                "and the processes are still starting, which takes longer on a busy machine: raise "
                "timeout"
            )
        raise RuntimeError(
            f"num_cpus, num_gpus, remote_config: expected places for {got}; of "
            f"{self._ray.cluster_resources()} free are {free}: ask for less, free some, add a "
            "machine, or raise timeout"
        )

    def each(self, method: str, *args: Any, between: bool = True) -> list[Any]:
        """Call a method of every actor; its answers, in the order of the actors.

        Args:
            method: the name of a method of :class:`DialogActor`.
            args: the arguments of the method.
            between: whether the call waits for the batch that is being collected.
        """
        answers = self.ask_all(method, *args, between=between)
        return self.wait(answers, None if between else self.timeout)

    def ask_all(self, method: str, *args: Any, between: bool = True) -> list[Any]:
        """As :meth:`each`, but return references to the answers without waiting."""
        self.require_open()
        return [self.send(index, method, *args, between=between) for index in self.indices]

    def each_its_own(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As :meth:`each`, between two batches, with arguments for each actor."""
        self.require_open()
        answers = [self.send(index, method, *own) for index, own in enumerate(arguments)]
        return self.wait(answers, None)

    def one(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of one actor, between two batches."""
        return self.answer(self.send(index, method, *args), index)

    @property
    def indices(self) -> range:
        """The indices of the actors."""
        return range(len(self.handles))

    def send(
        self, index: int, method: str, *args: Any, between: bool = True, group: str = BETWEEN
    ) -> Any:
        """Call a method of one actor, and return a reference to its answer."""
        self.require_open()
        bound = getattr(self.handles[index], method)
        if between:
            bound = bound.options(concurrency_group=group)
        return bound.remote(*args)

    def wait(self, answers: Sequence[Any], timeout: float | None) -> list[Any]:
        """All answers, one of each actor; the first failure is raised without waiting for others.

        Raises:
            RuntimeError: an actor is dead. An exception that an actor raised is raised as it is.
            TimeoutError: an actor does not answer in time.
        """
        got: dict[Any, Any] = {}
        index_of = {answer: index for index, answer in enumerate(answers)}
        waiting, deadline = list(answers), None if timeout is None else time.monotonic() + timeout
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, waiting = self._ray.wait(waiting, timeout=left)
            if not ready:
                raise self._late([index_of[answer] for answer in waiting], timeout)
            got.update({answer: self.answer(answer, index_of[answer]) for answer in ready})
        return [got[answer] for answer in answers]

    def failures(self, answers: Sequence[Any], timeout: float | None) -> Failures:
        """The failures, once all actors have answered."""
        failed: list[Exception] = []
        refused = 0
        deadline = None if timeout is None else time.monotonic() + timeout
        for index, answer in enumerate(answers):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = self._ray.wait([answer], timeout=left)
            if not ready:
                failed.append(self._late([index], timeout))
                continue
            try:
                self.answer(answer, index)
            except ActorDied as error:
                failed.append(error)
            except Exception as error:
                failed.append(error)
                refused += 1
        return Failures(next(iter(failed), None), refused == len(answers))

    def _late(self, indices: Sequence[int], timeout: float | None) -> TimeoutError:
        late = ", ".join(map(self.name, indices))
        return TimeoutError(
            f"timeout: expected answers within {timeout} s, got none of {late}; raise "
            "timeout if they take longer"
        )

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
        try:
            answering = self.handles and self.is_reachable
            return self._closed(close_env, timeout) if answering else []
        finally:
            self.kill()

    def _closed(self, close_env: bool, timeout: float) -> list[str]:
        for handle in self.handles:
            handle.stop.remote()
        ends = [handle.close.options(concurrency_group=BETWEEN) for handle in self.handles]
        answers = {end.remote(close_env): index for index, end in enumerate(ends)}
        _, late = self._ray.wait(list(answers), num_returns=len(answers), timeout=timeout)
        told = [f"{self.name(answers[ref])}: no end within {timeout} s" for ref in late]
        for reference in answers.keys() - set(late):
            try:
                self.answer(reference, answers[reference])
            except ActorDied as error:  # there is nothing to close
                logger.warning("%s", error)
            except Exception as error:
                told.append(f"{self.name(answers[reference])}: {error}")
        return told

    def kill(self) -> None:
        """End all actors at once."""
        for handle in self.handles if self.is_reachable else ():
            self._ray.kill(handle, no_restart=True)
        self.handles = []


class FirstActor:
    """The first actor, with the methods of its collector as remote methods.

    Methods that would affect this actor without the others are left out.
    """

    def __init__(self, actors: Actors) -> None:
        self._actors = actors

    def __getattr__(self, name: str) -> RemoteMethod:
        """A method of the collector, which :meth:`RemoteMethod.remote` calls."""
        if name.startswith("_") or name in OF_ALL:
            raise AttributeError(
                f"{name}: expected a method that asks one collector, got one that is for all "
                "actors; call it on the RayLLMCollector"
            )
        return RemoteMethod(self._actors, name)


@dataclass(frozen=True)
class RemoteMethod:
    """A method of the first actor's collector."""

    actors: Actors
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method between two batches, and return a reference to its answer."""
        return self.actors.send(0, "call", self.name, args, kwargs)


def _fits(options: dict[str, Any], free: dict[str, float]) -> bool:
    """Whether what an actor asks for is free; Ray places one that asks for nothing with a CPU."""
    cpus, gpus = options.get("num_cpus"), options.get("num_gpus")
    asked = {"CPU": 1 if cpus is None else cpus, "GPU": gpus or 0}
    asked |= {"memory": options.get("memory") or 0} | (options.get("resources") or {})
    return all(free.get(name, 0) >= count for name, count in asked.items())


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
