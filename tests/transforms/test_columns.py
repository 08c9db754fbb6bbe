"""Columns of a stack of samples: which are reached directly, and which through tensordict."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.modules.llm.policies import LogProbs

from fusedrl import KLComputation
from fusedrl.transforms import columns

from .dialogs import GEN, REF, stack


def check(samples: list[dict], data: LazyStackedTensorDict) -> None:
    """The data is the samples, penalised by a tenth of their KL."""
    for sample, out in zip(samples, data.tensordicts, strict=True):
        kl = sample[GEN] - sample[REF]
        torch.testing.assert_close(out["kl_penalty"], kl)
        torch.testing.assert_close(out["reward"], sample["reward"] - 0.1 * kl.unsqueeze(-1))


class Untouchable(TensorDict):
    """A subclass, which may store its entries in any way."""


def _locked(samples):
    return stack(samples).lock_()


def _subclassed(samples):
    return lazy_stack([Untouchable(sample) for sample in samples])


class TestPrivateAccess:
    """Samples' dicts are touched for exact, unlocked, known types only; this pins them."""

    def test_exact_types_are_reached_directly(self, samples):
        data = stack(samples)
        reached = columns.columns_of(data)
        assert isinstance(reached, columns.SampleColumns)
        assert all(type(td._tensordict) is dict for td in data.tensordicts)
        assert reached.get(GEN)[0] is samples[0][GEN]
        reached.set("x", [torch.ones(2)] * 3)
        assert data.tensordicts[0].get("x").shape == (2,)

    @pytest.mark.parametrize(
        "build",
        [
            _locked,
            _subclassed,
            lambda s: stack(s).to_tensordict(retain_none=True),
            lambda s: stack(s)[0],
        ],
        ids=["locked", "subclass", "unstacked", "one sample"],
    )
    def test_anything_else_goes_through_the_public_interface(self, samples, build):
        uniform = [{key: x[:2] for key, x in sample.items()} for sample in samples]
        assert isinstance(columns.columns_of(build(uniform)), columns.Columns)


class TestSamplesThatDiffer:
    """Samples are looked up together, one level of keys after the other."""

    def test_wrapped_and_plain_log_probs_stand_beside_each_other(self, samples):
        data = stack(samples)
        wrapped = LogProbs._from_tensordict(data.tensordicts[1].get(GEN[0]))
        data.tensordicts[1]._tensordict[GEN[0]] = wrapped
        reached = columns.columns_of(data)
        assert isinstance(reached, columns.SampleColumns)
        for row, sample in zip(reached.get(GEN), samples, strict=True):
            assert row is sample[GEN]
        check(samples, KLComputation(coeff=0.1)(data))
