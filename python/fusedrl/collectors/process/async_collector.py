"""torchrl's ``AsyncCollector``: a collector in a process of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl._utils import _get_mp_ctx
from torchrl.collectors import Collector
from torchrl.collectors._base import BaseCollector
from torchrl.collectors._constants import DEFAULT_EXPLORATION_TYPE
from torchrl.collectors.utils import _validate_traj_format
from torchrl.envs.utils import ExplorationType

from fusedrl.channel import WeightHandle
from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.process.arguments import (
    DEVICES,
    check_arguments,
    collector_options,
    dialog_options,
    environment,
    is_of_dialogs,
    name_sizes,
)
from fusedrl.collectors.process.calls import Done
from fusedrl.collectors.process.iteration import AsyncIteration
from fusedrl.collectors.process.sealed import Job, Sealed
from fusedrl.collectors.process.shared_batches import Mappings
from fusedrl.collectors.process.updates import tracker_of
from fusedrl.collectors.process.worker_process import SHUTDOWN_S, WorkerProcess
from fusedrl.collectors.progress import check_progress
from fusedrl.collectors.queues import QueueBuffer

# Arguments that are attributes under their own names.
KEPT = (
    *("policy", "policy_factory", "collector_class", "postproc", "reset_at_each_iter"),
    *("update_at_each_batch", "exploration_type", "set_truncated", "num_threads"),
    *("num_sub_threads", "create_env_fn", "create_env_kwargs", "prefetch", "max_staleness"),
    *("progress", "verbose", "timeout"),
)


class AsyncCollector(AsyncIteration):
    """Collect in a process of its own, which goes on while the trainer trains.

    Takes the place of torchrl's class, and is one for ``isinstance``. Batches lie in memory that
    the worker wrote and nobody copies; one that is kept stays as it is. Weights reach the worker
    through a :class:`fusedrl.WeightChannel`: an update returns at once, and every call of the
    policy computes with one whole version, the newest when it begins.

    Args:
        create_env_fn: makes the environment, in the worker.
        policy: a module, or another function of a tensordict; random actions if ``None``.
        policy_factory: makes the policy, in the worker. With ``policy`` too, that one has the
            weights.
        frames_per_batch: frames in a batch. Dialogs call it ``dialog_turns_per_batch``: with
            ``collector_class=LLMCollector`` either name is taken.
        total_frames: frames in all, rounded up to whole batches; -1 never ends. Dialogs call it
            ``total_dialog_turns``, in the same way.
        device: stands in for each of the next three that is left out.
        storing_device: where frames of a batch are gathered.
        env_device: where the environment runs.
        policy_device: where the policy computes.
        create_env_kwargs: arguments of ``create_env_fn``.
        max_frames_per_traj: reset after so many frames of a trajectory.
        init_random_frames: so many frames are of random actions, rounded up to whole batches; what
            is in ``replay_buffer`` already counts.
        reset_at_each_iter: start new trajectories for each batch.
        postproc: is given each batch in this process, and returns what is to be yielded or stored.
        split_trajs: batches of shape (trajectories, time) with ``("collector", "mask")``.
        exploration_type: as of torchrl's ``set_exploration_type``.
        reset_when_done: ``True``.
        update_at_each_batch: update the policy before the first batch and after each.
        preemptive_threshold: 0 to 1; one worker has nobody to wait for.
        num_threads: torch's threads in this process until :meth:`shutdown`; unchanged if ``None``.
        num_sub_threads: torch's threads in the worker.
        set_truncated: mark the last frame of each batch as truncated.
        track_policy_version: whether to tag frames, or with which :class:`fusedrl.PolicyVersion`.
        use_buffers: whether the worker gathers frames in one preallocated tensordict.
        replay_buffer: is extended with each batch in this process, of whatever kind it is; the
            iterator yields ``None``.
        extend_buffer: has no effect: a buffer gets whole batches.
        trust_policy, compile_policy, cudagraph_policy, no_cuda_sync, compact_obs,
            auto_register_policy_transforms, trajs_per_batch, trajs_per_write, traj_format: as of
            torchrl's ``Collector``.
        weight_updater: torchrl's or ours (or a function that makes it). After each of its updates
            the weights of ``policy`` are published.
        weight_sync_schemes: :class:`fusedrl.ChannelWeightSyncScheme` by the name of their model. By
            default one for ``policy``, if it has weights.
        weight_recv_schemes: as of torchrl's.
        collector_class: what collects: torchrl's ``Collector``, or :class:`fusedrl.LLMCollector`
            for dialogs, whose other arguments may be given then.
        init_fn: is called first in the worker.
        pre_collect_hook: is called before each batch, in the worker.
        post_collect_hook: is given each batch, in the worker.
        channel: handle of weights that others publish, in the place of schemes and updaters.
        channel_mode: ``"alias"`` or ``"copy"``, as of :meth:`fusedrl.WeightReader.load_into`.
        prefetch: batches that the worker may have ready, or under way, while one is used here; 0
            collects on demand.
        max_staleness: drop a batch if its oldest frame is more than so many versions behind the
            newest published one when its turn comes; ``stale_frames`` counts what is dropped.
        progress: show a progress bar, with rich.
        verbose: log the same for each batch, unless there is a bar.
        timeout: seconds that a batch may take; ``None`` waits as long as the worker lives.
        kwargs: of ``collector_class=LLMCollector``.

    Raises:
        TypeError: arguments that exclude each other, or are no numbers; an environment or a policy
            that cannot be sent to another process.
        ValueError: numbers out of range; schemes of another kind; several workers' values.
        Exception: what making the environment or the policy raises in the worker, with its
            traceback as the cause.

    Example:
        >>> from torchrl.testing.mocking_classes import CountingEnv
        >>> from fusedrl import AsyncCollector
        >>> if __name__ == "__main__":
        ...     with AsyncCollector(CountingEnv, frames_per_batch=4, total_frames=8) as collector:
        ...         print([tuple(batch.shape) for batch in collector])
        [(4,), (4,)]
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        frames_per_batch: int | None = None,
        total_frames: int | None = -1,
        device: Any = None,
        storing_device: Any = None,
        env_device: Any = None,
        policy_device: Any = None,
        create_env_kwargs: Any = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: ExplorationType = DEFAULT_EXPLORATION_TYPE,
        reset_when_done: bool = True,
        update_at_each_batch: bool = False,
        preemptive_threshold: float | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        set_truncated: bool = False,
        track_policy_version: Any = False,
        use_buffers: bool | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        compile_policy: bool | dict[str, Any] | None = None,
        cudagraph_policy: bool | dict[str, Any] | None = None,
        no_cuda_sync: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: dict[str, Any] | None = None,
        weight_recv_schemes: dict[str, Any] | None = None,
        collector_class: Any = None,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: Any = None,
        init_fn: Callable[[], None] | None = None,
        auto_register_policy_transforms: bool | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
        compact_obs: bool = False,
        channel: WeightHandle | None = None,
        channel_mode: str = "alias",
        prefetch: int = 1,
        max_staleness: int | None = None,
        progress: bool = False,
        verbose: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        self.closed, self._worker = True, None
        self._dialogs = is_of_dialogs(collector_class)
        if self._dialogs:
            name_sizes(given, kwargs)
        check_arguments(given, kwargs)
        check_progress(progress)
        BaseCollector.__init__(
            self, pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook
        )
        queue = kwargs.get("queue")
        self.replay_buffer = replay_buffer if queue is None else QueueBuffer(queue)
        self.traj_format = _validate_traj_format(
            traj_format, trajs_per_batch, has_replay_buffer=replay_buffer is not None
        )
        self.trajs_per_batch, self.trajs_per_write = trajs_per_batch, trajs_per_write
        for name in KEPT:
            setattr(self, name, given[name])
        self._set_numbers(given)
        self.num_workers = 1
        self.storing_device, self.policy_device, self.env_device = self._get_devices(
            **{name: given[name] for name in DEVICES}
        )
        self._read_compile_kwargs(compile_policy, cudagraph_policy)
        self.policy_version_tracker = tracker_of(track_policy_version)
        threads = torch.get_num_threads()
        self._former_threads = threads if num_threads else None
        if num_threads:
            torch.set_num_threads(num_threads)
        try:
            self._set_up_weights(weight_sync_schemes, weight_updater, channel)
            sealed = Sealed(self._job(given, kwargs), self._brought())
            self._worker = WorkerProcess(_get_mp_ctx(), sealed, self._mappings)
            self.closed = False
            ready = self._worker.ready()
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise
        self._use_buffers = ready["use_buffers"]  # torchrl's, of the worker's collector
        if weight_recv_schemes is not None:
            self.register_scheme_receiver(weight_recv_schemes)

    def _set_numbers(self, given: dict[str, Any]) -> None:
        total, wanted = given["total_frames"], given["frames_per_batch"]
        endless = total in (None, -1, float("inf"))
        self.total_frames = float("inf") if endless else int(total)
        self.requested_frames_per_batch = wanted
        self.split_trajs = bool(given["split_trajs"])
        self.max_frames_per_traj = int(given["max_frames_per_traj"] or 0)
        self.init_random_frames = int(given["init_random_frames"] or 0)
        threshold = given["preemptive_threshold"]
        self.preemptive_threshold = 1.0 if threshold is None else float(threshold)
        self._done = self._loaded = Done()
        self._mappings = Mappings()
        self._thread = self._thread_error = None
        self._stop = False
        self._storing = threading.Lock()  # held while a batch goes into the buffer
        # A signal's handler may shut down what is shutting down.
        self._ending = threading.RLock()
        renew_in_children(self, _ending=threading.RLock)

    def _job(self, given: dict[str, Any], more: dict[str, Any]) -> Job:
        """What the worker is started with."""
        if self._dialogs:
            options = dialog_options(given, more)
        else:
            names = ("storing_device", "policy_device", "env_device")
            options = collector_options(given, {name: getattr(self, name)[0] for name in names})
        return Job(
            collector_class=given["collector_class"] or Collector,
            env=environment(given, self._dialogs),
            policy=None if given["policy_factory"] is not None else self.policy,
            policy_factory=given["policy_factory"],
            options={**options, "track_policy_version": self.policy_version_tracker or False},
            schemes=dict(self._weight_sync_schemes),
            channel=given["channel"],
            channel_mode=given["channel_mode"],
            init_fn=given["init_fn"],
            hooks={name: given[name] for name in ("pre_collect_hook", "post_collect_hook")},
            threads=given["num_sub_threads"],
            dated=given["max_staleness"] is not None,
        )

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the worker, in the middle of a batch if need be; may be called again.

        Args:
            timeout: seconds that the worker has to close its environment, 10 by default; it is
                killed after that.
            close_env: ``True``: the environment ends with the worker.
            raise_on_error: whether to raise what closing raises, or what ended the thread of
                :meth:`start` and was not raised yet.

        Raises:
            RuntimeError: ``close_env=False``.
        """
        if not close_env:
            raise RuntimeError(
                "close_env: expected True, got False; the environment ends with its process"
            )
        timeout = SHUTDOWN_S if timeout is None else timeout
        self._stop = True
        try:
            with self._ending:
                self._end(timeout)
            if raise_on_error:
                self._raise_thread_error()
            self._thread_error = None
        except Exception:
            if raise_on_error:
                raise

    def _end(self, timeout: float) -> None:
        worker = self._worker
        if worker is None or worker.is_inherited:  # a process forked from the trainer has no worker
            self.closed, self._worker = True, None
            return
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._close_weights)
                stack.callback(self._join_thread, timeout)
                worker.stop(timeout)
            self._worker = None
        except Exception:
            self._worker = None
            raise
        finally:
            self.closed, self._iterator = True, None
            self._mappings.close()
            if self._former_threads is not None:
                torch.set_num_threads(self._former_threads)

    def _join_thread(self, timeout: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """As :meth:`shutdown`."""
        self.shutdown(timeout, close_env)

    def __enter__(self) -> AsyncCollector:
        """The collector, which is shut down at the end of the block."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)


aSyncDataCollector = AsyncCollector
