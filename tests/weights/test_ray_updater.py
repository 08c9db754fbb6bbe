"""The Ray weight updater: real Ray collectors act by what it sends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from ray_nodes import nodes
from tensordict import TensorDict
from weights_workers import Ones, make_policy

from fusedrl import RayRemoteWeightUpdater

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    nodes.start()
    return ray


def actions(iterator) -> list[float]:
    return next(iterator)["action"].flatten().tolist()


def test_ray_collectors_act_by_one_put_an_update_until_one_is_dead(ray, monkeypatch):
    from torchrl.collectors.distributed import RayCollector

    puts = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    trained = make_policy(3.0)
    updater = RayRemoteWeightUpdater(TensorDict.from_module(trained), timeout=300)
    collector = RayCollector(
        [Ones, Ones],
        make_policy(),
        frames_per_batch=2,
        total_frames=1000,
        sync=True,
        collector_class="single",
        remote_configs={"num_cpus": 1},
        weight_updater=updater,
    )
    iterator = iter(collector)
    assert updater.all_worker_ids() == [0, 1]
    collector.update_policy_weights_()
    assert actions(iterator) == [3, 3] and len(puts) == 1
    collector.update_policy_weights_(make_policy(5.0))
    assert actions(iterator) == [5, 5] and len(puts) == 2
    collector.update_policy_weights_(make_policy(7.0), worker_ids=[1])
    assert actions(iterator) == [5, 7] and len(puts) == 3

    updater.max_interval = 1
    collector.update_policy_weights_()
    assert actions(iterator) == [5, 7] and len(puts) == 3
    collector.update_policy_weights_()
    assert actions(iterator) == [3, 3] and len(puts) == 4
    updater.max_interval = 0

    with pytest.raises(ValueError, match="other: expected no such entry"):
        collector.update_policy_weights_(TensorDict({"other": torch.ones(1)}))
    busy = updater.remote_collectors[0].__ray_call__.remote(lambda _: time.sleep(1))
    updater.timeout = 0.2
    with pytest.raises(TimeoutError):
        collector.update_policy_weights_()
    ray.get(busy)
    updater.timeout = 300
    ray.kill(updater.remote_collectors[1])
    with pytest.raises(ray.exceptions.ActorDiedError):
        collector.update_policy_weights_()
    collector.update_policy_weights_(make_policy(1.0), worker_ids=0)
    collector.shutdown(shutdown_ray=False)


def test_workers_of_a_node_get_views_of_its_store(ray):
    class Kept:
        def update_policy_weights_(self, weights):
            self.weights = weights

        def sum_and_file(self):
            weight = self.weights["weight"]
            for line in Path("/proc/self/maps").read_text().splitlines():
                first, last = (int(x, 16) for x in line.split()[0].split("-"))
                if first <= weight.data_ptr() < last:
                    return weight.sum().item(), line.split()[5]

    actors = [ray.remote(Kept).options(num_cpus=0).remote() for _ in range(2)]
    trained = torch.nn.Linear(1000, 1000)
    updater = RayRemoteWeightUpdater(TensorDict.from_module(trained), actors, timeout=300)
    updater.update_weights()
    for total, file in ray.get([actor.sum_and_file.remote() for actor in actors]):
        assert total == pytest.approx(trained.weight.sum().item(), rel=1e-4)
        assert "plasma" in file
    for actor in actors:
        ray.kill(actor)


def test_a_ray_updater_without_collectors_says_so():
    with pytest.raises(RuntimeError, match="remote_collectors: expected handles"):
        RayRemoteWeightUpdater(TensorDict()).update_weights()
