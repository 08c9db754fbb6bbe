"""Versions in what LLMCollector returns: those of the policy's calls, one for each update."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from counting_dialogs import Counting, Rounded, policy
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.envs import AsyncEnvPool, Transform, TransformedEnv
from torchrl.envs.llm.transforms import PolicyVersion as TorchrlPolicyVersion

from fusedrl import LLMCollector, PolicyVersion
from fusedrl.collectors.versions import Versions

pytestmark = pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated")


@pytest.fixture
def collect(collect: Callable[..., LLMCollector]) -> Callable[..., LLMCollector]:
    """A collector of two rows and two turns a batch that tracks versions."""
    return partial(collect, total_dialog_turns=-1, track_policy_version=True)


@pytest.fixture
def module() -> TensorDictModule:
    """A policy with weights."""
    return TensorDictModule(Rounded(torch.nn.Linear(1, 1)), in_keys=["seen"], out_keys=["action"])


def versions(batch: Any) -> list[Any]:
    """Those of a batch, after a look whether root and next agree."""
    of = [part.get("policy_version").tolist() for part in (batch, batch["next"])]
    assert of[0] == of[1]
    return of[0]


def halved(module: TensorDictModule) -> Any:
    return TensorDict.from_module(module).data.clone() * 0.5


def test_a_version_for_each_turn(collect):
    collector = collect()
    seen = []
    for batch in collector:
        seen.append(versions(batch))
        if len(seen) == 3:
            break
        collector.increment_version()
    assert seen == [[[n, n], [n, n]] for n in range(3)]
    assert collector.policy_version == collector.get_policy_version() == 2


@pytest.mark.parametrize("when", ["policy", "env"])
@pytest.mark.parametrize("tracker", [bool, PolicyVersion, TorchrlPolicyVersion])
def test_the_version_is_that_of_the_policys_call(collect, when, tracker):
    """Updates come from another thread while the policy generates, or a tool runs."""
    tracker = tracker() or True
    called = []

    class Updating(Transform):
        def _step(self, tensordict, next_tensordict):
            if when == "env":
                collector.increment_version()
            return next_tensordict

    def generating(turn):
        called.append(collector.policy_version)
        if when == "policy":
            collector.increment_version()
        return policy(turn)

    env = TransformedEnv(Counting(), Updating())
    collector = collect(env, policy=generating, track_policy_version=tracker)
    for _ in range(3):
        assert versions(collector.next()) == [called[-2:]] * 2
    assert len(set(called)) == 6


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize(
    "mode", [{"flatten_data": True}, {"yield_completed_trajectories": True}], ids=str
)
def test_versions_of_flat_batches(collect, mode, lazy):
    collector = collect(Counting(2, 2, lazy), **mode)
    collector.policy = lambda turn: collector.increment_version() or policy(turn)
    batch = collector.next()
    assert versions(batch) == ([0, 1, 0, 1] if "flatten_data" in mode else [0, 1, 0, 1, 2])


def test_a_tracker_that_is_in_the_environment_is_used_as_it_is(collect):
    tracker = PolicyVersion()
    env = TransformedEnv(Counting(), tracker)
    collector = collect(env, track_policy_version=tracker)
    assert collector.policy_version_tracker is tracker and collector.env is env
    tracker.version = 7
    assert versions(collector.next()) == [[7, 7], [7, 7]]


class SelfCounting(WeightUpdaterBase):
    """As torchrl's updaters of inference engines: it counts versions by a hook of its own."""

    def register_collector(self, collector):
        super().register_collector(collector)
        self.register_post_hook(collector.increment_version)

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights=None):
        pass

    def _get_server_weights(self):
        return TensorDict()

    def _maybe_map_weights(self, server_weights):
        return server_weights

    def all_worker_ids(self):
        return None


class TestOneUpdateIsOneVersion:
    def test_weights_that_are_given(self, collect, module):
        collector = collect(policy=module)
        weights = halved(module)
        collector.update_policy_weights_(weights)
        assert collector.policy_version == 1
        assert torch.equal(module.module.linear.weight, weights["module", "linear", "weight"])
        collector.receive_weights(weights)
        collector.receive_weights()
        assert collector.policy_version == 2

    def test_an_updater_whoever_calls_it(self, collect):
        updater = SelfCounting()
        collector = collect(weight_updater=updater)
        collector.update_policy_weights_()
        assert collector.policy_version == 1
        updater.push_weights(TensorDict())
        updater(TensorDict())
        assert collector.policy_version == 3

    def test_a_version_that_comes_with_the_weights(self, collect):
        class Scheme:
            def receive(self):
                collector.update_policy_weights_(TensorDict())

        collector = collect(policy=torch.nn.Identity())
        collector._receiver_schemes = {"policy": Scheme()}
        collector._receive_weights_scheme(model_version=41)
        assert collector.policy_version == 41
        collector._receive_weights_scheme(model_version=41)
        assert collector.policy_version == 41
        collector._receive_weights_scheme()
        assert collector.policy_version == 42

    def test_an_update_that_fails_is_none(self, collect, module):
        collector = collect(policy=module)
        for update in (collector.update_policy_weights_, collector.receive_weights):
            with pytest.raises(ValueError, match=r"(?s)weights: .*unknown: expected no such entry"):
                update(TensorDict({"unknown": torch.ones(1)}))
            with pytest.raises(RuntimeError, match=r"expected a module, .* weight_updater="):
                collect().update_policy_weights_(halved(module))
        assert collector.policy_version == 0


class TestUpdatesAndTurns:
    def test_an_update_within_a_turn_is_refused(self, collect, module):
        collector = collect(policy=module)
        module.register_forward_hook(lambda *_: collector.update_policy_weights_(halved(module)))
        with pytest.raises(RuntimeError, match="weights: expected an update between two turns"):
            collector.next()
        assert collector.policy_version == 0

    def test_a_turn_that_waits_for_the_update_that_waits_for_it(self, collect, module, monkeypatch):
        monkeypatch.setattr("fusedrl.collectors.versions.WAIT_S", 0.05)
        collector, errors = collect(policy=module), []

        def update():
            try:
                collector.update_policy_weights_(halved(module))
            except TimeoutError as error:
                errors.append(str(error))

        def wait(*_):
            thread = threading.Thread(target=update)
            thread.start()
            thread.join()

        module.register_forward_hook(wait)
        assert versions(collector.next()) == [[0, 0], [0, 0]]
        message = "weights: expected the turn with the previous version to end within"
        assert len(errors) == 2 and all(error.startswith(message) for error in errors)

    def test_an_update_in_vain_is_over_while_its_error_is_kept(self):
        moments = Versions()
        moments.patience, moments.settle = 0.05, lambda seconds: False
        with pytest.raises(TimeoutError, match="weights: expected the turn") as kept:
            moments.update().__enter__()
        with ThreadPoolExecutor(1) as other, other.submit(moments.call).result():
            assert kept.value


class TestStaleness:
    def test_batches_that_are_too_old_are_dropped_and_counted(self, collect, caplog):
        collector = collect(
            Counting(2, 4),
            yield_completed_trajectories=True,
            dialog_turns_per_batch=1,
            total_dialog_turns=40,
            max_staleness=4,
        )
        collector.policy = lambda turn: collector.increment_version() or policy(turn)
        sizes = [batch.numel() for batch in collector]
        assert set(sizes) == {4}  # the other dialogs have five turns
        assert collector.stale_turns + sum(sizes) == collector.stats()["frames"] >= 40
        assert caplog.text.count("dropped a stale batch") == 1


class TestPools:
    @pytest.fixture(params=["lazy", "dense"])
    def pool(self, request) -> AsyncEnvPool:
        makers = [lambda n=n: Counting(1, n) for n in (2, 3)]
        return AsyncEnvPool(makers, backend="threading", stack=request.param)

    def test_each_turn_has_the_version_of_its_call(self, pool, collect):
        """Which torchrl refuses."""
        asked = []

        def generating(turn):
            seen = turn["seen"].flatten().tolist()
            rows = (i if isinstance(i, int) else i[0] for i in turn.get("env_index").tolist())
            asked.extend(
                ((r, s), collector.policy_version) for r, s in zip(rows, seen, strict=True)
            )
            collector.increment_version()
            return policy(turn)

        collector = collect(
            pool,
            policy=generating,
            yield_completed_trajectories=True,
            total_dialog_turns=30,
        )
        got = []
        for batch in collector:
            keys = zip(batch["env_index"], batch["seen"].flatten().tolist(), strict=True)
            got += list(zip(keys, versions(batch), strict=True))
        assert len(got) >= 30 and set(got) <= set(asked)

    def test_an_environment_is_not_lost_when_the_policy_raises(self, pool, collect):
        calls = []

        def failing(turn):
            calls.append(1)
            if len(calls) in (3, 6, 9):
                raise ValueError("once")
            return policy(turn)

        collector = collect(pool, policy=failing, yield_completed_trajectories=True)
        while len(calls) < 10:
            with contextlib.suppress(ValueError):
                collector.rollout()
        after = lazy_stack([collector.rollout()[0] for _ in range(20)])
        assert set(after["env_index"]) == {0, 1}
