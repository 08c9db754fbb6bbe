"""The rollout loop: weights, policy, environment, stamp, queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.collectors.llm.base import LLMCollector as _LLMCollector
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

from fusedrl.collectors.dialogs import Dialogs, Turns
from fusedrl.collectors.from_channel import FromChannel
from fusedrl.collectors.histories import call_by_length
from fusedrl.collectors.policy_version import stamp, versions_in
from fusedrl.collectors.progress import progress_bar
from fusedrl.collectors.reuse import Reuse
from fusedrl.collectors.rows import IDS, ended, private_keys, rows_of, tag
from fusedrl.collectors.staleness import is_too_old
from fusedrl.collectors.stopwatch import Stopwatch
from fusedrl.weights.attachment import LeasedVersion


class Rollout(_LLMCollector):
    """How :class:`fusedrl.LLMCollector` collects; everything about one turn is in this file."""

    env: Any
    policy: Any
    _batches: Turns | Dialogs  # where turns wait for a batch
    _pool: bool  # whether the environment is an AsyncEnvPool
    _running: bool  # whether there are dialogs
    _carried: Any  # what the policy is called with next; in a pool None while environments step
    _reuse: Reuse
    _ids: Tensor  # of the trajectory that each element of the environment is in
    _row_ids: tuple[Tensor, ...]  # the same, of each row of a turn
    _asked: dict[int, Any]  # environments of a pool that have a turn -> the policy's version
    _held: dict[int, TensorDictBase]  # those that wait because the budget is used up
    _watch: Stopwatch
    _channel: FromChannel | None
    _tracker: Any  # the transform that the environment writes versions with
    policy_version_tracker: Any  # the same, or what takes its place
    max_staleness: int | None
    stale_turns: int

    def iterator(self) -> Iterator[Any]:
        """Batches until ``total_dialog_turns`` have run; ``None`` each where a buffer gets them."""
        self._require_open()
        watch = self._watch
        with progress_bar(self) as advance:
            while self._frames < self.total_frames:
                self._iter += 1
                batch = self.rollout()
                watch.start()
                self._increment_frames(batch.numel())
                advance(batch)
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
        self._require_open()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self._watch.start()
        if self.reset_at_each_iter:
            self._interrupt()
        while (batch := self._batches.take()) is None:
            if not self._running:
                self._start()
            if self._pool:
                self._pool_turn()
            else:
                self._turn()
        self._watch.lap("queueing")
        return batch

    def _turn(self) -> None:
        """One turn of every dialog."""
        watch, batches = self._watch, self._batches
        actions, version = self._call_policy(self._carried)
        watch.lap("policy")
        turn, carried = self.env.step_and_maybe_reset(actions)
        turn, self._carried = self._reuse.turn(turn), self._reuse.carried(carried)
        watch.lap("env")
        mask = ended(turn)
        over = mask.flatten().tolist()
        watch.turns += len(over)
        if batches.skip(over):
            watch.lap("stamping")
            return
        if version is not None:
            stamp(turn, version)
            if self._tracker.version != version:  # the environment wrote what it was by then
                stamp(turn.get("next"), version)
        if batches.by_row:
            rows = rows_of(turn)
            for row, traj_id in zip(rows, self._row_ids, strict=True):
                tag(row, traj_id)
            watch.lap("stamping")
            self._frames += batches.add(rows, over)
        else:
            turn.set(IDS, self._ids)
            watch.lap("stamping")
            batches.add(turn, over)
        self._renew_ids(mask, over.count(True))
        self._part_from_batch()
        watch.lap("queueing")

    def _pool_turn(self) -> None:
        """One turn of those dialogs of a pool that are the first to have it."""
        watch, batches = self._watch, self._batches
        if self._carried is not None:
            self._ask()
        least = self.env.min_get if isinstance(batches, Dialogs) else self.env.num_envs
        least = min(least, len(self._asked))  # fewer run once the budget is used up
        turn, carried = self.env.async_step_and_maybe_reset_recv(least)
        watch.lap("env")
        indices = _indices(turn, self.env)
        mask = ended(turn)
        rows = []
        for index, row in zip(indices, turn.unbind(0), strict=True):
            row, version = self._reuse.turn(row, index), self._asked.pop(index)
            tag(row, self._row_ids[index])
            if version is not None:
                stamp(row, version)
                stamp(row.get("next"), version)
            rows.append(row)
        self._carried = self._reuse.carried(carried)
        watch.lap("stamping")
        watch.turns += turn.numel()
        if isinstance(batches, Dialogs):
            for index, row, over in zip(indices, rows, mask, strict=True):
                self._frames += batches.add_row(index, row, bool(over.any()))
            self._renew_ids(mask, int(mask.sum()), indices)
            watch.lap("queueing")
            if self._frames + batches.pending < self.total_frames:
                self._ask()
            else:
                self._hold(batches, indices)
            return
        whole = lazy_stack(rows)
        batches.add(rows_of(whole) if batches.by_row else whole, [])
        self._renew_ids(mask, int(mask.sum()), indices)
        self._part_from_batch()
        watch.lap("queueing")

    def _hold(self, batches: Dialogs, indices: list[int]) -> None:
        """Go on with what the last dialogs of the budget take only, the longest one first."""
        self._held.update(zip(indices, self._carried.unbind(0), strict=True))
        self._carried = None
        if not self._asked:
            longest = max(self._held, key=batches.lengths.__getitem__)
            self._carried = lazy_stack([self._held.pop(longest)])

    def _call_policy(self, carried: TensorDictBase) -> tuple[TensorDictBase, Any]:
        """Call the policy with the newest weights of the channel, if any; also its version then."""
        tracker = self.policy_version_tracker
        if self._channel is not None:
            loaded = self._channel.take()
            if tracker is not None and loaded not in (None, tracker.version):
                tracker.version = loaded
        if isinstance(tracker, LeasedVersion):  # a scheme switches versions where a call begins
            with tracker.held() as version:
                return call_by_length(self.policy, carried), version
        version = None if tracker is None else tracker.version
        return call_by_length(self.policy, carried), version

    def _ask(self) -> None:
        """Call the policy and let the environments of the pool take their step."""
        carried = self._carried
        actions, version = self._call_policy(carried)
        self._watch.lap("policy")
        self.env.async_step_and_maybe_reset_send(actions)
        self._asked.update(dict.fromkeys(_indices(carried, self.env), version))
        self._carried = None  # only now: a policy that raises is asked again
        self._watch.lap("env")

    def _start(self) -> None:
        """Reset the environment, which begins a trajectory in each of its elements."""
        self._carried = self._reuse.carried(self.env.reset())
        shape = self.env.batch_size
        ids = self._traj_pool.get_traj_and_increment(shape.numel(), device=self.env.device)
        self._set_ids(ids.reshape(shape))
        self._running = True
        self._watch.lap("env")

    def _set_ids(self, ids: Tensor) -> None:
        self._ids = ids
        self._row_ids = (ids if self._pool else ids.flatten()).unbind(0)

    def _renew_ids(self, mask: Tensor, count: int, rows: list[int] | None = None) -> None:
        """Let the ``count`` dialogs that ended go on under new ids."""
        if not count:
            return
        fresh = self._traj_pool.get_traj_and_increment(count, device=self._ids.device)
        # A new tensor: turns refer to the former one.
        if rows is None:
            ids = self._ids.masked_scatter(mask, fresh)
        else:
            ids = self._ids.clone()
            ids[rows] = ids[rows].masked_scatter(mask, fresh)
        self._set_ids(ids)

    def _part_from_batch(self) -> None:
        """Share no memory with a batch that is complete: it belongs to the caller from now on."""
        if isinstance(self._batches, Turns) and self._batches.complete:
            self._carried = self._carried.clone()
            self._set_ids(self._ids.clone())

    def _interrupt(self) -> None:
        """Let running dialogs end here; their turns count, and no batch has them."""
        if self._asked:
            unseen, _ = self.env.async_step_and_maybe_reset_recv(len(self._asked))
            self._frames += unseen.numel()
        self._asked, self._held, self._carried, self._running = {}, {}, None, False
        self._frames += self._batches.interrupt()

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError(
                "collector: expected one that runs, got one that was shut down; make a new one"
            )

    def _is_stale(self, batch: TensorDictBase) -> bool:
        if self.max_staleness is None:
            return False
        late = self.policy_version - min(versions_in(batch))
        if is_too_old(late, self.max_staleness, self.stale_turns, "LLMCollector.stale_turns"):
            self.stale_turns += batch.numel()
            return True
        return False

    def _postproc(self, batch: TensorDictBase) -> TensorDictBase:
        if self.postproc is not None:
            batch = self.postproc(batch)
        first = batch  # has every key that all elements share: a look at each would take long
        while isinstance(first, LazyStackedTensorDict):
            first = first.tensordicts[0]
        private = list(private_keys(first))
        return batch.exclude(*private, inplace=True) if private else batch


def _indices(carried: TensorDictBase, pool: Any) -> list[int]:
    """Which environments of a pool the rows are of."""
    indices = carried.get(pool._env_idx_key).tolist()
    return [_first(index) for index in (indices if isinstance(indices, list) else [indices])]


def _first(nested: Any) -> Any:
    while isinstance(nested, list):
        nested = nested[0]
    return nested
