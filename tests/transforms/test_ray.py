"""The Ray classes: what their transform gives locally, from an actor that others share."""

from __future__ import annotations

import gc
import pickle
import time
from pathlib import Path

import pytest
import ray_models
import torch
from ray_nodes import living_actors, nodes
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper

from fusedrl import KLRewardTransform, RayKLRewardTransform, RayRetrieveKL, RetrieveKL
from fusedrl.transforms import ray as ray_transforms

from .conftest import chats
from .dialogs import CHATS, assert_rows_equal, conversations, rows
from .test_kl_reward import samples, with_reward

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.heavy

TESTS = Path(__file__).parent.parent
GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")
FACTORIES = {
    "gen_model_factory": ray_models.policy,
    "ref_model_factory": ray_models.reference,
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    nodes.start()
    return ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def shared(cluster):
    """One actor for all tests that do not ask how it starts or ends."""
    return RayRetrieveKL(**FACTORIES, coeff=0.1, num_cpus=0.5)


@pytest.fixture(scope="module")
def shared_reward(cluster):
    """Another, from a model itself, where torchrl's class fails."""
    return KLRewardTransform(
        ray_models.tokens_reference(),
        coef=0.1,
        service_backend="ray",
        service_backend_options={"num_cpus": 0.5},
    )


@pytest.fixture
def local():
    return RetrieveKL(**FACTORIES, coeff=0.1)


@pytest.fixture
def local_reward():
    return KLRewardTransform(ref_model_factory=ray_models.tokens_reference, coef=0.1)


def alive() -> int:
    return len(living_actors())


def assert_ends_with(before: int) -> None:
    gc.collect()
    deadline = time.monotonic() + 120
    while alive() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive() == before


def assert_same(ours, theirs, keys) -> None:
    assert type(ours) is type(theirs)
    assert set(map(str, ours.keys(True))) == set(map(str, theirs.keys(True)))
    for key in keys:
        column, other = ours.get(key, as_list=True), theirs.get(key, as_list=True)
        assert type(column) is type(other)
        if isinstance(column, torch.Tensor):
            assert column.layout == other.layout
        assert_rows_equal(rows(ours, key), rows(theirs, key))


def dialogs(*, stacked: bool, with_next: bool):
    data = conversations(stacked=stacked, with_next=with_next)
    target = data["next"] if with_next else data
    target.set("reward", torch.ones(len(CHATS), 1, 1))
    if with_next:
        data.set("next", target)
    return data


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("with_next", [False, True])
def test_the_answer_is_that_of_the_local_transform(shared, local, stacked, with_next):
    data, other = (dialogs(stacked=stacked, with_next=with_next) for _ in range(2))
    out, wanted = shared(data), local(other)
    assert out is data
    if with_next:
        out, wanted = out["next"], wanted["next"]
    assert_same(out, wanted, (GEN, REF, "kl_penalty", "reward"))
    assert all(row.abs().max() > 0.1 for row in rows(out, "kl_penalty"))


@pytest.mark.parametrize("with_next", [False, True])
def test_the_reward_transform_answers_as_the_local_one(shared_reward, local_reward, with_next):
    answers = []
    for transform in (shared_reward, local_reward):
        made = with_reward(samples())
        if not with_next:
            made = [td.exclude("next").set("reward", td["next", "reward"]) for td in made]
        out = transform(lazy_stack(made))
        answers.append(out["next"] if with_next else out)
    assert_same(*answers, ("reward", "kl_penalty", "ref_log_probs"))


class TestEnvironment:
    """torchrl's actor has no container, and its reward transform asks there for the parent."""

    @pytest.fixture
    def generating(self):
        return TransformersWrapper(
            ray_models.policy_model(),
            tokenizer=ray_models.tokenizer(),
            generate=True,
            return_log_probs=True,
            generate_kwargs={"max_new_tokens": 6, "do_sample": True},
        )

    @pytest.mark.parametrize("name", ["shared", "shared_reward"])
    def test_a_rollout_with_its_specs(self, name, generating, request):
        transform = request.getfixturevalue(name).clone()
        local = request.getfixturevalue(name.replace("shared", "local"))
        env, other = (chats(t, tokenizer=ray_models.tokenizer()) for t in (transform, local))
        assert transform.parent is not None and transform.container is env
        assert env.observation_spec == other.observation_spec
        assert env.full_reward_spec == other.full_reward_spec
        for environment in (env, other):
            environment.reset()
        data = generating(env.reset())
        out, wanted = env.step(data.copy())["next"], other.step(data.copy())["next"]
        assert_same(out, wanted, ("kl_penalty", "reward"))
        assert all(row.abs().max() > 0.1 for row in rows(out, "kl_penalty"))
        turns = env.rollout(2, generating, break_when_any_done=False)
        assert turns.shape == (2, 2) and "kl_penalty" in turns["next"]


def test_the_actors_exception_arrives(shared, shared_reward):
    """And what was refused is unchanged."""
    data = TensorDict(reward=torch.ones(2, 1, 1), batch_size=(2,))
    with pytest.raises(ValueError, match="history"):
        shared(data)
    with pytest.raises(RuntimeError, match="tokens to score"):
        shared_reward(data)
    assert set(data.keys()) == {"reward"}


def test_what_the_constructor_raises_arrives_and_leaves_no_actor(cluster):
    before = alive()
    with pytest.raises(LookupError, match="no such checkpoint"):
        RayKLRewardTransform(ref_model_factory=ray_models.broken, actor_name="broken", num_cpus=0)
    assert_ends_with(before)


def test_the_actor_ends_with_its_last_transform():
    before = alive()
    with pytest.warns(FutureWarning, match="use_ray_service"):
        transform = RetrieveKL(
            ray_models.policy(), ray_models.reference(), use_ray_service=True, num_cpus=0
        )
    assert type(transform) is RayRetrieveKL and isinstance(transform, RetrieveKL)
    copied = transform.clone()
    transform.close()
    assert repr(transform) == "RayRetrieveKL(actor=None)"
    data = dialogs(stacked=True, with_next=False)
    with pytest.raises(RuntimeError, match="closed"):
        transform(data)
    assert "kl_penalty" in copied._step(data, data)
    del copied
    assert_ends_with(before)


@pytest.mark.parametrize("base", [RetrieveKL, KLRewardTransform])
def test_a_subclass_is_refused_whose_code_would_not_run_in_the_actor(base):
    class Doubled(base):
        pass

    with pytest.raises(ValueError, match="service_backend: expected 'direct' for Doubled"):
        Doubled(service_backend="ray")


class TestNames:
    """torchrl names the actor of RetrieveKL for good, and that of the other until it ends."""

    def test_a_name_is_shared(self, local):
        first = RayRetrieveKL(**FACTORIES, coeff=0.1, actor_name="kl", num_cpus=0)
        running = alive()
        second = RetrieveKL(actor_name="kl", service_backend="ray")
        assert alive() == running
        assert first._actor._actor_id == second._actor._actor_id
        del first
        gc.collect()
        wanted = rows(local(dialogs(stacked=True, with_next=False)), "kl_penalty")
        assert_rows_equal(
            rows(second(dialogs(stacked=True, with_next=False)), "kl_penalty"), wanted
        )
        second.close()
        del second
        gc.collect()
        with pytest.raises(ValueError, match="actor_name: expected 'kl' to be an actor of"):
            RayKLRewardTransform(actor_name="kl")
        third = RayRetrieveKL(**FACTORIES, actor_name="kl", coeff=0.1, assistant_only=True)
        ray.kill(third._actor)


def test_what_no_machine_has_is_waited_for_only_so_long(cluster, monkeypatch):
    before = alive()
    monkeypatch.setattr(ray_transforms, "SECONDS_TO_START", 0.5)
    with pytest.raises(RuntimeError, match=r"0 CPUs and 1 GPUs .* within 0.5 seconds"):
        RayRetrieveKL(**FACTORIES, num_cpus=0, num_gpus=1)
    assert_ends_with(before)


def test_a_copy_that_ray_or_pickle_made_has_the_same_actor(shared):
    """A collector in an actor takes its transforms along."""
    wanted = rows(shared(dialogs(stacked=True, with_next=False)), "kl_penalty")
    for copied in (ray.get(ray.put(shared)), pickle.loads(pickle.dumps(shared))):
        out = copied(dialogs(stacked=True, with_next=False))
        assert_rows_equal(rows(out, "kl_penalty"), wanted)


def test_bad_arguments_are_refused_and_leave_no_actor(cluster):
    before = alive()
    model = ray_models.reference()
    cases = [
        (lambda: RayRetrieveKL(**FACTORIES, gen_model=model, num_cpus=0), "got both"),
        (lambda: RayRetrieveKL(ref_model=model), "'from_collector', which an actor cannot access"),
        (lambda: RayRetrieveKL(**FACTORIES, detach=False), "detach: expected True"),
        (lambda: RayKLRewardTransform(num_cpus=0), "exactly one of 'ref_model'"),
    ]
    for build, message in cases:
        with pytest.raises(ValueError, match=message):
            build()
    assert_ends_with(before)
