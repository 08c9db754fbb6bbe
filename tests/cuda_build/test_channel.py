"""Channels whose slots lie on the GPU: by IPC into another process, and under a collector."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from counting_dialogs import Counting
from cuda_build import workers
from torch import nn

from fusedrl import LLMCollector, PolicyVersion, WeightChannel

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def channel():
    with WeightChannel.create(workers.weights_of(0), device="cuda") as channel:
        yield channel


def test_this_process_leases_what_it_published(channel):
    assert channel.device == torch.device("cuda", 0)
    with channel.handle.open() as reader:
        for version in range(1, 6):
            assert channel.publish(workers.weights_of(version)) == version
            with reader.lease() as lease:
                assert (lease.version, lease.weights["a"].device) == (version, channel.device)
                assert workers.values_of(lease.weights) == [version]


def test_a_thread_that_has_not_used_the_device_ends_a_lease(channel):
    channel.publish(workers.weights_of(1))
    with channel.handle.open() as reader:
        thread = threading.Thread(target=reader.lease().release)
        thread.start()
        thread.join()
        assert channel.readers()[0].leased == ()
        with (
            pytest.raises(RuntimeError, match="CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            reader.lease()


def test_another_process_reads_the_same_memory(channel):
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=workers.lease_each, args=(theirs, channel.handle), daemon=True)
    child.start()
    theirs.close()
    try:
        for version in range(1, 6):  # more than there are slots
            channel.publish(workers.weights_of(version))
            ours.send(True)
            assert ours.poll(120)
            assert ours.recv() == (version, "cuda:0", [version])
        ours.send(False)
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_a_closed_channel_gives_its_memory_back():
    before = torch.cuda.mem_get_info()[0]
    with WeightChannel.create(workers.weights_of(0), device="cuda") as channel:
        assert torch.cuda.mem_get_info()[0] < before
        channel.publish(workers.weights_of(1))
        with channel.handle.open() as reader, reader.lease():
            pass
    del channel, reader
    assert torch.cuda.mem_get_info()[0] == before


def test_a_module_on_the_gpu_is_published(channel):
    module = nn.Linear(8, 4, device="cuda")
    copy = nn.Linear(8, 4, device="cuda")
    with WeightChannel.create(module) as channel, channel.handle.open() as reader:
        assert channel.publish() == 1
        assert reader.load_into(copy) == 1
        assert copy.weight.is_cuda and copy.weight.data_ptr() != module.weight.data_ptr()


def test_a_collector_computes_with_the_newest_weights_on_the_gpu():
    weights = {"module.value": torch.zeros(1)}
    with WeightChannel.create(weights, device="cuda") as channel:
        channel.publish({"module.value": torch.ones(1)})
        collector = LLMCollector(
            Counting(),
            policy=workers.policy(),
            dialog_turns_per_batch=2,
            total_dialog_turns=-1,
            channel=channel.handle,
            track_policy_version=PolicyVersion(),
        )
        for version in (1, 2, 3, 4, 5):
            batch = collector.next()
            assert set(batch["action"].flatten().tolist()) == {version}
            assert set(batch["next", "policy_version"].flatten().tolist()) == {version}
            channel.publish({"module.value": torch.full((1,), version + 1.0)})
        collector.shutdown()
