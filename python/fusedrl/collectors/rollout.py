"""The rollout loop: weights, policy, environment, stamp, queue."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.collectors.llm.base import LLMCollector as _LLMCollector
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

from fusedrl.collectors.dialogs import Dialogs, Turns
from fusedrl.collectors.from_channel import FromChannel
from fusedrl.collectors.policy_version import stamp, versions_in
from fusedrl.collectors.progress import progress_bar
from fusedrl.collectors.stopwatch import Stopwatch
from fusedrl.weights.attachment import LeasedVersion

logger = logging.getLogger("fusedrl")

IDS = ("collector", "traj_ids")


class Rollout(_LLMCollector):
    """How :class:`fusedrl.LLMCollector` collects; everything about one turn is in this file."""

    env: Any
    policy: Any
    _batches: Turns | Dialogs  # where turns wait for a batch
    _pool: bool  # whether the environment is an AsyncEnvPool
    _carried: Any  # what the policy is called with next
    _ids: Tensor  # of the trajectory that each element of the environment is in
    _asked: dict[int, Any]  # environments of a pool that have a turn -> the policy's version
    _held: dict[int, TensorDictBase]  # those that wait because the budget is used up
    _watch: Stopwatch
    _channel: FromChannel | None
    policy_version_tracker: Any
    max_staleness: int | None
    stale_turns: int

    def iterator(self) -> Iterator[Any]:
        """Batches until ``total_dialog_turns`` have run; ``None`` each where a buffer gets them."""
        watch = self._watch
        with progress_bar(self) as advance:
            while self._frames < self.total_frames:
                self._iter += 1
                batch = self.rollout()
                watch.start()
                self._increment_frames(batch.numel())
                advance()
                if self._is_stale(batch):
                    continue
                batch = self._postproc(batch)
                if self.post_collect_hook is not None:
                    self.post_collect_hook(batch)
                if self.replay_buffer is not None:
                    batch = _maybe_normalize_replay_buffer_tensordict_device(
                        batch, self.replay_buffer
                    )
                    self.replay_buffer.extend(batch)
                    batch = None
                watch.lap("queueing")
                yield batch

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Run turns until there is a batch, and return it before any postprocessing."""
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self._watch.start()
        if self.reset_at_each_iter:
            self._interrupt()
        while (batch := self._batches.take()) is None:
            if self._carried is None:
                self._start()
            if self._pool:
                self._pool_turn()
            else:
                self._turn()
        if isinstance(self._batches, Turns) and self._carried is not None:
            # They share memory with the batch, which belongs to the caller from now on.
            self._carried, self._ids = self._carried.clone(), self._ids.clone()
        self._watch.lap("queueing")
        if self.verbose:
            logger.info("LLMCollector: a batch of shape %s", tuple(batch.shape))
        return batch

    def _turn(self) -> None:
        """One turn of every dialog."""
        watch = self._watch
        actions, version = self._call_policy(self._carried)
        watch.lap("policy")
        turn, self._carried = self.env.step_and_maybe_reset(actions)
        watch.lap("env")
        ended = _ended(turn)
        some = bool(ended.any())
        if some or not self.yield_only_last_steps:
            turn.set(IDS, self._ids)
            if version is not None:
                stamp(turn, version)
                if self.policy_version != version:  # the environment wrote what it was by then
                    stamp(turn.get("next"), version)
        if some:
            self._renew_ids(ended)
        watch.lap("stamping")
        self._frames += self._batches.add(turn, ended.tolist())
        watch.turns += turn.numel()
        watch.lap("queueing")

    def _pool_turn(self) -> None:
        """One turn of those dialogs of a pool that are the first to have it."""
        watch, batches = self._watch, self._batches
        if not self._asked:
            self._ask(self._carried)
        least = self.env.num_envs if isinstance(batches, Turns) else self.env.min_get
        least = min(least, len(self._asked))  # fewer run once the budget is used up
        turn, self._carried = self.env.async_step_and_maybe_reset_recv(least)
        watch.lap("env")
        indices = _indices(turn, self.env)
        rows = turn.unbind(0)
        for index, row in zip(indices, rows, strict=True):
            version = self._asked.pop(index)
            row.set(IDS, self._ids[index])
            if version is not None:
                stamp(row, version)
                stamp(row.get("next"), version)
        ended = _ended(turn)
        if ended.any():
            self._renew_ids(ended, indices)
        watch.lap("stamping")
        watch.turns += turn.numel()
        if isinstance(batches, Turns):
            batches.add(lazy_stack(rows), [])
            watch.lap("queueing")
            return
        for index, row, over in zip(indices, rows, ended, strict=True):
            self._frames += batches.add_row(index, row, bool(over.any()))
        watch.lap("queueing")
        if self._frames + batches.pending < self.total_frames:
            self._ask(self._carried)
            return
        # The budget is used up: only what the last dialogs take, the longest one first.
        self._held.update(zip(indices, self._carried.unbind(0), strict=True))
        if not self._asked:
            longest = max(self._held, key=batches.lengths.__getitem__)
            self._carried = lazy_stack([self._held.pop(longest)])

    def _call_policy(self, carried: TensorDictBase) -> tuple[TensorDictBase, Any]:
        """Call the policy with the newest weights of the channel, if any; also its version then."""
        if self._channel is not None:
            loaded = self._channel.take()
            if self.policy_version_tracker is not None and loaded not in (
                None,
                self.policy_version,
            ):
                self.policy_version_tracker.version = loaded
        version = self.policy_version
        actions = self.policy(carried)
        if isinstance(self.policy_version_tracker, LeasedVersion):
            # A scheme switched versions as the call began, and told the transform.
            version = self.policy_version_tracker.transform.version
        return actions, version

    def _ask(self, carried: TensorDictBase) -> None:
        """Call the policy and let the environments of the pool take their step."""
        actions, version = self._call_policy(carried)
        self._asked.update(dict.fromkeys(_indices(carried, self.env), version))
        self._watch.lap("policy")
        self.env.async_step_and_maybe_reset_send(actions)
        self._watch.lap("env")

    def _start(self) -> None:
        """Reset the environment, which begins a trajectory in each of its elements."""
        self._carried = self.env.reset()
        shape = self.env.batch_size
        ids = self._traj_pool.get_traj_and_increment(shape.numel(), device=self.env.device)
        self._ids = ids.reshape(shape)
        self._watch.lap("env")

    def _renew_ids(self, ended: Tensor, rows: list[int] | None = None) -> None:
        """Let dialogs that ended go on under new ids."""
        ids = self._ids.clone()  # turns refer to the former tensor
        fresh = self._traj_pool.get_traj_and_increment(int(ended.sum()), device=ids.device)
        if rows is None:
            ids[ended] = fresh
        else:
            ids[rows] = ids[rows].masked_scatter(ended, fresh)
        self._ids = ids

    def _interrupt(self) -> None:
        """Let running dialogs end here; their turns count, and no batch has them."""
        if self._asked:
            unseen, _ = self.env.async_step_and_maybe_reset_recv(len(self._asked))
            self._frames += unseen.numel()
        self._asked, self._held, self._carried = {}, {}, None
        self._frames += self._batches.interrupt()

    def _is_stale(self, batch: TensorDictBase) -> bool:
        if self.max_staleness is None:
            return False
        newest = self.policy_version if self._channel is None else self._channel.reader.version
        late = (newest or 0) - min(versions_in(batch))
        if late <= self.max_staleness:
            return False
        if not self.stale_turns:
            logger.warning(
                "LLMCollector: a batch was dropped, its oldest turn is %d versions old and "
                "max_staleness is %d; stale_turns counts (this is said once)",
                late,
                self.max_staleness,
            )
        self.stale_turns += batch.numel()
        return True

    def _postproc(self, batch: TensorDictBase) -> TensorDictBase:
        if self.postproc is not None:
            batch = self.postproc(batch)
        first = batch  # has every key that all elements share: a look at each would take long
        while isinstance(first, LazyStackedTensorDict):
            first = first.tensordicts[0]
        private = [key for key in first.keys(True) if _is_private(key)]
        return batch.exclude(*private, inplace=True) if private else batch


def _ended(turn: TensorDictBase) -> Tensor:
    """Which dialogs a turn ended, in the shape of the batch."""
    if isinstance(turn, LazyStackedTensorDict) and turn.stack_dim == 0:
        done = torch.stack([row.get("next").get("done") for row in turn.tensordicts])
    else:
        done = turn.get(("next", "done"))
    return done.reshape(*turn.batch_size, -1).any(-1)


def _indices(carried: TensorDictBase, pool: Any) -> list[int]:
    """Which environments of a pool the rows are of."""
    indices = carried.get(pool._env_idx_key).tolist()
    return [_first(index) for index in (indices if isinstance(indices, list) else [indices])]


def _first(nested: Any) -> Any:
    while isinstance(nested, list):
        nested = nested[0]
    return nested


def _is_private(key: Any) -> bool:
    return any(part.startswith("_") for part in ([key] if isinstance(key, str) else key))
