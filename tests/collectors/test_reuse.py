"""Turns in memory that is written again: what is copied, and what a batch keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from counting_dialogs import Counting, Numbers, policy, seen
from torchrl.envs import AsyncEnvPool

IDS = ("collector", "traj_ids")


class TestReuse:
    """Turns are kept without a copy, unless policy or environment write into them later."""

    @pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
    @pytest.mark.parametrize(
        "mode", [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}], ids=str
    )
    def test_a_policy_with_a_buffer(self, collect, mode, lazy, caplog):
        options = {"dialog_turns_per_batch": 12, "total_dialog_turns": 24} | mode
        buffer = torch.zeros(2, 1, dtype=torch.int64)

        def writing(turn):
            for row in turn.unbind(0):
                n = int(row["seen"].item() != turn["seen"][0].item())
                row.set("action", buffer[n])
            buffer.copy_(10 * turn["seen"])
            return turn if lazy else turn.set("action", buffer)

        whole, kept = (
            [batch["action"].flatten().tolist() for batch in collect(env, policy=by, **options)]
            for env, by in ((Counting(2, 5, lazy), policy), (Counting(2, 5, lazy), writing))
        )
        assert whole == kept
        assert caplog.text.count("return the same tensors") == 1 and "action" in caplog.text

    @pytest.mark.parametrize("flags", [False, True], ids=["what is seen", "done"])
    def test_an_environment_with_buffers(self, collect, flags, caplog):
        class Buffered(Counting):
            """Writes what its steps return into the same tensors."""

            def _step(self, tensordict):
                state = super()._step(tensordict)
                for key in ("done", "terminated") if flags else ("seen",):
                    buffer = self.__dict__.setdefault(f"written {key}", state[key].clone())
                    state.set(key, buffer.copy_(state[key]))
                return state

        options = {"dialog_turns_per_batch": 12, "total_dialog_turns": 36}
        keys = ("seen", ("next", "seen"), "done", ("next", "done"), IDS)
        whole, kept = (
            [[batch[key].tolist() for key in keys] for batch in collect(env, **options)]
            for env in (Counting(2, 5), Buffered(2, 5))
        )
        assert whole == kept
        assert caplog.text.count("return the same tensors") == 1

    @pytest.mark.usefixtures("forked_pools")
    def test_a_pool_of_processes_with_shared_slots(self, collect, caplog):
        makers = [partial(Numbers, None, 5) for _ in range(2)]
        pool = AsyncEnvPool(makers, backend="multiprocessing", stack="lazy", exchange="shm")
        batch = collect(pool, dialog_turns_per_batch=20).next()
        assert seen(batch) == [[*range(100, 105), *range(200, 205)]] * 2
        assert seen(batch["next"]) == [[*range(101, 106), *range(201, 206)]] * 2
        assert caplog.text.count("return the same tensors") == 1

    def test_nothing_is_copied_of_others(self, collect):
        """Which the first turns tell."""
        made = []

        def remembering(turn):
            made.append(policy(turn)["action"])
            return turn

        batch = collect(policy=remembering, dialog_turns_per_batch=16).next()
        addresses = [batch[:, n]["action"].data_ptr() for n in range(8)]
        assert [a == b.data_ptr() for a, b in zip(addresses, made, strict=True)] == (
            [False] * 3 + [True] * 5
        )
