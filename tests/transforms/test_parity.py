"""The same inputs through torchrl's classes and ours: values, types, shapes, keys, specs, errors.

Where torchrl 0.14.1 is wrong, the last part says so beside what ours does instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Composite, Unbounded
from torchrl.envs.llm import transforms as torchrl_transforms
from torchrl.modules.llm.policies import LogProbs

import fusedrl

from .dialogs import CHATS, assert_rows_equal, conversations, rows

NAMES = ["KLComputation", "RetrieveLogProb", "RetrieveKL"]
GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")
LENGTHS = (3, 5, 2)


def both(name: str) -> tuple[Any, Any]:
    return getattr(fusedrl, name), getattr(torchrl_transforms, name)


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """Same keys, and columns of the same kind, shapes, dtypes and values."""
    assert type(ours) is type(theirs) and ours.batch_size == theirs.batch_size
    keys = set(map(str, ours.keys(True)))
    assert keys == set(map(str, theirs.keys(True)))
    for key in [GEN, REF, "kl_penalty", "reward"]:
        if key not in theirs.keys(True):
            continue
        column, other = ours.get(key, as_list=True), theirs.get(key, as_list=True)
        assert type(column) is type(other), key
        if isinstance(column, torch.Tensor):
            assert (column.is_nested, column.layout) == (other.is_nested, other.layout), key
        assert_rows_equal(
            [row.detach() for row in rows(ours, key)], [row.detach() for row in rows(theirs, key)]
        )


@pytest.mark.parametrize("name", NAMES)
def test_arguments(name):
    """Same names, order, kinds and defaults; ours only adds the collector of unknown ones."""
    ours, theirs = (dict(inspect.signature(cls.__init__).parameters) for cls in both(name))
    for parameters in (ours, theirs):
        for unnamed in [k for k, p in parameters.items() if p.kind is p.VAR_KEYWORD]:
            del parameters[unnamed]
    assert list(ours) == list(theirs)
    for key, parameter in theirs.items():
        assert ours[key].default == parameter.default
        assert ours[key].kind == parameter.kind


@pytest.mark.parametrize("name", NAMES)
def test_instances_are_torchrl_instances(name):
    ours, theirs = both(name)
    assert issubclass(ours, theirs) and ours is not theirs


def samples(reward: str | None) -> list[TensorDict]:
    made = []
    for n in LENGTHS:
        td = TensorDict({GEN: torch.randn(n), REF: torch.randn(n)})
        shape = {"per token": (n, 1), "per sample": (1, 1), "columns": (n, 2)}
        if reward is not None:
            td["reward"] = torch.randn(shape[reward])
        made.append(td)
    return made


def with_nan(reward: str | None) -> list[TensorDict]:
    made = samples(reward)
    made[0][GEN][0] = made[1][REF][2] = float("nan")
    made[2][GEN][1] = float("-inf")
    return made


def as_log_probs(reward: str | None) -> list[TensorDict]:
    made = samples(reward)
    for td in made:
        td["log_probs"] = LogProbs(full=td[GEN], batch_size=())
    return made


@pytest.mark.parametrize("make", [samples, with_nan, as_log_probs])
@pytest.mark.parametrize("reward", [None, "per token", "per sample", "columns"])
@pytest.mark.parametrize("with_next", [False, True])
@pytest.mark.parametrize("add_to_reward", [False, True])
def test_kl_of_a_stack(make, reward, with_next, add_to_reward):
    made = make(reward)
    if with_next:
        made = [TensorDict(next=td) for td in made]
    ours, theirs = (
        cls(coeff=0.3, add_to_reward=add_to_reward)(lazy_stack([td.clone() for td in made]))
        for cls in both("KLComputation")
    )
    assert set(ours.keys(True)) == set(theirs.keys(True))
    assert_same(*((ours["next"], theirs["next"]) if with_next else (ours, theirs)))


@pytest.mark.parametrize("reward", [None, torch.strided])
def test_kl_of_jagged_columns(reward):
    """Jagged log-probs give a strided KL there too; a jagged reward makes torchrl raise."""
    made = samples("per token")

    def column(key: Any, layout: torch.layout) -> torch.Tensor:
        return torch.nested.as_nested_tensor([td[key].clone() for td in made], layout=layout)

    answers = []
    for cls in both("KLComputation"):
        data = TensorDict({key: column(key, torch.jagged) for key in (GEN, REF)}, batch_size=(3,))
        if reward is not None:
            data["reward"] = column("reward", reward)
        answers.append(cls(coeff=0.3)(data))
    ours, theirs = answers
    for key in ["kl_penalty"] + ([] if reward is None else ["reward"]):
        assert ours[key].layout == theirs[key].layout == torch.strided
        assert_rows_equal(ours[key].unbind(), theirs[key].unbind())


@pytest.mark.parametrize("with_next", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("assistant_only", [False, True])
def test_log_probs(policy, stacked, with_next, pad_output, assistant_only):
    answers = []
    for cls in both("RetrieveLogProb"):
        data = conversations(stacked=stacked, with_next=with_next)
        transform = cls(policy(pad_output=pad_output), assistant_only=assistant_only)
        out = transform(data)
        assert out is data
        answers.append((transform, out["next"] if with_next else out))
    (transform, ours), (torchrl_transform, theirs) = answers
    assert transform.in_keys == torchrl_transform.in_keys
    assert transform.out_keys == torchrl_transform.out_keys
    assert type(ours) is type(theirs)
    assert set(map(str, ours.keys(True))) == set(map(str, theirs.keys(True)))
    assert type(ours["gen_log_probs"]) is type(theirs["gen_log_probs"])
    key = ("gen_log_probs", "full")
    assert_rows_equal(rows(ours, key), [row.detach() for row in rows(theirs, key)])
    if pad_output:
        assert ours.get(key).shape == theirs.get(key).shape


@pytest.mark.parametrize("with_next", [False, True])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("add_to_reward", [False, True])
def test_kl_of_two_models(policy, reference, with_next, pad_output, add_to_reward):
    answers = []
    for cls in both("RetrieveKL"):
        data = conversations(stacked=True, with_next=with_next)
        target = data["next"] if with_next else data
        target.set("reward", torch.ones(len(CHATS), 1, 1))
        if with_next:
            data.set("next", target)
        transform = cls(
            policy(pad_output=pad_output),
            reference(pad_output=pad_output),
            add_to_reward=add_to_reward,
            coeff=0.3,
        )
        out = transform(data)
        answers.append((transform, out["next"] if with_next else out))
    (transform, ours), (torchrl_transform, theirs) = answers
    assert [t.in_keys for t in transform] == [t.in_keys for t in torchrl_transform]
    assert [t.out_keys for t in transform] == [t.out_keys for t in torchrl_transform]
    assert_same(ours, theirs)
    assert all(row.abs().max() > 0.1 for row in rows(ours, "kl_penalty"))


def test_a_single_conversation_of_one_model(policy):
    """Batch of 1, where nothing is padded."""
    ours, theirs = (
        rows(cls(policy())(conversations()[:1]), ("gen_log_probs", "full"))
        for cls in both("RetrieveLogProb")
    )
    assert_rows_equal(ours, [row.detach() for row in theirs])


ERRORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "samples of other lengths": (
        "KLComputation",
        lambda cls, **_: cls()(lazy_stack([TensorDict({GEN: torch.ones(2), REF: torch.ones(3)})])),
    ),
    "dense columns of other lengths": (
        "KLComputation",
        lambda cls, **_: cls()(TensorDict({GEN: torch.ones(2, 2), REF: torch.ones(2, 3)}, [2])),
    ),
    "a flat reward": (
        "KLComputation",
        lambda cls, **_: cls()(
            lazy_stack(
                [TensorDict({GEN: torch.ones(2), REF: torch.ones(2), "reward": torch.ones(2)})]
            )
        ),
    ),
    "an unknown argument": ("KLComputation", lambda cls, **_: cls(nonsense=1.0)),
    "a model that generates": (
        "RetrieveLogProb",
        lambda cls, policy, **_: cls(policy(generate=True)),
    ),
    "a model of text": ("RetrieveLogProb", lambda cls, policy, **_: cls(policy(input_mode="text"))),
    "no conversation": (
        "RetrieveLogProb",
        lambda cls, policy, **_: cls(policy())(TensorDict(batch_size=(2,))),
    ),
    "a conversation of another type": (
        "RetrieveLogProb",
        lambda cls, policy, **_: cls(policy())(
            TensorDict({("history", "full"): torch.zeros(2)}, batch_size=(2,))
        ),
    ),
    "no policy": ("RetrieveKL", lambda cls, reference, **_: cls(None, reference())),
    "no reference": ("RetrieveKL", lambda cls, policy, **_: cls(policy(), None)),
    "models that pad differently": (
        "RetrieveKL",
        lambda cls, policy, reference: cls(policy(), reference(pad_output=True)),
    ),
    "models of one key": ("RetrieveKL", lambda cls, policy, **_: cls(policy(), policy())),
    "a policy twice": (
        "RetrieveKL",
        lambda cls, policy, reference: cls(policy(), reference(), gen_model_factory=policy),
    ),
    "a collector that is not there": (
        "RetrieveKL",
        lambda cls, reference, **_: cls("from_collector", reference())(conversations()),
    ),
    "an unknown argument of both models": (
        "RetrieveKL",
        lambda cls, policy, reference: cls(policy(), reference(), coef=1.0),
    ),
}


@pytest.mark.parametrize(("name", "provoke"), ERRORS.values(), ids=ERRORS)
def test_errors_are_of_the_same_kind(name, provoke, policy, reference):
    kinds = []
    for cls in both(name):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            provoke(cls, policy=policy, reference=reference)
        kinds.append(caught.type)
    assert kinds[0] is kinds[1]


class TestWhereTorchrlIsWrong:
    """Each test shows torchrl's answer first, so that a torchrl that mends it is noticed."""

    def test_the_kl_spec_lacks_the_tokens(self):
        ours, theirs = (
            cls().transform_observation_spec(Composite(shape=(2,)))["kl_penalty"]
            for cls in both("KLComputation")
        )
        assert theirs.shape == (2,) and ours.shape == (2, -1)

    def test_the_reward_spec_has_a_dimension_too_many(self):
        def spec(cls: Any) -> torch.Size:
            before = Composite(reward=Unbounded((2, 1)), shape=(2,))
            return cls().transform_reward_spec(before)["reward"].shape

        ours, theirs = map(spec, both("KLComputation"))
        assert theirs == (2, 1, -1, 1) and ours == (2, -1, 1)

    def test_the_log_prob_spec_declares_another_key(self, policy):
        ours, theirs = (
            cls(policy()).transform_observation_spec(Composite(shape=(2,)))
            for cls in both("RetrieveLogProb")
        )
        assert set(theirs.keys(True, True)) == {"kl_penalty"}
        assert set(ours.keys(True, True)) == {("gen_log_probs", "full")}

    @pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
    def test_specs_in_an_environment_raise(self, name, policy, reference, chat_env):
        ours, theirs = both(name)
        models = (policy(), reference())[: 1 if name == "RetrieveLogProb" else 2]
        with pytest.raises(KeyError):
            theirs(*models).transform_output_spec(_output_spec())
        ours(*models).transform_output_spec(_output_spec())

    def test_missing_log_probs_are_an_attribute_error(self):
        data = TensorDict({GEN: torch.ones(2, 3)}, batch_size=(2,))
        ours, theirs = both("KLComputation")
        with pytest.raises(AttributeError):
            theirs()(data)
        with pytest.raises(ValueError, match="ref_log_probs"):
            ours()(data)

    def test_dense_columns_raise_with_a_reward(self):
        data = {GEN: torch.ones(2, 3), REF: torch.zeros(2, 3), "reward": torch.ones(2, 3, 1)}
        ours, theirs = both("KLComputation")
        with pytest.raises(RuntimeError):
            theirs()(TensorDict(data, batch_size=(2,)))
        out = ours()(TensorDict(data, batch_size=(2,)))
        assert out["kl_penalty"].shape == (2, 3) and out["reward"].shape == (2, 3, 1)

    def test_dense_columns_give_a_nested_kl(self):
        """Its docstring shows ``torch.Size([2, 10])``."""
        data = TensorDict({GEN: torch.randn(2, 10), REF: torch.randn(2, 10)}, batch_size=(2,))
        ours, theirs = (cls()(data.clone())["kl_penalty"] for cls in both("KLComputation"))
        assert theirs.is_nested and ours.shape == (2, 10)
        assert_rows_equal(ours.unbind(), theirs.unbind())

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested_columns_raise(self, layout):
        made = samples("per token")

        def column(key: Any) -> torch.Tensor:
            return torch.nested.as_nested_tensor([td[key] for td in made], layout=layout)

        data = TensorDict({key: column(key) for key in (GEN, REF, "reward")}, batch_size=(3,))
        ours, theirs = both("KLComputation")
        with pytest.raises(RuntimeError):
            theirs()(data.copy())
        out = ours()(data.copy())
        assert_rows_equal(out["kl_penalty"].unbind(), [td[GEN] - td[REF] for td in made])

    def test_detach_keeps_the_graph(self, policy):
        ours, theirs = (
            rows(cls(policy(), detach=True)(conversations()), ("gen_log_probs", "full"))
            for cls in both("RetrieveLogProb")
        )
        assert theirs[0].requires_grad and not ours[0].requires_grad

    def test_plain_tensordicts_raise(self, policy, reference):
        ours, theirs = both("RetrieveKL")
        with pytest.raises(RuntimeError):
            theirs(policy(), reference())(conversations())
        assert "kl_penalty" in ours(policy(), reference())(conversations())

    def test_from_collector_reads_the_collector_with_the_specs(self, reference, chat_env):
        ours, theirs = both("RetrieveKL")
        with pytest.raises((ValueError, AttributeError), match=r"collector|internal error"):
            chat_env(theirs("from_collector", reference())).observation_spec  # noqa: B018
        assert "kl_penalty" in chat_env(ours("from_collector", reference())).observation_spec


def _output_spec() -> Composite:
    return Composite(
        full_observation_spec=Composite(shape=(2,)),
        full_reward_spec=Composite(reward=Unbounded((2, 1, 1)), shape=(2,)),
        shape=(2,),
    )
