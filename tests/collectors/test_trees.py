"""Tensordicts taken apart and copied by the compiled library: as tensordict itself would do it.

It knows the private attributes of tensordict's classes, which a release may change.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data.llm import History

from fusedrl.collectors.turn_data import IDS, TurnCopies, ended, rows_of, tag


def turn(rows: int = 3, **more: Any) -> TensorDict:
    chats = [[{"role": "user", "content": f"{row}?"}] for row in range(rows)]
    return TensorDict(
        {
            "seen": torch.arange(rows).unsqueeze(-1),
            "wide": torch.rand(rows, 100),
            "text": NonTensorStack(*(f"text {row}" for row in range(rows))),
            "same": NonTensorData("one for all", batch_size=(rows,)),
            "history": History.from_chats(chats),
            "next": TensorDict(done=torch.zeros(rows, 1, dtype=torch.bool), batch_size=(rows,)),
            "deep": TensorDict(tokens=torch.arange(2 * rows).view(rows, 2), batch_size=(rows, 2)),
            **more,
        },
        batch_size=(rows,),
    )


FORMS = {
    "dense": turn,
    "lazy": lambda: turn().to_lazystack(0),
    "named": lambda: turn().refine_names("dialog"),
    "locked": lambda: turn().lock_(),
    "stacked elsewhere": lambda: lazy_stack([turn(), turn()], 1),
    "tensorclass": lambda: turn().get("history"),
}


def assert_equal(made: Any, expected: Any) -> None:
    assert type(made) is type(expected) and made.batch_size == expected.batch_size
    assert made.device == expected.device and made.names == expected.names
    assert made.to_dict() is not None and str(made) == str(expected)
    assert (made == expected).all()


def addresses(value: Any) -> set[int]:
    """Of the memory of all tensors in it."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr()}
    parts = getattr(value, "tensordicts", None)
    if parts is None:
        parts = () if isinstance(value, NonTensorData) else value.values()
    return set().union(*(addresses(part) for part in parts))


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_unbind(form):
    given = FORMS[form]()
    made, expected = rows_of(given), given.reshape(-1).unbind(0)
    assert len(made) == len(expected)
    for row, one in zip(made, expected, strict=True):
        assert_equal(row, one)
        assert row.is_locked == one.is_locked
    if form == "dense":
        made[1]["seen"].fill_(9)
        assert given["seen"][1].item() == 9  # a view
        assert made[1].set("more", torch.ones(1)) is not None


def test_a_list_of_rows_is_the_callers():
    given = turn().to_lazystack(0)
    rows_of(given).clear()
    assert given.shape == (3,)


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_equal_and_shares_nothing(form):
    given = FORMS[form]()
    made = TurnCopies().after(given)
    assert_equal(made, given)
    assert not made.is_locked
    ours, theirs = addresses(made), addresses(given)
    assert len(ours) == len(theirs) and not ours & theirs


def test_what_is_kept_or_pickled_of_many_small_entries_is_that_alone():
    """Compared with a clone of torchrl's collector, for each row and for all of them."""
    draw = random.Random(0)
    rows = [
        TensorDict(
            {
                f"{number}": torch.full((draw.randint(0, 3),), row, dtype=dtype)
                for number, dtype in enumerate((torch.bool, torch.int64, torch.float32) * 8)
            }
        )
        for row in range(64)
    ]
    theirs = [row.clone() for row in rows]
    ours = TurnCopies().after(lazy_stack(rows)).tensordicts

    def saved(value: Any) -> int:
        file = io.BytesIO()
        torch.save(value, file)
        return len(file.getvalue())

    def held(value: Any) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in value.values())

    sizes = (held, saved, lambda value: len(pickle.dumps(value)), lambda v: held(copy.deepcopy(v)))
    assert all(size(ours[7]) <= 1.5 * size(theirs[7]) for size in sizes)
    assert len(pickle.dumps(ours)) <= 1.5 * len(pickle.dumps(theirs))
    assert saved(ours) <= 1.5 * saved(theirs)


def test_tensors_of_every_kind_are_cloned():
    kinds = [
        lambda n: torch.ones(n + 1),  # of several shapes
        lambda n: torch.ones(1, dtype=(torch.int64, torch.float32)[n % 2]),
        lambda n: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda n: torch.nn.Parameter(torch.ones(1)),
        lambda n: torch.ones(1).to_sparse(),
        lambda n: torch.ones(1, requires_grad=True) * 2,
    ]
    for make in kinds:
        rows = [TensorDict._new_unsafe({"a": make(n)}, batch_size=torch.Size([])) for n in range(6)]
        made = TurnCopies().after(lazy_stack(rows))
        for row, cloned in zip(rows, made.tensordicts, strict=True):
            given, got = row._tensordict["a"], cloned._tensordict["a"]
            assert got is not given and got.dtype == given.dtype and got.layout == given.layout
            if not given.is_nested and not given.is_sparse:
                assert torch.equal(got, given) and got.data_ptr() != given.data_ptr()


def test_rows_that_have_ids_or_are_locked():
    rows: list[Any] = [TensorDict(a=torch.ones(1)) for _ in range(2)]
    tag(rows, torch.tensor([3, 4]).unbind(0))
    assert [int(row[IDS]) for row in rows] == [3, 4]
    tag(rows, torch.tensor([5, 6]).unbind(0))  # they have some
    assert [int(row[IDS]) for row in rows] == [5, 6]
    with pytest.raises(RuntimeError, match="locked"):
        tag([TensorDict(a=torch.ones(1)).lock_()], torch.tensor([3]).unbind(0))


@pytest.mark.parametrize("form", ["dense", "lazy"])
def test_what_has_ended(form):
    given = FORMS[form]()
    given[1]["next", "done"].fill_(True)
    assert ended(given).tolist() == [False, True, False]
