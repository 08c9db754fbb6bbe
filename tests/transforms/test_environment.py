"""The transforms in torchrl's environments: what specs declare is what steps give."""

from __future__ import annotations

import pytest
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase

from fusedrl import KLComputation, RetrieveKL, RetrieveLogProb

from .dialogs import rows

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")


def check_specs(env: EnvBase, step: TensorDictBase) -> None:
    """Every tensor of every sample has the dtype and the shape that its spec declares.

    torchrl's own ``check_env_specs`` draws a random action, which a chat environment has not.
    """
    specs = Composite(
        {**env.full_observation_spec, **env.full_reward_spec, **env.full_done_spec},
        shape=env.batch_size,
    )
    for key in (GEN, REF, "kl_penalty"):
        assert (key in step.keys(True)) == (key in specs.keys(True)), key
    for key, spec in specs.items(True, True):
        if spec.dtype is None:
            continue
        declared = spec.shape[len(env.batch_size) :]
        for row in rows(step, key):
            assert row.dtype == spec.dtype, key
            assert row.dim() == len(declared), key
            sizes = zip(row.shape, declared, strict=True)
            assert all(size == expected for size, expected in sizes if expected != -1), key


@pytest.fixture(params=[False, True], ids=["unpadded", "padded"])
def transforms(request, policy, reference):
    """Each class, and those that need another's answer with it."""
    gen, ref = (model(pad_output=request.param) for model in (policy, reference))
    return {
        "RetrieveLogProb": lambda: [RetrieveLogProb(ref)],
        "RetrieveKL": lambda: [RetrieveKL(gen, ref)],
        "without a reward": lambda: [RetrieveKL(gen, ref, add_to_reward=False)],
        "KLComputation": lambda: [
            RetrieveLogProb(gen, log_probs_full_key=GEN),
            RetrieveLogProb(ref),
            KLComputation(coeff=0.1),
        ],
    }


NAMES = ["RetrieveLogProb", "RetrieveKL", "without a reward", "KLComputation"]


@pytest.mark.parametrize("name", NAMES)
def test_rollout(name, transforms, chat_env, generating_policy):
    env = chat_env(*transforms[name]())
    data = env.rollout(3, generating_policy, break_when_any_done=False)
    assert data.shape == (2, 3)
    for turn in data.unbind(1):
        check_specs(env, turn["next"])
        if name != "RetrieveLogProb":
            assert all(row.abs().max() > 0.1 for row in rows(turn["next"], "kl_penalty"))
