"""What makes a torchrl collector follow a channel: the version changes at its policy calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDictBase

from fusedrl.channel.following import Follower

VERSION_KEY = "policy_version"


class LeasedVersion:
    """What a collector has as its version tracker: versions come with the weights.

    The transform that tags frames gets the version of each policy call. Neither an update that
    comes between that call and ``env.step`` nor a count of updates changes it.

    Args:
        transform: the collector's ``PolicyVersion``, of integers.
        follower: of the collector's policy.
    """

    def __init__(self, transform: Any, follower: Follower) -> None:
        self.transform = transform
        self._follower = follower

    @property
    def version_type(self) -> Any:
        """That of the transform."""
        return self.transform.version_type

    @property
    def version(self) -> int:
        """The newest published version, which the next policy call computes with."""
        newest = self._follower.reader.version
        assert newest is not None
        return newest

    @version.setter
    def version(self, _: Any) -> None:
        """Of another source: not taken."""

    def increment_version(self) -> None:
        """An update is counted when it is published."""

    def held(self) -> AbstractContextManager[int]:
        """Brackets policy calls that are to have one version."""
        return self._follower


class _Call(functools.partial):
    """How a followed module is called; copies of the module are called as any."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Attachment:
    """A follower of one of a collector's models, attached to the calls of the model.

    Args:
        collector: as torchrl's ``Collector``: it may have a ``policy_version_tracker``, and a
            compiled ``_wrapped_policy``.
        follower: of the model.
        is_policy: the model is the collector's policy, or in it: its versions tag the frames.

    Raises:
        ValueError: the collector tags frames with UUIDs.
    """

    def __init__(self, collector: Any, follower: Follower, is_policy: bool) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._collector = weakref.ref(collector)
        self._transform: Any = None
        tracker = getattr(collector, "policy_version_tracker", None)
        if is_policy and tracker is not None and not isinstance(tracker, LeasedVersion):
            self._track(collector, tracker, follower)
        self._follower = follower
        if is_policy and is_compiled(collector):
            owner, name = collector, "_wrapped_policy_maybe_compiled"
            call = collector._wrapped_policy
        else:
            # A module calls this, if it has it, in the place of its forward and hooks. Hooks would
            # not run after KeyboardInterrupt, nor where the module is compiled already.
            owner, name = follower.module, "_compiled_call_impl"
            call = owner._compiled_call_impl or owner._call_impl
        self._undo.append(replace(owner, name, _Call(self._follow, call)))

    def _track(self, collector: Any, tracker: Any, follower: Follower) -> None:
        if tracker.version_type not in (int, "int"):
            raise ValueError(
                "track_policy_version: expected True or PolicyVersion(version_type='int'), got "
                f"version_type={tracker.version_type!r}; a channel numbers its versions"
            )
        self._transform = tracker
        if follower.version is not None:
            tracker.version = follower.version
        leased = LeasedVersion(tracker, follower)
        self._undo.append(replace(collector, "policy_version_tracker", leased))

    def _follow(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._follower as version:
            self._tag(version, args, kwargs)
            return call(*args, **kwargs)

    def _tag(self, version: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._transform is None:
            return
        self._transform.version = version
        # The transform tags ("next", "policy_version") of the frame. The frame's own tag is from
        # the step before this call, or from the reset: it becomes that of this call.
        for data in (*args, *kwargs.values(), getattr(self._collector(), "_carrier", None)):
            if not isinstance(data, TensorDictBase):
                continue
            if isinstance(tag := data.get(VERSION_KEY, None), torch.Tensor):
                data.set(VERSION_KEY, torch.full_like(tag, version))

    def remove(self) -> None:
        """Leave the collector as it was."""
        while self._undo:
            self._undo.pop()()


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; the function that is returned sets it back, while the owner exists."""
    before, reference = getattr(owner, name), weakref.ref(owner)
    setattr(owner, name, value)

    def put_back() -> None:
        if (existing := reference()) is not None:
            setattr(existing, name, before)

    return put_back


def is_compiled(collector: Any) -> bool:
    """Whether the collector compiles its policy, or captures it as a CUDA graph."""
    return bool(
        getattr(collector, "compiled_policy", False)
        or getattr(collector, "cudagraphed_policy", False)
    )
