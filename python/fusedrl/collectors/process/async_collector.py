"""torchrl's ``AsyncCollector``: a collector in a process of its own."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl._utils import _get_mp_ctx
from torchrl.collectors import AsyncCollector as _AsyncCollector
from torchrl.collectors._base import BaseCollector, ProfileConfig, _ProfilerHook
from torchrl.collectors._constants import DEFAULT_EXPLORATION_TYPE
from torchrl.collectors.utils import _validate_traj_format
from torchrl.envs.utils import ExplorationType

from fusedrl.channel import WeightHandle
from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.process import worker_collector
from fusedrl.collectors.process.async_options import AsyncOptions
from fusedrl.collectors.process.batch_stream import BatchStream
from fusedrl.collectors.process.buffer_thread import BufferThread
from fusedrl.collectors.process.published_weights import PublishedWeights
from fusedrl.collectors.process.worker_job import PackedJob
from fusedrl.collectors.process.worker_process import SHUTDOWN_S, WorkerProcess
from fusedrl.collectors.progress import check_progress, progress_bar
from fusedrl.collectors.staleness import bounded
from fusedrl.collectors.stopwatch import Profile


def _option(name: str) -> property:
    """An attribute that reads and sets an option, which the parts of the collector share."""
    return property(
        lambda collector: getattr(collector._options, name),
        lambda collector, value: setattr(collector._options, name, value),
    )


class AsyncCollector(_AsyncCollector):
    """Collects in a process of its own, which goes on while the trainer trains.

    It takes the place of torchrl's class, and ``isinstance`` accepts it as one. Batches lie in
    memory that the worker wrote and that nobody copies; a batch that you keep stays as it is.
    Weights reach the worker through a :class:`fusedrl.WeightChannel`: an update returns at once,
    and every call of the policy computes with one whole version, the newest when it begins.

    Args:
        create_env_fn: a function that makes the environment, in the worker.
        policy: a module or another function of a tensordict. ``None`` takes random actions.
        policy_factory: a function that makes the policy, in the worker. If ``policy`` is given too,
            its weights are those that are sent.
        frames_per_batch: number of frames in a batch. With ``collector_class=LLMCollector`` it may
            be called ``dialog_turns_per_batch``.
        total_frames: number of frames in all, rounded up to whole batches; -1 never ends. With
            ``collector_class=LLMCollector`` it may be called ``total_dialog_turns``.
        device: the default of the next three arguments.
        storing_device: where the frames of a batch are gathered.
        env_device: where the environment runs.
        policy_device: where the policy computes.
        create_env_kwargs: arguments of ``create_env_fn``.
        max_frames_per_traj: number of frames after which a trajectory is reset.
        init_random_frames: number of first frames with random actions, rounded up to whole batches.
            Frames that are in ``replay_buffer`` already count.
        reset_at_each_iter: start new trajectories for each batch.
        postproc: a function that gets each batch in this process and returns what is yielded or
            stored.
        split_trajs: whether batches have shape (trajectories, time), with ``("collector",
            "mask")``.
        exploration_type: as for torchrl's ``set_exploration_type``.
        reset_when_done: has to be ``True``.
        update_at_each_batch: update the policy before the first batch and after each.
        preemptive_threshold: 0 to 1, without effect: one worker has nobody to wait for.
        num_threads: number of torch's threads in this process until :meth:`shutdown`; unchanged if
            ``None``.
        num_sub_threads: number of torch's threads in the worker.
        set_truncated: mark the last frame of each batch as truncated.
        track_policy_version: whether to tag frames, or the :class:`fusedrl.PolicyVersion` that tags
            them.
        use_buffers: whether the worker gathers frames in one preallocated tensordict.
        replay_buffer: a buffer of any kind, which is extended with each batch in this process; the
            iterator then yields ``None``.
        extend_buffer: without effect: a buffer gets whole batches.
        trust_policy: as in torchrl's ``Collector``.
        compile_policy: as in torchrl's ``Collector``.
        cudagraph_policy: as in torchrl's ``Collector``.
        no_cuda_sync: as in torchrl's ``Collector``.
        compact_obs: as in torchrl's ``Collector``.
        auto_register_policy_transforms: as in torchrl's ``Collector``.
        trajs_per_batch: as in torchrl's ``Collector``.
        trajs_per_write: as in torchrl's ``Collector``.
        traj_format: as in torchrl's ``Collector``.
        weight_updater: an updater of torchrl's or of ours, or a function that makes one. After each
            of its updates the weights of ``policy`` are published.
        weight_sync_schemes: :class:`fusedrl.ChannelWeightSyncScheme` objects by the names of their
            models. By default there is one for ``policy``, if it has weights.
        weight_recv_schemes: as in torchrl's class.
        collector_class: the collector in the worker: torchrl's ``Collector``, or
            :class:`fusedrl.LLMCollector` for dialogs, whose other arguments may be given then.
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
        progress: show a progress bar, with rich.
        verbose: log the same figures for each batch, unless there is a bar.
        timeout: seconds that a batch may take; ``None`` waits while the worker lives.
        kwargs: other arguments of ``collector_class=LLMCollector``.

    Raises:
        TypeError: arguments exclude each other or are not numbers, or an environment or a policy
            cannot be sent to another process.
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

    requested_frames_per_batch = _option("frames_per_batch")
    policy_version_tracker = _option("tracker")
    max_staleness = bounded("_options", "Versions that a batch may be behind when its turn comes.")
    closed = True  # until the constructor has succeeded
    num_workers = 1
    _ignore_rb = False  # torchrl's: whether whole trajectories go into the buffer elsewhere

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
        self._options = AsyncOptions(
            create_env_fn=create_env_fn,
            policy=policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            device=device,
            storing_device=storing_device,
            env_device=env_device,
            policy_device=policy_device,
            create_env_kwargs=create_env_kwargs,
            max_frames_per_traj=max_frames_per_traj,
            init_random_frames=init_random_frames,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            split_trajs=split_trajs,
            exploration_type=exploration_type,
            reset_when_done=reset_when_done,
            preemptive_threshold=preemptive_threshold,
            num_threads=num_threads,
            num_sub_threads=num_sub_threads,
            set_truncated=set_truncated,
            track_policy_version=track_policy_version,
            use_buffers=use_buffers,
            replay_buffer=replay_buffer,
            trust_policy=trust_policy,
            compile_policy=compile_policy,
            cudagraph_policy=cudagraph_policy,
            no_cuda_sync=no_cuda_sync,
            weight_updater=weight_updater,
            weight_sync_schemes=weight_sync_schemes,
            collector_class=collector_class,
            trajs_per_batch=trajs_per_batch,
            trajs_per_write=trajs_per_write,
            init_fn=init_fn,
            auto_register_policy_transforms=auto_register_policy_transforms,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
            compact_obs=compact_obs,
            channel=channel,
            channel_mode=channel_mode,
            prefetch=prefetch,
            max_staleness=max_staleness,
            timeout=timeout,
            of_dialogs=kwargs,
        )
        check_progress(progress)
        BaseCollector.__init__(
            self, pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook
        )
        self.progress, self.verbose = progress, verbose
        self.update_at_each_batch = update_at_each_batch
        self.traj_format = _validate_traj_format(
            traj_format, trajs_per_batch, has_replay_buffer=replay_buffer is not None
        )
        self.max_frames_per_traj = int(max_frames_per_traj or 0)
        self.init_random_frames = int(init_random_frames or 0)
        self._read_compile_kwargs(compile_policy, cudagraph_policy)
        self.storing_device, self.policy_device, self.env_device = self._get_devices(
            storing_device=storing_device,
            policy_device=policy_device,
            env_device=env_device,
            device=device,
        )
        # Re-entrant: the handler of a signal may call shutdown() while it is running.
        self._ending = threading.RLock()
        renew_in_children(self, _ending=threading.RLock)
        self._thread = BufferThread()
        self._former_threads = torch.get_num_threads()
        self._start_worker()
        if weight_recv_schemes is not None:
            self.register_scheme_receiver(weight_recv_schemes)

    def _start_worker(self) -> None:
        options = self._options
        with contextlib.ExitStack() as undo:
            if options.num_threads:
                undo.callback(torch.set_num_threads, self._former_threads)
                torch.set_num_threads(options.num_threads)
            self._weights = PublishedWeights(options, self)
            undo.callback(self._weights.close)
            self._weight_sync_schemes = self._weights.schemes
            names = ("storing_device", "policy_device", "env_device")
            devices = {name: getattr(self, name)[0] for name in names}
            job = options.job(self._weights.schemes, devices)
            self._worker = WorkerProcess(_get_mp_ctx(), PackedJob(job, self._weights.brought()))
            undo.callback(self._worker.stop, SHUTDOWN_S)
            self._use_buffers = self._worker.ready()  # torchrl's, of the worker's collector
            undo.pop_all()
        self._batches = BatchStream(self._worker, self._weights, options)
        self.closed = False

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are collected, or ``None`` if a buffer gets them.

        If Ctrl-C interrupts it, the next iterator goes on with the batch that was to come.
        """
        self._thread.refuse_others()
        self._thread.check()
        update = self.update_policy_weights_ if self.update_at_each_batch else None
        if update is not None:
            update()
        with progress_bar(self) as advance:
            yield from self._batches.take(update, advance, store=not self._ignore_rb)

    def next(self) -> TensorDictBase | None:
        """The next batch, without a device; ``None`` at the end, and if a buffer gets it."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            for batch in self._iterator:
                if batch is None or batch.device is None:
                    return batch
                return batch.copy().clear_device_()
        except BaseException:
            self._iterator = None  # this one has ended, and another one can go on
            raise
        self._iterator = None

    def start(self) -> None:
        """Fill the replay buffer from a thread, until the end or :meth:`async_shutdown`.

        An error in the thread is logged at once and raised by the next call.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one for start(), got None; pass it, or iterate"
            )
        self._thread.check()
        self._worker.check()
        by_frames = self.trajs_per_batch is None
        self._thread.start(self.iterator if by_frames else self._iter_by_trajectories)

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
        with self._batches.storing:
            yield

    @property
    def stale_frames(self) -> int:
        """Frames that ``max_staleness`` dropped."""
        return self._batches.taken.stale

    @property
    def _frames(self) -> int:
        return self._batches.frames

    @property
    def _iter(self) -> int:
        return self._batches.batches - 1

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

        With a ``channel`` it does nothing: the next call of the policy takes the newest version.

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

        A frame has the version of the policy's call that made it.
        """
        return self._weights.version

    def increment_version(self) -> None:
        """Count a version, also in the worker. The versions of a channel count by themselves."""
        version = self._weights.count()
        if version is not None and not self.closed:
            self._worker.set_version(version)

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
        return self._call(worker_collector.set_seed, seed, static_seed, anew=True)

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
        worker = self._call(worker_collector.state_dict)
        state = OrderedDict(worker0=worker, frames=self._frames, iter=self._iter)
        if "traj_pool" in worker:
            state["traj_pool"] = worker.pop("traj_pool")
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The policy's weights are published as one version, whose number is at least theirs.
        """
        worker = dict(state_dict["worker0"])
        if "traj_pool" in state_dict:
            worker["traj_pool"] = state_dict["traj_pool"]
        # Before the call, because the worker makes the next batch as soon as it has its state.
        version = self._weights.restore(worker, state_dict.get("policy_version"))
        strict = "policy" not in self._weights.schemes
        self._call(worker_collector.load_state_dict, worker, strict, anew=True)
        if version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version
        self._batches.count_on(state_dict["frames"], state_dict["iter"] + 1)

    def profile(self) -> Profile:
        """Where the worker's time went: policy, env, stamping, queueing (packing is in this).

        Raises:
            RuntimeError: the worker's collector does not measure it.
        """
        return self._call(worker_collector.profile)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the worker's policy."""
        return self._call(worker_collector.getattr_policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the worker's environment."""
        return self._call(worker_collector.getattr_env, attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What a path names in the worker's collector, as a list with one element."""
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
            self._set_worker_attr("post_collect_hook", _ProfilerHook(config, worker_idx=0))

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

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """As :meth:`shutdown`."""
        self.shutdown(timeout, close_env)

    def __enter__(self) -> AsyncCollector:
        """The collector, which is shut down at the end of the block."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)


# Arguments that are attributes under their own names.
_ATTRIBUTES = (
    *("policy", "policy_factory", "collector_class", "create_env_fn", "create_env_kwargs"),
    *("total_frames", "reset_at_each_iter", "trajs_per_batch", "trajs_per_write", "postproc"),
    *("replay_buffer", "exploration_type", "set_truncated", "num_threads", "num_sub_threads"),
    *("split_trajs", "preemptive_threshold", "prefetch", "timeout"),
)
for _name in _ATTRIBUTES:
    setattr(AsyncCollector, _name, _option(_name))
aSyncDataCollector = AsyncCollector
