"""torchrl's ``AsyncCollector``: a collector in a process of its own."""

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
# Arguments that are followed in the trainer's process, where torchrl's methods read them.
WITH_TRAINER = {"split_trajs", "trajs_per_batch", "trajs_per_write", "verbose"}
OF_ONE_WORKER = {"create_env_kwargs", "device", *DEVICES}  # for several, torchrl takes lists
OF_PROCESS = {"update_at_each_batch", *(worker.make_collector.__kwdefaults__ or ())}
# Arguments of torchrl's, or of dialogs, that are none here, and what to do instead.
INSTEAD = {
    **dict.fromkeys(
        ("backend", "backend_options", "extend_buffer", "num_collectors", "preemptive_threshold"),
        "leave it out: a collector has one process, whose batches a buffer gets",
    ),
    "num_threads": "call torch.set_num_threads()",
    "queue": "put the turns of each batch into it in the loop",
    "weight_recv_schemes": "call register_scheme_receiver()",
}


class AsyncCollector(_AsyncCollector):
    """Collects in a process of its own, which goes on while the trainer trains.

    It takes the place of torchrl's class, with its arguments, and ``isinstance`` accepts it as one.
    Batches lie in memory that the worker wrote and that nobody copies; a batch that you keep stays
    as it is. An update of the weights, through a :class:`fusedrl.WeightChannel`, returns at once;
    each batch, or turn of dialogs, computes with the version that is newest when it begins.

    Args:
        policy_factory: makes the policy in the worker. It gets the weights of ``policy``, if given.
        collector_class: the collector in the worker, or a function that makes it: torchrl's
            ``Collector``, or :class:`fusedrl.LLMCollector` for dialogs, which may call the sizes
            ``dialog_turns_per_batch`` and ``total_dialog_turns``.
        postproc, replay_buffer: get each batch in this process. A buffer may be of any kind.
        weight_sync_schemes: :class:`fusedrl.ChannelWeightSyncScheme` objects by the names of their
            models. By default there is one for ``policy``, if it has weights.
        weight_updater: an updater of torchrl's or of ours, or a function that makes one. After each
            of its updates the weights of ``policy`` are published.
        channel: handle of a channel that another process publishes, instead of both.
        max_staleness: most versions that a batch's oldest frame may be behind the newest one when
            the batch is handed out. Others are dropped; ``stale_frames`` counts their frames.
        prefetch: number of batches that the worker may be ahead; 0 collects on demand.
        timeout: seconds that a batch may take; ``None`` waits while the worker lives.
        collector_kwargs: arguments of ``collector_class``, torchrl's ``num_sub_threads``,
            ``init_fn``, ``update_at_each_batch`` and hooks, and ``channel_mode`` as for
            :class:`fusedrl.LLMCollector`.

    Raises:
        TypeError, ValueError: arguments exclude each other, are out of range or of another kind, or
            cannot be sent to another process; ``collector_class`` has not all of them.
        Exception: what has been raised in the worker.

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
    _ignore_rb = False  # torchrl's: whether whole trajectories go into the buffer elsewhere
    policy_version_tracker: Any
    procs: Any = ()  # torchrl's: the worker's process, while there is one
    _weight_sync_schemes: Any
    _reader: Any = None  # the channel that another process publishes
    _numbered: Any = None  # what has the number of the policy's weights
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
        in_all = "total_dialog_turns" if dialogs else "total_frames"
        endless = None if total_frames == -1 else total_frames
        check_one(**{"frames_per_batch": frames_per_batch, per_batch: given.get(per_batch)})
        check_one(**{"total_frames": endless, in_all: given.get(in_all)})
        frames, total = given.pop(per_batch, frames_per_batch), given.pop(in_all, total_frames)
        check_whole(per_batch, frames, 1, optional=dialogs)
        check_whole("prefetch", prefetch, 0, optional=False)
        check_versions(track_policy_version, max_staleness)
        check_channel(channel, given.get("channel_mode", "alias"), WeightHandle)
        check_one(
            weight_updater=weight_updater, weight_sync_schemes=weight_sync_schemes, channel=channel
        )
        self.requested_frames_per_batch: Any = frames
        self.total_frames: Any = check_total(in_all, total)
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.policy, self.postproc, self.replay_buffer = policy, postproc, replay_buffer
        self.prefetch, self.max_staleness = prefetch, max_staleness
        track = track_policy_version
        self.policy_version_tracker = PolicyVersion() if track is True else track or None
        of_process = self._keep(given)
        given |= {per_batch: frames, "track_policy_version": self.policy_version_tracker or False}
        if dialogs:
            given[in_all] = total
            if replay_buffer is not None and not given.get("yield_only_last_steps"):
                given["flatten_data"] = given.get("flatten_data") is not False
        else:
            stored = getattr(replay_buffer, "write_count", 0)
            given["init_random_frames"] = max(self.init_random_frames - stored, 0)
            given["return_same_td"] = True  # each batch is copied before the next one is made
        inspect.signature(kind).bind(create_env_fn, policy=policy, **given)
        make = partial(kind, create_env_fn, **given)
        make = partial(worker.make_collector, make, policy_factory or (lambda: policy), channel)
        self._stream = Stream(self)
        self._thread = self._stream
        # Re-entrant: the handler of a signal may call shutdown() while it is running.
        self._ending = threading.RLock()
        self._weight_sync_schemes = weight_sync_schemes or {}
        self._start_worker(partial(make, **of_process), channel, weight_updater)
        self.closed, self.procs = False, [self._worker.process]

    def _keep(self, given: dict[str, Any]) -> dict[str, Any]:
        """Keep the arguments that are followed here; returns those of the worker's process."""
        vars(self).update({name: given.pop(name) for name in given.keys() & WITH_TRAINER})
        traj_format, has_buffer = given.pop("traj_format", None), self.replay_buffer is not None
        self.traj_format = trajectory_format(traj_format, self.trajs_per_batch, has_buffer)
        # torchrl's own code reads these from the trainer's collector.
        devices: Any = {name: given.get(name) for name in ("device", *DEVICES)}
        vars(self).update(zip(DEVICES, self._get_devices(**devices), strict=True))
        self.reset_at_each_iter = given.get("reset_at_each_iter", False)
        self.init_random_frames = given.get("init_random_frames") or 0
        of_process = {name: given.pop(name) for name in given.keys() & OF_PROCESS}
        self.update_at_each_batch = of_process.pop("update_at_each_batch", False)
        hooks = {name: of_process[name] for name in of_process if name.endswith("hook")}
        BaseCollector.__init__(self, **hooks)
        return of_process

    def _start_worker(self, make: Callable[..., Any], channel: Any, updater: Any) -> None:
        """Publish the first weights, and start the process; if that fails, nothing is left."""
        for name, scheme in self._weight_sync_schemes.items():
            if not issubclass(type(scheme), ChannelWeightSyncScheme):
                raise ValueError(
                    f"weight_sync_schemes: expected ChannelWeightSyncScheme for {name!r}, got "
                    f"{type(scheme).__name__}, whose updates it has too: leave it out"
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
            # Ctrl-C may come anywhere from here on, and multiprocessing joins its children at exit.
            Finalize(self, self._worker.stop, (SHUTDOWN_S,), exitpriority=100)
            undo.callback(self._worker.stop, SHUTDOWN_S)
            self._worker.start()
            self._worker.call(frames_of)  # raises what making the collector has raised
            undo.pop_all()

    def _connect(self, channel: WeightHandle | None, weights: Any) -> None:
        """Open the channel, or publish the first weights by the schemes."""
        self._reader = None if channel is None else channel.open()
        for name, scheme in self._weight_sync_schemes.items():
            scheme.init_on_sender(model_id=name, context=self, weights=weights)
            scheme.connect()
        self._numbered = self._reader or next(iter(of_policy(self._weight_sync_schemes)), None)

    def _close_weights(self) -> None:
        """Close the channels; the last version can still be read."""
        if self._numbered is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = self.policy_version
        for scheme in self._weight_sync_schemes.values():
            if scheme.context is self:  # not that of another collector, which was refused
                scheme.shutdown()
        if self._reader is not None:
            self._reader.close()

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
        batch, frames = self._worker.batch(self.timeout)
        if batch is not None:
            self._frames = self._frames + batch.numel() if frames is None else frames
            self._iter += 1
        return batch

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

    def _iter_by_trajectories(self) -> Iterator[Any]:
        for batch in super()._iter_by_trajectories():
            yield batch if batch is None else mark_padding(batch)

    def start(self) -> None:
        """Fill the buffer from a thread, whose error the next call raises, until the shutdown."""
        self._thread.check()
        self._worker.check()
        iterate = self._iter_by_trajectories if self.trajs_per_batch else self.iterator
        self._thread.start(iterate)

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._thread.is_running()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Keep batches out of the buffer in this block; the worker collects ``prefetch`` more."""
        self._thread.check()
        if not self.is_running():
            raise RuntimeError("pause: expected a thread that runs, got none; call start() first")
        with self._stream.storing:
            yield

    @property
    def stale_frames(self) -> int:
        """Frames that ``max_staleness`` dropped."""
        return self._stream.dropped

    @BaseCollector.weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        """The weight updater, or ``None``. Setting one registers it with this collector."""
        if value is not None and self._reader is not None:
            raise RuntimeError("channel: expected weights through it, got an updater; publish them")
        schemes = of_policy(self._weight_sync_schemes)
        publishes = isinstance(value, MultiProcessedRemoteWeightUpdate)
        if isinstance(value, MultiProcessedRemoteWeightUpdate) and len(schemes) == 1:
            value.publish_with(schemes[0])  # else it refuses
        BaseCollector.weight_updater.fset(self, value)  # pyright: ignore[reportOptionalCall]
        if value is not None and not publishes:
            publish = weakref.WeakMethod(self._publish)
            self.weight_updater.register_post_hook(lambda: (call := publish()) and call())

    def _publish(self) -> None:
        """Make one version of what an updater has written to the policy."""
        for scheme in of_policy(self._weight_sync_schemes):
            scheme.send()
        self.increment_version()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Publish one version of the weights, and do not wait; with a ``channel`` do nothing."""
        self._thread.check()
        if self._reader is None:
            super().update_policy_weights_(*args, **kwargs)
        elif args or kwargs:
            raise RuntimeError("channel: expected weights through it, got others; publish them")

    @property
    def policy_version(self) -> Any:
        """The newest published version; ``None`` if versions are not tracked."""
        tracked = super().policy_version
        newest = None if self.closed or self._numbered is None else self._numbered.version
        return tracked if tracked is None or newest is None else newest

    def increment_version(self) -> None:
        """Count a version, also in the worker. The versions of a channel count by themselves."""
        if self._numbered is None and self.policy_version_tracker is not None:
            self.policy_version_tracker.increment_version()
            if not self.closed:
                self._worker.call(worker.set_version, self.policy_version, waits=False)

    def _call(self, function: Callable[..., Any], *args: Any, anew: bool = False) -> Any:
        """Call a function in the worker; ``anew`` drops the batches that are on their way."""
        self._thread.check()
        return self._worker.call(function, *args, frames=self._frames if anew else None)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment, torch and numpy in the worker, and reset the environment."""
        return self._call(worker.set_seed, seed, static_seed, anew=True)

    def reset(self, reset_idx: Any = None) -> None:
        """Start new trajectories, unless ``reset_idx`` is ``[False]``; no frame is from before."""
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

        The policy's weights are published as one version, whose number is at least theirs. The
        trainer's own model stays as it is. A state that does not fit changes nothing.
        """
        if missing := {"worker0", "frames", "iter"} - {*state_dict}:
            raise KeyError(
                f"state_dict: expected {min(missing)!r} in it, got none; load what state_dict() of "
                "an AsyncCollector returned"
            )
        own, version = dict(state_dict["worker0"]), state_dict.get("policy_version")
        frames, batches = state_dict["frames"], state_dict["iter"]
        check_whole("frames", frames, 0, optional=False)
        check_whole("iter", batches, -1, optional=False)
        check_whole("policy_version", version, 0)
        if "traj_pool" in state_dict:
            own["traj_pool"] = state_dict["traj_pool"]
        schemes, weights = of_policy(self._weight_sync_schemes), own.get(POLICY_STATE)
        brought = "policy" in self._weight_sync_schemes  # all of the weights
        if brought:
            own.pop(POLICY_STATE, None)
        if self._numbered is not None:
            own.pop("policy_version", None)  # the channel counts
        self._call(worker.load_state, own, not brought, False)
        for scheme in schemes:
            scheme.restore(weights, version)
        if not schemes and version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version
        self._frames, self._iter = frames, batches
        # Batches that the worker has made meanwhile, with other weights, are outdated.
        self._call(worker.load_state, own, False, True, anew=True)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the worker's policy."""
        return self._call(methodcaller("getattr_policy", attr))

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the worker's environment."""
        return self._call(methodcaller("getattr_env", attr))

    def get_distant_attr(self, attr: str) -> list[Any]:
        """The object that a path names in the worker's collector, as a list with one element."""
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
        """End the worker, also in the middle of a batch; kill it after ``timeout`` seconds."""
        self._thread.stop()
        timeout, self._iterator = SHUTDOWN_S if timeout is None else timeout, None
        with self._ending:
            # The worker belongs to the trainer, not to its forks.
            if not self.closed and not self._worker.is_inherited:
                self._worker.stop(timeout)
                self._thread.join(timeout)
                self._close_weights()
            self.closed, self.procs = True, []  # last, so that it can be called again after Ctrl-C
        self._thread.check()

    def __enter__(self) -> AsyncCollector:
        """The collector, which is shut down at the end of the block."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)


def _check_names(kind: Callable[..., Any], given: dict[str, Any]) -> bool:
    """Check that the worker's class has these arguments; whether it collects dialogs."""
    bases = [each for each in (LLMCollector, Collector) if each in getattr(kind, "__mro__", ())]
    # A class passes what it does not know on to its base; of a function nobody knows what it does.
    parameters = [p for c in (kind, *bases[:1]) for p in inspect.signature(c).parameters.values()]
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for name in given.keys() - OF_PROCESS:
        if name in INSTEAD or (bases and name not in known):
            remedy = (
                f"{getattr(kind, '__name__', kind)} has none: correct the name, or drop it; give "
                "create_env_fn what it takes by functools.partial"
            )
            raise TypeError(
                f"AsyncCollector.__init__() got an unexpected keyword argument {name!r}; "
                f"{INSTEAD.get(name, remedy)}"
            )
        if name in OF_ONE_WORKER and isinstance(given[name], list):
            raise TypeError(f"{name}: expected that of one worker, got a list; pass its element")
    return "dialog_turns_per_batch" in known | given.keys()


aSyncDataCollector = AsyncCollector
