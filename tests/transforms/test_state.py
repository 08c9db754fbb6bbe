"""Copies, saved state and specs of the three transforms, before and after there are models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose
from torchrl.envs.llm import transforms as torchrl_transforms

import fusedrl
from fusedrl import RetrieveKL

from .dialogs import assert_rows_equal, rewarded, rows

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")

COPIES = {
    "clone": lambda transform: transform.clone(),
    "pickle": lambda transform: pickle.loads(pickle.dumps(transform)),
    "deepcopy": copy.deepcopy,
    "compose": lambda transform: Compose(transform).clone()[0],
}


SPECS = {
    "observation": lambda: Composite(shape=(2,)),
    "reward": lambda: Composite(reward=Unbounded((2, 1, 1)), shape=(2,)),
    "action": lambda: Composite(action=Unbounded((2, 3)), shape=(2,)),
    "output": lambda: Composite(
        full_observation_spec=Composite(shape=(2,)),
        full_reward_spec=Composite(reward=Unbounded((2, 1, 1)), shape=(2,)),
        full_done_spec=Composite(shape=(2,)),
        shape=(2,),
    ),
}


class TestDeferred:
    """``"from_collector"`` before there is one, which torchrl's class asks for in every method."""

    @pytest.fixture
    def deferred(self, reference):
        return RetrieveKL("from_collector", reference())

    @pytest.mark.parametrize("name", SPECS)
    def test_specs_are_those_of_given_models(self, deferred, retrieve_kl, name):
        before = SPECS[name]()
        ours, given = (
            getattr(transform, f"transform_{name}_spec")(SPECS[name]())
            for transform in (deferred, retrieve_kl())
        )
        assert ours == given
        assert (ours != before) == (name in ("observation", "reward", "output"))
        assert len(deferred.transforms) == 2, "still deferred"

    @pytest.mark.parametrize("copied", ["clone", "pickle", "deepcopy"])
    def test_copies_are_still_deferred(self, deferred, copied, chat_env, generating_policy):
        other = COPIES[copied](deferred)
        env = chat_env(other)
        with pytest.raises(ValueError, match="an environment of a collector"):
            env.step(generating_policy(env.reset()))


class TestCopiesAndState:
    @pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
    def test_copies_answer_alike(self, retrieve_kl, copied):
        transform = retrieve_kl(coeff=torch.tensor(0.3), kl_key="kl", padding_side="right")
        other = copied(transform)
        assert type(other) is RetrieveKL and other is not transform
        ours, theirs = other(rewarded()), transform(rewarded())
        for key in (GEN, REF, "kl", "reward"):
            assert_rows_equal(rows(ours, key), rows(theirs, key))

    @pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL", "KLComputation"])
    def test_the_state_is_torchrls(self, policy, reference, name):
        """A checkpoint of torchrl's transform loads into ours, and the other way round."""
        models = {"RetrieveLogProb": [policy()], "RetrieveKL": [policy(), reference()]}
        ours, theirs = (
            getattr(module, name)(*models.get(name, [])) for module in (fusedrl, torchrl_transforms)
        )
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert bool(ours.state_dict()) == (name != "KLComputation")
