"""Serialized values: what is packed in one process is the same in another, and small."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs
from transforms.dialogs import assert_rows_equal, rows

from fusedrl.transport import Contents, Serialized, deserialize, put_together, serialize


def sent(value):
    """Through bytes, as between processes, and from memory that may not be written to."""
    serialized = Serialized(*pickle.loads(pickle.dumps(serialize(value))))
    serialized.memory.flags.writeable = False
    return deserialize(serialized)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64]
DTYPES += [torch.complex32, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor(dtype):
    size = 1 if dtype == torch.bool else 99
    data = torch.randint(0, size + 1, (3, 16), dtype=torch.uint8).view(dtype)
    for value in (data, data[1], data.T, data[1:, ::2], data[:0], data[0, 0]):
        got = sent({"x": value})["x"]
        assert got.dtype == dtype and got.shape == value.shape
        assert torch.equal(
            got.clone().view(-1).view(torch.uint8), value.clone().reshape(-1).view(torch.uint8)
        )
        got.zero_()


def test_rows_that_share_memory_are_sent_once():
    packed = torch.randn(6400)
    samples = lazy_stack([TensorDict(x=row, y=row > 0) for row in packed.split(100)])
    got = sent(samples)
    assert_rows_equal(rows(got, "x"), rows(samples, "x"))
    assert all(torch.equal(x > 0, y) for x, y in zip(rows(got, "x"), rows(got, "y"), strict=True))
    serialized = serialize(samples)
    size = len(pickle.dumps(serialized))
    assert size < 1.5 * (packed.nbytes + packed.numel())


def test_a_part_of_what_came_can_be_kept_alone(tmp_path):
    """Each tensor has a storage of its own, which is what a pickle and torch.save() write."""
    samples = lazy_stack([TensorDict(x=row, y=row > 0) for row in torch.randn(64, 100)])
    got = sent(samples)
    assert len(pickle.dumps(got[0])) < 1.1 * len(pickle.dumps(samples[0].clone()))
    assert all(row["x"].untyped_storage().nbytes() == 400 for row in got.unbind(0))
    torch.save(got[0], tmp_path / "row")
    torch.testing.assert_close(torch.load(tmp_path / "row", weights_only=False), samples[0])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_columns(layout):
    data = TensorDict(batch_size=(2,))
    for i in range(3):  # of one dtype, so that they share a buffer
        parts = [torch.randn(n, 1) for n in (2 + i, 3)]
        data[f"column {i}"] = torch.nested.as_nested_tensor(parts, layout=layout)
    got = sent(data)
    for key in list(data.keys()):
        assert got[key].layout == layout
        assert_rows_equal(got[key].unbind(), data[key].unbind())


def test_a_nested_tensor_without_rows_keeps_its_dtype():
    assert sent(torch.nested.nested_tensor([], dtype=torch.int64)).dtype == torch.int64


def structure(value):
    """The types of a value, its shapes, keys, names, devices, locks and texts, without numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.layout, None if value.is_nested else value.shape
    own = [type(value), value.batch_size, value.device, value.is_locked]
    if is_non_tensor(value):
        return [*own, value.tolist()]
    own.append(value.names)
    if is_tensorclass(value):
        return [*own, structure(value._tensordict)]
    if isinstance(value, LazyStackedTensorDict):
        return [*own, value.stack_dim, [structure(row) for row in value.tensordicts]]
    return [*own, {key: structure(item) for key, item in value._tensordict.items()}]


def leaves(value):
    """All tensors of a value, in order."""
    if isinstance(value, torch.Tensor):
        return list(value.unbind()) if value.is_nested else [value]
    if is_tensorclass(value):
        return leaves(value._tensordict)
    inner = (
        value.tensordicts
        if isinstance(value, LazyStackedTensorDict)
        else value._tensordict.values()
    )
    return [leaf for item in inner for leaf in leaves(item)]


def assert_sent(value):
    got = sent(value)
    assert structure(got) == structure(value)
    for ours, theirs in zip(leaves(got), leaves(value), strict=True):
        assert torch.equal(ours, theirs)
    return got


class Scored(TensorClass):
    tokens: torch.Tensor
    text: str
    scores: TensorDict | None = None


def row(n: int, length: int = 3) -> TensorDict:
    return TensorDict(
        tokens=torch.arange(length) + n,
        log_probs=torch.randn(length),
        reward=torch.randn(length, 1),
        version=torch.tensor(n),
        text=f"row {n}",
        nothing=None,
        next=TensorDict(done=torch.tensor([n > 1]), text=f"next {n}"),
    )


def dialog(n: int) -> History:
    said = [History(role="user", content=f"{n}?"), History(role="assistant", content=f"{n}!")]
    return lazy_stack(said[: n + 1])


VALUES = {
    "empty": lambda: TensorDict(batch_size=(3,)),
    "names and a device": lambda: TensorDict(
        x=torch.ones(2, 3), batch_size=(2,), names=["time"], device="cpu"
    ),
    "equal rows": lambda: lazy_stack([row(n) for n in range(4)]),
    "ragged rows": lambda: lazy_stack([row(n, n) for n in range(4)]),
    "one row": lambda: lazy_stack([row(1)]),
    "rows of other keys": lambda: lazy_stack([row(0), row(1).exclude("text"), TensorDict()]),
    "rows of other dtypes": lambda: lazy_stack(
        [TensorDict(x=torch.ones(2).to(dtype)) for dtype in (torch.int8, torch.bool, torch.int8)]
    ),
    "rows of other dimensions": lambda: lazy_stack(
        [TensorDict(x=torch.ones(shape)) for shape in ((), (2,), (0,), (2, 3), (2, 0), (3, 3))]
    ),
    "a tensor here, text there": lambda: lazy_stack(
        [TensorDict(x=torch.ones(2)), TensorDict(x="two"), TensorDict(x=TensorDict())]
    ),
    "stacks in stacks": lambda: lazy_stack(
        [lazy_stack([row(10 * t + n, t + n) for n in range(2)]) for t in range(3)], -1
    ),
    "stacks of unequal length": lambda: lazy_stack(
        [TensorDict(h=lazy_stack([TensorDict(x=torch.ones(n)) for n in range(m)])) for m in (1, 3)]
    ),
    "a stack along another dimension": lambda: lazy_stack(
        [TensorDict(x=torch.randn(2, 3, n), batch_size=(2, 3)) for n in (1, 2)], 1
    ),
    "rows of views": lambda: lazy_stack(
        [TensorDict(x=x, y=x.T) for x in torch.randn(3, 4, 4).unbind(0)]
    ),
    "text": lambda: TensorDict(
        one=NonTensorData("a", batch_size=(2,)), each=NonTensorStack("b", "c"), batch_size=(2,)
    ),
    "a tensorclass": lambda: Scored(
        torch.ones(2, 3), "a", TensorDict(s=torch.ones(2), batch_size=(2,)), batch_size=(2,)
    ),
    "a stack of tensorclasses": lambda: lazy_stack(
        [Scored(torch.ones(n), f"{n}", batch_size=()) for n in (1, 2)]
    ),
    "dialogs": lambda: lazy_stack(
        [TensorDict(history=ChatHistory(full=dialog(n), batch_size=())) for n in (0, 1, 1)]
    ),
    "names in a stack": lambda: lazy_stack(
        [TensorDict(x=torch.ones(2, n), batch_size=(2,), names=["a"]) for n in (1, 2)]
    ),
    "locked": lambda: lazy_stack([row(n) for n in range(2)]).lock_(),
    "locked rows": lambda: lazy_stack([row(n).lock_() for n in range(2)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_tensordicts_of_all_kinds(name):
    value = VALUES[name]()
    assert_sent(value)
    both = sent({"first": [value], "second": (value, 1)})
    assert both["first"][0] is both["second"][0]
    assert structure(both["first"][0]) == structure(value)


def test_a_tensor_that_occurs_twice_stays_one():
    tensor = torch.ones(2)
    rows = [TensorDict(x=tensor, z=tensor), TensorDict(x=tensor)]
    got = sent([lazy_stack(rows), {"again": tensor}])
    first, second = got[0].tensordicts
    assert first["x"] is first["z"] is second["x"] is got[1]["again"]


class Watch:
    def __reduce__(self):
        return gc.isenabled, ()


def test_the_garbage_collector_waits_until_all_is_read():
    assert sent([Watch()]) == [False] and gc.isenabled()
    with pytest.raises(pickle.UnpicklingError):
        put_together(Contents(b"no pickle", [], 64), np.zeros(64, np.uint8))
    assert gc.isenabled()


def test_what_is_got_can_be_worked_with():
    got = sent(lazy_stack([row(n) for n in range(3)]).lock_())
    with pytest.raises(RuntimeError, match="lock"):
        got[0]["new"] = torch.ones(2)
    got.unlock_()
    got["new"] = torch.ones(3, 2)
    got[1]["text"] = "changed"
    assert got["text"] == ["row 0", "changed", "row 2"]
    assert got.contiguous()["new"].shape == (3, 2)
    assert got.clone()[1:].to_tensordict()["next", "done"].shape == (2, 1)


def test_a_payload_is_pickled_as_it_is():
    cycle: list = [torch.ones(2)]
    cycle.append(cycle)
    payload = {"td": TensorDict(x=torch.ones(1)), "cycle": cycle, "set": {1}}
    got = sent(TensorDict(payload=NonTensorData(payload)))["payload"]
    assert got["cycle"][1] is got["cycle"] and got["set"] == {1}
    assert got["td"]["x"].item() == 1 and got["cycle"][0].tolist() == [1, 1]


def test_values_in_files_are_sent(tmp_path):
    stored = TensorDict(x=torch.arange(4), batch_size=(4,)).memmap_(tmp_path)
    got = sent([stored, lazy_stack([stored[2], stored[3]]), stored])
    assert got[0] is got[2] and got[0].is_locked and not got[0].is_memmap()
    assert type(got[0]["x"]) is torch.Tensor
    assert got[0]["x"].tolist() == [0, 1, 2, 3] and got[1]["x"].tolist() == [2, 3]
    got[0]["x"].zero_()
    assert stored["x"].tolist() == [0, 1, 2, 3]


def test_gradients_stay_behind():
    leaf = torch.ones(2, requires_grad=True)
    got = sent(LogProbs(full=2 * leaf, batch_size=()))
    assert isinstance(got, LogProbs) and not got.full.requires_grad
    assert torch.equal(got.full, torch.full((2,), 2.0))
