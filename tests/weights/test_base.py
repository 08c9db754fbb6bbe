"""The bases of weight updaters: which hook runs when, with what."""

from __future__ import annotations

import pytest
from torchrl.collectors.weight_update import WeightUpdaterBase

from fusedrl import LocalWeightUpdaterBase, RemoteWeightUpdaterBase


class Local(LocalWeightUpdaterBase):
    """Overrides every hook, and tells what each was given."""

    def __init__(self):
        self.calls = []

    def _get_server_weights(self):
        self.calls.append(("server",))
        return "server"

    def _get_local_weights(self):
        return "local"

    def _maybe_map_weights(self, server_weights, local_weights):
        self.calls.append(("map", server_weights, local_weights))
        return "mapped"

    def _update_local_weights(self, local_weights, mapped_weights):
        self.calls.append(("update", local_weights, mapped_weights))


class Remote(RemoteWeightUpdaterBase):
    """Overrides every hook, and tells what each was given."""

    def __init__(self, skipped=()):
        self.calls = []
        self.skipped = skipped

    def all_worker_ids(self):
        return [0, 1, 2]

    def _get_server_weights(self):
        self.calls.append(("server",))
        return "server"

    def _maybe_map_weights(self, server_weights):
        self.calls.append(("map", server_weights))
        return "mapped"

    def _skip_update(self, worker_id):
        return worker_id in self.skipped

    def _sync_weights_with_worker(self, worker_id, server_weights):
        self.calls.append(("sync", worker_id, server_weights))


class Somewhere:
    """Anything that a weak reference can point to."""


@pytest.mark.parametrize("call", ["__call__", "update_weights", "push_weights"])
def test_a_local_update_runs_every_hook_in_order(call):
    updater, hooked = Local(), []
    updater.register_post_hook(lambda: hooked.append(len(updater.calls)))
    getattr(updater, call)()
    assert updater.calls == [("server",), ("map", "server", "local"), ("update", "local", "mapped")]
    assert hooked == [3]


@pytest.mark.parametrize("call", ["__call__", "update_weights", "push_weights"])
def test_a_remote_update_maps_once_and_sends_to_workers_that_are_not_skipped(call):
    updater, hooked = Remote(skipped=[1]), []
    updater.register_post_hook(lambda: hooked.append(len(updater.calls)))
    getattr(updater, call)()
    sent = [("sync", 0, "mapped"), ("sync", 2, "mapped")]
    assert updater.calls == [("server",), ("map", "server"), *sent]
    assert hooked == [4]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("given", 2), {}),
        ((), {"weights": "given", "worker_ids": [2]}),
        ((), {"policy_or_weights": "given", "worker_ids": (2, 2)}),
    ],
)
def test_both_call_forms_name_weights_and_workers(args, kwargs):
    updater = Remote()
    updater(*args, **kwargs)
    assert updater.calls == [("map", "given"), ("sync", 2, "mapped")]


def test_weights_given_in_both_forms_are_refused():
    with pytest.raises(ValueError, match="got both"):
        Remote()("one", policy_or_weights="two")


def test_an_unknown_worker_is_refused_before_any_is_updated():
    updater = Remote()
    with pytest.raises(ValueError, match=r"worker_ids: expected one or several of \[0, 1, 2\]"):
        updater.update_weights(worker_ids=[0, 7])
    assert updater.calls == []


def test_a_local_updater_refuses_workers():
    updater = Local()
    with pytest.raises(ValueError, match="worker_ids: expected None, got 0"):
        updater(policy_or_weights="given", worker_ids=0)
    assert updater.calls == []


@pytest.mark.parametrize("make", [Local, Remote])
def test_an_updater_does_not_keep_its_collector_alive(make):
    updater, collector = make(), Somewhere()
    assert isinstance(updater, WeightUpdaterBase)
    assert updater.collector is None
    updater.register_collector(collector)
    assert updater.collector is collector
    del collector
    assert updater.collector is None
