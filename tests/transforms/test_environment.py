"""The transforms in torchrl's environments: what specs declare is what steps give."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.llm import DatasetChatEnv

from fusedrl import KLComputation, RetrieveKL, RetrieveLogProb

from .conftest import QUESTIONS, OneReward
from .dialogs import assert_rows_equal, rows

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


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_has_an_empty_row_of_each_observation(name, transforms, chat_env):
    env = chat_env(*transforms[name]())
    declared = {GEN, REF, "kl_penalty"} & set(env.observation_spec.keys(True, True))
    reset = env.reset()
    assert declared == {GEN, REF, "kl_penalty"} & set(reset.keys(True))
    assert {tuple(row.shape) for key in declared for row in rows(reset, key)} == {(0,)}


@pytest.mark.parametrize("name", NAMES)
def test_a_cloned_environment_steps_alike(name, transforms, chat_env, generating_policy):
    env = chat_env(*transforms[name]())
    acted = generating_policy(env.reset())
    ours, cloned = (
        e.step(acted.copy())["next"] for e in (env, chat_env(env.transform[2:].clone()))
    )
    for key in {GEN, REF, "kl_penalty", "reward"} & set(ours.keys(True)):
        assert_rows_equal(rows(cloned, key), rows(ours, key))


@pytest.mark.parametrize("from_loader", [False, True])
def test_dataset_chat_env(policy, reference, tokenizer, generating_policy, tmp_path, from_loader):
    def collate(batch):
        questions = NonTensorStack(*(x["query"] for x in batch))
        return TensorDict(query=questions, batch_size=(len(batch),))

    data = [{"query": question} for question in QUESTIONS * 4]
    if from_loader:
        loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=collate)
        env = DatasetChatEnv.from_dataloader(loader, tokenizer=tokenizer, batch_size=(2,))
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(data).to_json(tmp_path / "train.jsonl")
        env = DatasetChatEnv(
            dataset=str(tmp_path),
            split="train",
            num_envs=2,
            batch_size_dl=2,
            tokenizer=tokenizer,
            collate_fn=collate,
        )
    for transform in (OneReward(), RetrieveKL(policy(), reference(), coeff=0.1)):
        env = env.append_transform(transform)
    data = env.rollout(2, generating_policy, break_when_any_done=False)
    for turn in data.unbind(1):
        check_specs(env, turn["next"])
        kl = rows(turn["next"], "kl_penalty")
        assert all(row.abs().max() > 0.1 for row in kl)
        penalised = [1 - 0.1 * row.unsqueeze(-1) for row in kl]
        assert_rows_equal(rows(turn["next"], "reward"), penalised)
