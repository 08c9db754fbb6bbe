"""torchrl's ``AsyncCollector``: a collector in a process of its own."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from operator import methodcaller
from typing import Any

import torch
from torchrl.collectors import AsyncCollector as _AsyncCollector
from torchrl.collectors import BaseCollector, Collector, ProfileConfig
from torchrl.collectors.utils import split_trajectories

from fusedrl.collectors.batches import buffer_of
from fusedrl.collectors.options import Policy, check_total
from fusedrl.collectors.policy_version import PolicyVersion, mark_padding
from fusedrl.collectors.process.options import WITH_TRAINER, AsyncOptions
from fusedrl.collectors.process.weights import PublishedWeights
from fusedrl.collectors.process.worker import (
    Job,
    load_state,
    make_collector,
    refuse_other_state,
    set_seed,
    set_version,
    state_on_cpu,
)
from fusedrl.collectors.process.worker_handle import SHUTDOWN_S, WorkerHandle
from fusedrl.collectors.stream import Batches, Stream, finished
from fusedrl.compat.torchrl import (
    frames_of,
    process_context,
    trajectory_format,
    worker_profiler,
)
from fusedrl.weights.collector import POLICY_STATE

DEVICES = "storing_device", "policy_device", "env_device"
# torchrl's arguments of a collector of frames, with their defaults.
FRAMES = {
    name: each.default
    for name, each in inspect.signature(Collector).parameters.items()
    if each.default is not each.empty
}


class AsyncCollector(_AsyncCollector):
    """Collects in a process of its own, which goes on while the trainer trains.

    It takes the place of torchrl's class, and ``isinstance`` accepts it as one. Batches lie in
    memory that the worker wrote and that nobody copies; a batch that you keep stays as it is.
    Weights reach the worker through a :class:`fusedrl.WeightChannel`: an update returns at once,
    and each batch, or turn of dialogs, computes with the version that is newest when it begins.

    Args:
        create_env_fn: a function that makes the environment, in the worker.
        policy: a module or another function of a tensordict. ``None`` takes random actions.
        policy_factory: a function that makes the policy, in the worker. If ``policy`` is given too,
            its weights are those that are sent.
        frames_per_batch: number of frames in a batch. With ``collector_class=LLMCollector`` it may
            be called ``dialog_turns_per_batch``.
        total_frames: number of frames in all, rounded up to whole batches; -1 never ends. With
            ``collector_class=LLMCollector`` it may be called ``total_dialog_turns``.
        create_env_kwargs: arguments of ``create_env_fn``.
        init_random_frames: number of first frames with random actions, rounded up to whole batches.
            Frames that are in ``replay_buffer`` already count.
        postproc: a function that gets each batch in this process and returns what is yielded or
            stored.
        split_trajs: whether batches have shape (trajectories, time), with ``("collector",
            "mask")``.
        update_at_each_batch: update the policy before the first batch and after each.
        preemptive_threshold: without effect: one worker has nobody to wait for.
        num_threads: number of torch's threads in this process until :meth:`shutdown`; unchanged if
            ``None``.
        num_sub_threads: number of torch's threads in the worker.
        track_policy_version: whether to tag frames, or the :class:`fusedrl.PolicyVersion` that tags
            them.
        replay_buffer: a buffer of any kind, which is extended with each batch in this process; the
            iterator then yields ``None``.
        extend_buffer: without effect: a buffer gets whole batches.
        weight_updater: an updater of torchrl's or of ours, or a function that makes one. After each
            of its updates the weights of ``policy`` are published.
        weight_sync_schemes: :class:`fusedrl.ChannelWeightSyncScheme` objects by the names of their
            models. By default there is one for ``policy``, if it has weights.
        collector_class: the collector in the worker: torchrl's ``Collector``, or
            :class:`fusedrl.LLMCollector` for dialogs.
        init_fn: a function that is called first in the worker.
        pre_collect_hook: a function that is called before each batch, in the worker.
        post_collect_hook: a function that gets each batch, in the worker.
        channel: handle of a channel that another process publishes, instead of schemes and
            updaters.
        channel_mode: ``"alias"`` or ``"copy"``, as for :meth:`fusedrl.WeightReader.load_into`.
        prefetch: number of batches that the worker may have ready or under way while you use one; 0
            collects on demand.
        max_staleness: drop a batch if its oldest frame is more than this number of versions behind
            the newest published one when it is handed out; ``stale_frames`` counts the dropped
            frames.
        verbose: log the figures of each batch: turns, tokens, version, staleness.
        timeout: seconds that a batch may take; ``None`` waits while the worker lives.

    Further arguments are those of ``collector_class``, such as ``device`` and
    ``max_frames_per_traj``, or ``yield_completed_trajectories``.

    Raises:
        TypeError: arguments exclude each other or are not numbers, ``collector_class`` lacks one,
            or an environment or a policy cannot be sent to another process.
        ValueError: a number is out of range, a scheme is of another kind, or values are given for
            several workers.
        Exception: an exception of the worker while it makes the environment or the policy, with its
            traceback as the cause.

    Example:
        >>> from torchrl.testing.mocking_classes import CountingEnv
        >>> from fusedrl import AsyncCollector
        >>> if __name__ == "__main__":
        ...     with AsyncCollector(CountingEnv, frames_per_batch=4, total_frames=8) as collector:
        ...         print([tuple(batch.shape) for batch in collector])
        [(4,), (4,)]
    """

    closed = True  # until the constructor has succeeded
    num_workers = 1
    prefetch: int
    timeout: float | None
    _ignore_rb = False  # torchrl's: whether whole trajectories go into the buffer elsewhere

    def __init__(self, create_env_fn: Any, policy: Policy | None = None, **arguments: Any) -> None:
        options = AsyncOptions.of(create_env_fn, policy, **arguments)
        BaseCollector.__init__(
            self,
            pre_collect_hook=options.pre_collect_hook,
            post_collect_hook=options.post_collect_hook,
        )
        # torchrl's class has attributes for arguments.
        for name, value in (FRAMES | options.for_class | vars(options)).items():
            if not isinstance(getattr(type(self), name, None), property):
                setattr(self, name, value)
        self.requested_frames_per_batch: Any = options.frames_per_batch
        self.total_frames: Any = check_total("total_frames", options.total_frames)
        track = options.track_policy_version
        self.policy_version_tracker = PolicyVersion() if track is True else track or None
        self.replay_buffer = buffer_of(options.replay_buffer, options.queue)
        self.traj_format = trajectory_format(
            self.traj_format, self.trajs_per_batch, has_buffer=options.replay_buffer is not None
        )
        self._former_threads = torch.get_num_threads()
        devices: Any = {name: getattr(self, name) for name in ("device", *DEVICES)}
        vars(self).update(zip(DEVICES, self._get_devices(**devices), strict=True))
        make = partial(make_collector, options.for_worker(), self._of_collector(options))
        # Re-entrant: the handler of a signal may call shutdown() while it is running.
        self._ending = threading.RLock()
        self._start_worker(make, options)
        self._stream = Stream(self)
        self._thread = self._stream.background
        self._frames, self._iter = 0, -1
        self.closed = False
        if options.weight_recv_schemes is not None:
            self.register_scheme_receiver(options.weight_recv_schemes)

    def _of_collector(self, options: AsyncOptions) -> dict[str, Any]:
        """The arguments of the worker's collector."""
        given = options.for_class
        arguments = {name: given[name] for name in given.keys() - WITH_TRAINER}
        arguments["track_policy_version"] = self.policy_version_tracker or False
        if options.collects_dialogs:
            arguments["dialog_turns_per_batch"] = options.frames_per_batch
            arguments["total_dialog_turns"] = options.total_frames
            if given.get("flatten_data") is None and self.replay_buffer is not None:
                arguments["flatten_data"] = True
        else:
            arguments |= {
                "frames_per_batch": options.frames_per_batch,
                "total_frames": -1,
                **{name: getattr(self, name)[0] for name in DEVICES},
                "return_same_td": True,  # each batch is copied before the next one is made
            }
        if self.init_random_frames:
            stored = getattr(self.replay_buffer, "write_count", 0)
            arguments["init_random_frames"] = max(self.init_random_frames - stored, 0)
        return arguments

    def _start_worker(self, make: Callable[..., Any], options: AsyncOptions) -> None:
        """Publish the first weights, and start the process; if that fails, nothing is left."""
        with contextlib.ExitStack() as undo:
            if self.num_threads:
                undo.callback(torch.set_num_threads, self._former_threads)
                torch.set_num_threads(self.num_threads)
            self._weights = PublishedWeights(self, options)
            undo.callback(self._weights.close)
            schemes = self._weight_sync_schemes = self._weights.schemes
            job = Job(partial(make, schemes=dict(schemes)), self._weights.brought())
            self._worker = WorkerHandle(process_context(), job)
            # Ctrl-C may come anywhere from here on, and multiprocessing joins its children at exit.
            Finalize(self, self._worker.stop, (SHUTDOWN_S,), exitpriority=100)
            undo.callback(self._worker.stop, SHUTDOWN_S)
            self._worker.start()
            self._worker.call(frames_of)  # raises what making the collector has raised
            undo.pop_all()

    def __iter__(self) -> Iterator[Any]:
        """Batches, as :meth:`iterator` yields them; an error shuts the collector down."""
        return Batches(super().__iter__)

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are collected, or ``None`` if a buffer gets them."""
        while taken := self._stream.take():
            yield taken.pop()  # a frame that waits keeps no batch

    def _arrive(self) -> Any:
        if self._frames >= self.total_frames:
            return None
        if self.update_at_each_batch and self._iter < 0:
            self.update_policy_weights_()
        arrived = self._worker.batch(self.timeout)
        if arrived.batch is None:
            return None
        self._frames += arrived.frames
        self._iter += 1
        return arrived.batch

    def _ahead(self) -> None:
        if self.update_at_each_batch:
            self.update_policy_weights_()
        left = (self.total_frames - self._frames) / (self.requested_frames_per_batch or 1)
        self._worker.ask(math.ceil(min(self.prefetch, left)))

    def _postproc(self, batch: Any) -> Any:
        if self.replay_buffer is None and self.split_trajs:
            batch = mark_padding(split_trajectories(batch, prefix="collector"))
        batch = finished(batch, self.postproc)
        if self.replay_buffer is not None and not self._ignore_rb:
            batch.names = None
        return batch

    def start(self) -> None:
        """Fill the replay buffer from a thread, until the end or :meth:`async_shutdown`.

        An error in the thread is logged at once and raised by the next call.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        self._thread.check()
        self._worker.check()
        by_frames = self.trajs_per_batch is None
        iterate = self.iterator if by_frames else self._iter_by_trajectories
        self._thread.start(iterate, self.replay_buffer)

    def _iter_by_trajectories(self) -> Iterator[Any]:
        for batch in super()._iter_by_trajectories():
            yield batch if batch is None else mark_padding(batch)

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._thread.is_running()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Keep batches out of the buffer in this block; the worker collects ``prefetch`` more.

        Raises:
            RuntimeError: there is nothing to pause.
        """
        if not self.is_running():
            self._thread.check()
            raise RuntimeError(
                "pause: expected a collector after start(), got none that runs; call start() first"
            )
        with self._stream.storing:
            yield

    @property
    def stale_frames(self) -> int:
        """Frames that ``max_staleness`` dropped."""
        return self._stream.dropped

    @property
    def weight_updater(self) -> Any:
        """The weight updater, or ``None``. Setting one registers it with this collector."""
        return self._weights.updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._weights.set_updater(value, self)

    @property
    def _legacy_weight_updater(self) -> bool:
        return self._weights.updater is not None

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Publish one version of the weights, without waiting for the worker.

        With a ``channel`` it does nothing: the next batch, or turn, takes the newest version.

        Raises:
            RuntimeError: weights are given beside a channel, or have no way to the policy.
        """
        self._thread.check()
        if not self._weights.come_from_others:
            super().update_policy_weights_(*args, **kwargs)
        elif args or kwargs:
            raise RuntimeError(
                "channel: expected weights to come through it, got others; publish them"
            )

    @property
    def policy_version(self) -> Any:
        """The newest published version; ``None`` if versions are not tracked.

        A frame has the version of the weights that made it.
        """
        return self._weights.version

    def increment_version(self) -> None:
        """Count a version, also in the worker. The versions of a channel count by themselves."""
        version = self._weights.count()
        if version is not None and not self.closed:
            self._worker.call(set_version, version, waits=False)

    def _call(self, function: Callable[..., Any], *args: Any, anew: bool = False) -> Any:
        self._thread.check()
        return self._worker.call(function, *args, anew=anew)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment, torch and numpy in the worker, and reset the environment.

        Args:
            seed: the seed of the environment, or the first of several.
            static_seed: whether all environments have the same one.

        Returns:
            The last environment's seed.
        """
        return self._call(set_seed, seed, static_seed, anew=True)

    def reset(self, reset_idx: Any = None) -> None:
        """Start new trajectories; no later batch has frames from before.

        Args:
            reset_idx: ``None``, or a list with one boolean: whether to reset the worker.
        """
        self._flush_trajectory_assembly()
        if reset_idx is None or any(reset_idx):
            self._call(methodcaller("reset"), anew=True)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state of the worker (``"worker0"``) and the counts (``"frames"``, ``"iter"``)."""
        worker = self._call(state_on_cpu)
        state = OrderedDict(worker0=worker, frames=self._frames, iter=self._iter)
        if "traj_pool" in worker:
            state["traj_pool"] = worker.pop("traj_pool")
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The policy's weights are published as one version, whose number is at least theirs. The
        trainer's own model stays as it is.

        Raises:
            KeyError, ValueError, RuntimeError: the state does not fit. Nothing has changed then.
        """
        worker, frames = dict(state_dict["worker0"]), state_dict["frames"]
        batches = state_dict["iter"]
        if "traj_pool" in state_dict:
            worker["traj_pool"] = state_dict["traj_pool"]
        scheme, version = self._weights.schemes.get("policy"), state_dict.get("policy_version")
        if scheme is not None:
            weights = worker.pop(POLICY_STATE, None)
            self._call(refuse_other_state, worker, False)
            scheme.restore(weights, version)
        # Batches that the worker has made meanwhile, with other weights, are outdated.
        self._call(load_state, worker, scheme is None, anew=True)
        if scheme is None and version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version
        self._frames, self._iter = frames, batches

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the worker's policy."""
        return self._call(methodcaller("getattr_policy", attr))

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the worker's environment."""
        return self._call(methodcaller("getattr_env", attr))

    def get_distant_attr(self, attr: str) -> list[Any]:
        """The object that a path names in the worker's collector, as a list with one element."""
        return [self._call(methodcaller("get_distant_attr", attr))]

    def map_fn(
        self,
        method_name: str,
        list_of_args: list[tuple[Any, ...]] | None = None,
        list_of_kwargs: list[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of the worker's collector, with lists of one as arguments and result."""
        args, kwargs = self._normalize_worker_calls(list_of_args, list_of_kwargs)
        return [self._call(methodcaller("cascade_execute", method_name, *args[0], **kwargs[0]))]

    def _set_worker_attr(self, attr_name: str, value: Any) -> None:
        if not self.closed:
            self._call(setattr, attr_name, value)

    def _install_profile_hooks(self, config: ProfileConfig) -> None:
        if 0 in config.workers:
            self._set_worker_attr("post_collect_hook", worker_profiler(config))

    def _uninstall_profile_hooks(self, config: ProfileConfig) -> None:
        if not self.closed and 0 in config.workers:
            self._call(methodcaller("cascade_execute", "post_collect_hook.stop"))
            self._set_worker_attr("post_collect_hook", self._post_collect_hook)

    @property
    def procs(self) -> list[Any]:
        """The worker's process in a list, empty after :meth:`shutdown`."""
        return [] if self.closed else [self._worker.process]

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the worker, also in the middle of a batch. It may be called again.

        Args:
            timeout: seconds in which the worker has to close its environment, 10 by default; then
                it is killed.
            close_env: has to be ``True``: the environment ends with the worker.
            raise_on_error: whether to raise the errors of closing, or the error that ended the
                thread of :meth:`start` and was not raised yet.

        Raises:
            RuntimeError: ``close_env=False``.
        """
        if not close_env:
            raise RuntimeError(
                "close_env: expected True, got False; the environment ends with its process"
            )
        self._thread.stop()
        try:
            with self._ending:
                self._end(SHUTDOWN_S if timeout is None else timeout)
            self._thread.check()
        except Exception:
            if raise_on_error:
                raise

    def _end(self, timeout: float) -> None:
        if self.closed:
            return
        self._iterator = None
        try:
            if not self._worker.is_inherited:  # the worker belongs to the trainer, not to its forks
                with contextlib.ExitStack() as stack:
                    if self.num_threads:
                        stack.callback(torch.set_num_threads, self._former_threads)
                    stack.callback(self._weights.close)
                    stack.callback(self._thread.join, timeout)
                    self._worker.stop(timeout)
        except Exception:
            self.closed = True
            raise
        self.closed = True  # last, so that shutdown() can be called again after Ctrl-C

    async_shutdown: Any = BaseCollector.async_shutdown  # calls shutdown()

    def __enter__(self) -> AsyncCollector:
        """The collector, which is shut down at the end of the block."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)


aSyncDataCollector = AsyncCollector
