"""Arguments under their old names: accepted, with one warning each."""

from __future__ import annotations

import warnings

import pytest

from fusedrl import KLComputation, KLRewardTransform
from fusedrl.transforms import renamed_arguments

GEN, REF = ("a", "full"), ("b", "full")
OLD = {"gen_log_probs_key": GEN, "ref_log_probs_key": REF, "coef": 0.25}


@pytest.fixture(autouse=True)
def _nothing_warned_of(monkeypatch):
    monkeypatch.setattr(renamed_arguments, "_warned", set())


@pytest.fixture
def caught():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_old_names_mean_the_new_ones(caught):
    """torchrl refuses them, though the example in its docstring still uses them."""
    transform = KLComputation(**OLD, kl_key="kl", add_to_reward=True)
    assert transform.in_keys == [GEN, REF, "reward"]
    assert transform.coeff == 0.25
    assert transform.out_keys == ["kl", "reward"]


def test_each_old_name_warns_once_and_at_its_caller(caught):
    for _ in range(2):
        KLComputation(**OLD)
    assert sorted(str(w.message).split()[0] for w in caught) == sorted(OLD)
    assert {(w.category, w.filename) for w in caught} == {(DeprecationWarning, __file__)}


@pytest.mark.usefixtures("caught")
def test_both_names_are_refused():
    with pytest.raises(TypeError, match=r"coef: expected it or coeff.*got both"):
        KLComputation(coef=1.0, coeff=1.0)
    with pytest.raises(TypeError, match="gen_log_probs_full_key"):
        KLComputation(GEN, gen_log_probs_key=GEN)
    with pytest.raises(TypeError, match="coeff: expected it or coef, got both"):
        KLRewardTransform(coef=1.0, coeff=1.0)
