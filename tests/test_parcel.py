"""Parcels: what is packed in one process is the same in another, and small."""

from __future__ import annotations

import pickle

import pytest
import ray_models
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import LogProbs
from transforms.dialogs import assert_rows_equal, conversations, rows

from fusedrl import RetrieveKL
from fusedrl.parcel import Parcel, pack, unpack
from fusedrl.transforms.actor import TransformActor


def sent(value):
    """Through bytes, as between processes, and from memory that may not be written to."""
    parcel = Parcel(*pickle.loads(pickle.dumps(pack(value))))
    parcel.memory.flags.writeable = False
    return unpack(parcel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_tensor(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    for value in (x, x.T, x[1:, ::2], x[:0], x[0, 0]):
        got = sent({"x": value})["x"]
        assert got.dtype == dtype and torch.equal(got, value)
        got.zero_()


def test_rows_that_share_memory_are_sent_once():
    packed = torch.randn(6400)
    samples = lazy_stack([TensorDict(x=row, y=row > 0) for row in packed.split(100)])
    got = sent(samples)
    assert_rows_equal(rows(got, "x"), rows(samples, "x"))
    assert all(torch.equal(x > 0, y) for x, y in zip(rows(got, "x"), rows(got, "y"), strict=True))
    parcel = pack(samples)
    size = len(pickle.dumps(parcel))
    assert size < 1.5 * (packed.nbytes + packed.numel())


def test_one_tensordict_in_two_places_stays_one():
    data = TensorDict(x=torch.ones(2))
    first, second = sent((data, data))
    assert first is second


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


def test_gradients_stay_behind():
    leaf = torch.ones(2, requires_grad=True)
    got = sent(LogProbs(full=2 * leaf, batch_size=()))
    assert isinstance(got, LogProbs) and not got.full.requires_grad
    assert torch.equal(got.full, torch.full((2,), 2.0))


@pytest.mark.parametrize("stacked", [False, True])
def test_an_actors_transform_of_padded_columns(stacked):
    """Run here: what crosses is what a process apart would give."""
    models = {
        "gen_model_factory": ray_models.padding_policy,
        "ref_model_factory": ray_models.padding_reference,
    }
    answers = []
    for run in (
        lambda data: unpack(
            TransformActor(RetrieveKL, dict(models)).run("forward", pack((data,)), False)
        ),
        RetrieveKL(**models),
    ):
        data = conversations(stacked=stacked)
        answers.append(run(data.set("reward", torch.ones(len(data), 1, 1))))
    ours, theirs = answers
    assert "history" not in ours
    for key in (("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"):
        assert_rows_equal(rows(ours, key), rows(theirs, key))
        if not stacked:
            assert ours[key].shape == theirs[key].shape
