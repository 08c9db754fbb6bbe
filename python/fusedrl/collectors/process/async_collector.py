"""Drop-in replacement for torchrl's ``AsyncCollector``: collects in a worker process."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from operator import methodcaller
from typing import Any

from torch import nn
from torchrl.collectors import AsyncCollector as _AsyncCollector
from torchrl.collectors import BaseCollector, Collector, MultiCollector
from torchrl.collectors.utils import split_trajectories

from fusedrl.channel import WeightHandle
from fusedrl.channel.checks import seconds
from fusedrl.channel.tensors import weights_in
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.options import (
    check_channel,
    check_one,
    check_total,
    check_versions,
    check_whole,
)
from fusedrl.collectors.policy_version import PolicyVersion, mark_padding
from fusedrl.collectors.process import worker
from fusedrl.collectors.process.worker_handle import SHUTDOWN_S, WorkerHandle
from fusedrl.collectors.stream import Batches, Stream, finished
from fusedrl.compat.torchrl import frames_of, process_context, trajectory_format
from fusedrl.weights.collector import POLICY_STATE
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme, of_policy
from fusedrl.weights.updaters import MultiProcessedRemoteWeightUpdate

DEVICES = "storing_device", "policy_device", "env_device"
# Arguments that torchrl's methods read in the trainer's process.
OF_TRAINER = {"split_trajs", "trajs_per_batch", "trajs_per_write", "verbose"}
NOT_LISTS = {"create_env_kwargs", "device", *DEVICES}  # torchrl accepts lists for several workers
OF_WORKER = {"update_at_each_batch", *(worker.make_collector.__kwdefaults__ or ())}
# Arguments of torchrl's collectors that are not supported here -> what to do instead.
UNSUPPORTED = {
    **dict.fromkeys(
        ("backend", "backend_options", "extend_buffer", "num_collectors", "preemptive_threshold"),
        "leave it out: there is one worker, and the trainer extends the buffer",
    ),
    "num_threads": "call torch.set_num_threads()",
    "queue": "put the turns of each batch into it in your loop",
    "weight_recv_schemes": "call register_scheme_receiver()",
}


class AsyncCollector(_AsyncCollector):
    """Collects in a worker process while the trainer trains.

    A subclass of torchrl's class that accepts the same arguments. Batches are in shared memory,
    without a copy in the trainer; a batch that you keep is not overwritten. Weight updates go
    through a :class:`fusedrl.WeightChannel` and return at once; each batch, or turn of dialogs,
    uses the version that is newest when it begins.

    Args:
        policy_factory: makes the policy in the worker; the weights of ``policy``, if given, are
            loaded into it.
        collector_class: the collector in the worker, or a function that makes it: torchrl's
            ``Collector``, or :class:`fusedrl.LLMCollector` for dialogs, with
            ``dialog_turns_per_batch`` and ``total_dialog_turns`` as names of the sizes.
        postproc, replay_buffer: applied to each batch in this process. Any buffer is supported.
        weight_sync_schemes: dict from model name to :class:`fusedrl.ChannelWeightSyncScheme`. The
            default is one for ``policy``, if it has weights.
        weight_updater: an updater of torchrl or fusedrl, or a function that makes one. After each
            of its updates the weights of ``policy`` are published.
        channel: handle of a channel that another process publishes, instead of both.
        max_staleness: drop batches whose oldest frame is more than this number of versions behind
            the newest one; ``stale_frames`` counts the dropped frames.
        prefetch: number of batches that the worker may be ahead; 0 collects on demand.
        timeout: longest wait for a batch in seconds; ``None`` waits while the worker is alive.
        collector_kwargs: arguments of ``collector_class``, torchrl's ``num_sub_threads``,
            ``init_fn``, ``update_at_each_batch`` and hooks, and ``channel_mode`` as for
            :class:`fusedrl.LLMCollector`.

    Raises:
        TypeError, ValueError: arguments are invalid, mutually exclusive, unknown to
            ``collector_class``, or cannot be pickled.
        Exception: any exception of the worker.

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
    split_trajs = False
    _ignore_rb = False  # torchrl's: whether it writes whole trajectories itself
    policy_version_tracker: Any
    procs: Any = ()  # torchrl's: the running worker process
    _weight_sync_schemes: Any
    _reader: Any = None  # the channel that another process publishes
    _versioned: Any = None  # the reader or scheme with the version of the weights
    _frames, _iter = 0, -1

    def __init__(
        self,
        create_env_fn: Any,
        policy: Callable[[Any], Any] | None = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        collector_class: Callable[..., Any] | None = None,
        frames_per_batch: int | None = None,
        total_frames: float | None = -1,
        postproc: Callable[[Any], Any] | None = None,
        replay_buffer: Any = None,
        weight_sync_schemes: dict[str, Any] | None = None,
        weight_updater: Any = None,
        channel: WeightHandle | None = None,
        track_policy_version: bool | PolicyVersion = False,
        max_staleness: int | None = None,
        prefetch: int = 1,
        timeout: float | None = None,
        **collector_kwargs: Any,
    ) -> None:
        kind, given = Collector if collector_class is None else collector_class, collector_kwargs
        dialogs = _check_names(kind, given)
        per_batch = "dialog_turns_per_batch" if dialogs else "frames_per_batch"
        total_name = "total_dialog_turns" if dialogs else "total_frames"
        endless = None if total_frames == -1 else total_frames
        check_one(**{"frames_per_batch": frames_per_batch, per_batch: given.get(per_batch)})
        check_one(**{"total_frames": endless, total_name: given.get(total_name)})
        frames, total = given.pop(per_batch, frames_per_batch), given.pop(total_name, total_frames)
        check_whole(per_batch, frames, 1, optional=dialogs)
        check_whole("prefetch", prefetch, 0, optional=False)
        check_versions(track_policy_version, max_staleness)
        check_channel(channel, given.get("channel_mode", "alias"), WeightHandle)
        check_one(
            weight_updater=weight_updater, weight_sync_schemes=weight_sync_schemes, channel=channel
        )
        self.requested_frames_per_batch: Any = frames
        self.total_frames: Any = check_total(total_name, total)
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.policy, self.postproc, self.replay_buffer = policy, postproc, replay_buffer
        self.prefetch, self.max_staleness = prefetch, max_staleness
        track = track_policy_version
        self.policy_version_tracker = PolicyVersion() if track is True else track or None
        of_worker = self._store_arguments(given)
        given |= {per_batch: frames, "track_policy_version": self.policy_version_tracker or False}
        if dialogs:
            given[total_name] = total
            if replay_buffer is not None and not given.get("yield_only_last_steps"):
                given["flatten_data"] = given.get("flatten_data") is not False
        else:
            stored = getattr(replay_buffer, "write_count", 0)
            given["init_random_frames"] = max(self.init_random_frames - stored, 0)
            given["return_same_td"] = True  # safe: each batch is copied before the next one
        inspect.signature(kind).bind(create_env_fn, policy=policy, **given)
        make = partial(kind, create_env_fn, **given)
        make = partial(worker.make_collector, make, policy_factory or (lambda: policy), channel)
        self._stream = Stream(self)
        self._thread = self._stream
        # Re-entrant: a signal handler may call shutdown() during shutdown().
        self._ending = threading.RLock()
        self._weight_sync_schemes = weight_sync_schemes or {}
        self._start_worker(partial(make, **of_worker), channel, weight_updater)
        self.closed, self.procs = False, [self._worker.process]

    def _store_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Store the arguments of the trainer's process; returns those of the worker process."""
        vars(self).update({name: given.pop(name) for name in given.keys() & OF_TRAINER})
        traj_format, has_buffer = given.pop("traj_format", None), self.replay_buffer is not None
        self.traj_format = trajectory_format(traj_format, self.trajs_per_batch, has_buffer)
        # torchrl's methods read these from the trainer's collector.
        devices: Any = {name: given.get(name) for name in ("device", *DEVICES)}
        vars(self).update(zip(DEVICES, self._get_devices(**devices), strict=True))
        self.reset_at_each_iter = given.get("reset_at_each_iter", False)
        self.init_random_frames = given.get("init_random_frames") or 0
        of_worker = {name: given.pop(name) for name in given.keys() & OF_WORKER}
        self.update_at_each_batch = of_worker.pop("update_at_each_batch", False)
        hooks = {name: of_worker[name] for name in of_worker if name.endswith("hook")}
        BaseCollector.__init__(self, **hooks)
        return of_worker

    def _start_worker(self, make: Callable[..., Any], channel: Any, updater: Any) -> None:
        """Publish the initial weights and start the worker; undo both if that fails."""
        for name, scheme in self._weight_sync_schemes.items():
            if not issubclass(type(scheme), ChannelWeightSyncScheme):
                raise ValueError(
                    f"weight_sync_schemes: expected ChannelWeightSyncScheme for {name!r}, got "
                    f"{type(scheme).__name__}; leave it out for the default scheme"
                )
        if updater is not None and not hasattr(updater, "register_collector"):
            updater = updater()
        places = weights_in(self.policy) if isinstance(self.policy, nn.Module) else []
        schemes, weights = self._weight_sync_schemes, None
        if not places and isinstance(updater, MultiProcessedRemoteWeightUpdate):
            weights = next(iter(updater.policy_weights.values()), None)
        if not schemes and channel is None and (places or weights is not None):
            schemes["policy"] = ChannelWeightSyncScheme()
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_weights)
            self._connect(channel, weights)
            self.weight_updater = updater
            job = worker.Job(partial(make, schemes=dict(schemes)), places, schemes.get("policy"))
            self._worker = WorkerHandle(process_context(), job)
            # Ctrl-C may come from here on, and multiprocessing joins its children at exit.
            Finalize(self, self._worker.stop, (SHUTDOWN_S,), exitpriority=100)
            undo.callback(self._worker.stop, SHUTDOWN_S)
            self._worker.start()
            self._worker.call(frames_of)  # raises errors of the constructor of the collector
            undo.pop_all()

    def _connect(self, channel: WeightHandle | None, weights: Any) -> None:
        """Open the channel, or publish the initial weights through the schemes."""
        self._reader = None if channel is None else channel.open()
        for name, scheme in self._weight_sync_schemes.items():
            scheme.init_on_sender(model_id=name, context=self, weights=weights)
            scheme.connect()
        self._versioned = self._reader or next(iter(of_policy(self._weight_sync_schemes)), None)

    def _close_weights(self) -> None:
        """Close the channels; ``policy_version`` keeps the last version."""
        if self._versioned is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = self.policy_version
        for scheme in self._weight_sync_schemes.values():
            if scheme.context is self:  # not a refused scheme, which another collector uses
                scheme.shutdown()
        if self._reader is not None:
            self._reader.close()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches; an error shuts the collector down."""
        return Batches(super().__iter__)

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames``, or ``None`` for each batch sent to a buffer."""
        while taken := self._stream.take():
            yield taken.pop()  # so that this frame does not keep the batch

    def _next_batch(self) -> Any:
        if self._frames >= self.total_frames:
            return None
        if self.update_at_each_batch and self._iter < 0:
            self.update_policy_weights_()
        batch, frames = self._worker.batch(self.timeout)
        if batch is not None:
            self._frames = self._frames + batch.numel() if frames is None else frames
            self._iter += 1
        return batch

    def _prefetch_next(self) -> None:
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

    def _iter_by_trajectories(self) -> Iterator[Any]:
        for batch in super()._iter_by_trajectories():
            yield batch if batch is None else mark_padding(batch)

    def start(self) -> None:
        """Fill the buffer from a thread until shutdown; its errors are raised by the next call."""
        self._thread.check()
        self._worker.check()
        iterate = self._iter_by_trajectories if self.trajs_per_batch else self.iterator
        self._thread.start(iterate)

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._thread.is_running()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which the buffer gets no batches; the worker collects up to ``prefetch``."""
        self._thread.check()
        if not self.is_running():
            raise RuntimeError("pause: expected a running thread, got none; call start() first")
        with self._stream.storing:
            yield

    @property
    def stale_frames(self) -> int:
        """Number of frames dropped because of ``max_staleness``."""
        return self._stream.dropped

    @BaseCollector.weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        """The weight updater, or ``None``. Setting one registers it with this collector."""
        if value is not None and self._reader is not None:
            raise RuntimeError("channel: expected weights through it, got an updater; publish them")
        schemes = of_policy(self._weight_sync_schemes)
        publishes = isinstance(value, MultiProcessedRemoteWeightUpdate)
        if isinstance(value, MultiProcessedRemoteWeightUpdate) and len(schemes) == 1:
            value.publish_with(schemes[0])  # otherwise it raises
        BaseCollector.weight_updater.fset(self, value)  # pyright: ignore[reportOptionalCall]
        if value is not None and not publishes:
            publish = weakref.WeakMethod(self._publish)
            self.weight_updater.register_post_hook(lambda: (call := publish()) and call())

    def _publish(self) -> None:
        """Publish the weights that an updater wrote to the policy, as one version."""
        for scheme in of_policy(self._weight_sync_schemes):
            scheme.send()
        self.increment_version()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Publish one version of the weights without waiting; with ``channel=`` do nothing."""
        self._thread.check()
        if self._reader is None:
            super().update_policy_weights_(*args, **kwargs)
        elif args or kwargs:
            raise RuntimeError("channel: expected weights through it, got an update; publish them")

    @property
    def policy_version(self) -> Any:
        """The newest published version; ``None`` if versions are not tracked."""
        tracked = super().policy_version
        newest = None if self.closed or self._versioned is None else self._versioned.version
        return tracked if tracked is None or newest is None else newest

    def increment_version(self) -> None:
        """Increment the version here and in the worker, unless a channel defines it."""
        if self._versioned is None and self.policy_version_tracker is not None:
            self.policy_version_tracker.increment_version()
            if not self.closed:
                self._worker.call(worker.set_version, self.policy_version, waits=False)

    def _call(self, function: Callable[..., Any], *args: Any, anew: bool = False) -> Any:
        """Call a function in the worker; ``anew`` drops the prefetched batches."""
        self._thread.check()
        return self._worker.call(function, *args, frames=self._frames if anew else None)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment, torch and numpy in the worker, and reset the environment."""
        return self._call(worker.set_seed, seed, static_seed, anew=True)

    def reset(self, reset_idx: Any = None) -> None:
        """Start new trajectories, unless ``reset_idx`` is ``[False]``; drops prefetched frames."""
        self._flush_trajectory_assembly()
        if reset_idx is None or any(reset_idx):
            self._call(methodcaller("reset"), anew=True)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state of the worker (``"worker0"``) and the counts (``"frames"``, ``"iter"``)."""
        state = OrderedDict(worker0=self._call(worker.state_on_cpu))
        state |= {"frames": self._frames, "iter": self._iter}
        if "traj_pool" in state["worker0"]:
            state["traj_pool"] = state["worker0"].pop("traj_pool")
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The policy's weights are published under their version or a greater one. The trainer's model
        is not changed. A state that does not match changes nothing.
        """
        if missing := {"worker0", "frames", "iter"} - {*state_dict}:
            raise KeyError(
                f"state_dict: expected {min(missing)!r} in it, got none; load what state_dict() of "
                "an AsyncCollector returned"
            )
        state, version = dict(state_dict["worker0"]), state_dict.get("policy_version")
        frames, batches = state_dict["frames"], state_dict["iter"]
        check_whole("frames", frames, 0, optional=False)
        check_whole("iter", batches, -1, optional=False)
        check_whole("policy_version", version, 0)
        if "traj_pool" in state_dict:
            state["traj_pool"] = state_dict["traj_pool"]
        schemes, weights = of_policy(self._weight_sync_schemes), state.get(POLICY_STATE)
        has_scheme = "policy" in self._weight_sync_schemes  # for all weights
        if has_scheme:
            state.pop(POLICY_STATE, None)
        if self._versioned is not None:
            state.pop("policy_version", None)  # comes from the channel
        self._call(worker.load_state, state, not has_scheme, False)
        for scheme in schemes:
            scheme.restore(weights, version)
        if not schemes and version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version
        self._frames, self._iter = frames, batches
        # Drop batches that the worker has collected meanwhile with other weights.
        self._call(worker.load_state, state, False, True, anew=True)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the worker's policy."""
        return self._call(methodcaller("getattr_policy", attr))

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the worker's environment."""
        return self._call(methodcaller("getattr_env", attr))

    def get_distant_attr(self, attr: str) -> list[Any]:
        """The attribute with this path in the worker's collector, as a list of one."""
        return [self._call(methodcaller("get_distant_attr", attr))]

    def map_fn(self, method_name: str, list_of_args: Any = None, list_of_kwargs: Any = None) -> Any:
        """Call a method of the worker's collector, with lists of one as arguments and result."""
        args, kwargs = self._normalize_worker_calls(list_of_args, list_of_kwargs)
        return [self._call(methodcaller("cascade_execute", method_name, *args[0], **kwargs[0]))]

    def _set_worker_attr(self, attr_name: str, value: Any) -> None:
        if not self.closed:
            self._call(setattr, attr_name, value)

    def _install_profile_hooks(self, config: Any) -> None:
        super(MultiCollector, self)._install_profile_hooks(config)  # sets post_collect_hook

    def _uninstall_profile_hooks(self, config: Any) -> None:
        if not self.closed:
            self.map_fn("post_collect_hook.fn.stop")
            self.post_collect_hook = self._saved_post_collect_hook

    def _shutdown_main(self, timeout: float | None = None) -> None:
        """Stop the worker, also during a batch; kill it after ``timeout`` seconds."""
        self._thread.stop()
        timeout, self._iterator = SHUTDOWN_S if timeout is None else timeout, None
        with self._ending:
            # A fork of the trainer must not stop the worker.
            if not self.closed and not self._worker.is_inherited:
                self._worker.stop(timeout)
                self._thread.join(timeout)
                self._close_weights()
            self.closed, self.procs = True, []  # last, so that Ctrl-C allows another call
        self._thread.check()

    def __enter__(self) -> AsyncCollector:
        """The collector; it is shut down at the end of the block."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut down, without masking an exception of the block."""
        self.shutdown(raise_on_error=kind is None)


def _check_names(kind: Callable[..., Any], given: dict[str, Any]) -> bool:
    """Check the arguments of the worker's class; returns whether it collects dialogs."""
    bases = [each for each in (LLMCollector, Collector) if each in getattr(kind, "__mro__", ())]
    # A class passes unknown arguments on to its base; those of a function cannot be checked.
    parameters = [p for c in (kind, *bases[:1]) for p in inspect.signature(c).parameters.values()]
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for name in given.keys() - OF_WORKER:
        if name in UNSUPPORTED or (bases and name not in known):
            remedy = (
                f"{getattr(kind, '__name__', kind)} has no such argument: correct the name or "
                "leave it out; bind arguments of create_env_fn with functools.partial"
            )
            raise TypeError(
                f"AsyncCollector.__init__() got an unexpected keyword argument {name!r}; "
                f"{UNSUPPORTED.get(name, remedy)}"
            )
        if name in NOT_LISTS and isinstance(given[name], list):
            raise TypeError(f"{name}: expected a single value, got a list; pass its element")
    return "dialog_turns_per_batch" in known | given.keys()


aSyncDataCollector = AsyncCollector
