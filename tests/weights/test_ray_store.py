"""What Ray's object store is given for a tensordict, and gives back."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from fusedrl.weights.ray_store import StoredWeights

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


def through_the_store(weights: TensorDict) -> tuple[TensorDict, bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(StoredWeights(weights), protocol=5, buffer_callback=buffers.append)
    read_only = [memoryview(bytes(buffer)) for buffer in buffers]  # as Ray gives them
    return pickle.loads(data, buffers=read_only), data, buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_weights_come_out_as_they_went_in(dtype):
    weights = TensorDict(
        {
            "a": torch.arange(6).reshape(2, 3).to(dtype),
            ("b", "c"): torch.arange(6).reshape(2, 3).t().to(dtype),
            "sliced": torch.arange(8).to(dtype)[::2],
            "one": torch.tensor(3).to(dtype),
            "empty": torch.empty(0, 2, dtype=dtype),
            "other": torch.empty(3, 0, dtype=dtype),
        }
    )
    got, _, _ = through_the_store(weights)
    assert set(got.keys(True, True)) == set(weights.keys(True, True))
    for key, tensor in weights.items(True, True):
        assert got[key].dtype == dtype and got[key].shape == tensor.shape
        assert torch.equal(got[key].double(), tensor.double())


def test_a_tensor_s_memory_itself_is_stored():
    weights = TensorDict.from_module(nn.Linear(100, 100))
    _, data, buffers = through_the_store(weights)
    memory = torch.frombuffer(buffers[0], dtype=torch.float32)
    assert memory.data_ptr() == weights["weight"].data_ptr()
    assert len(data) < 2000


def test_tied_weights_are_stored_once_and_stay_tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    got, _, buffers = through_the_store(TensorDict.from_module(module))
    assert len(buffers) == 3
    assert got["0", "weight"].data_ptr() == got["1", "weight"].data_ptr()
