"""``KLComputation``: every representation in, the same one out, one formula."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.data import Composite, Unbounded
from torchrl.envs.llm.transforms import KLComputation as TorchrlKLComputation
from torchrl.modules.llm.policies import LogProbs

from fusedrl import KLComputation
from fusedrl.transport import deserialize, serialize

from .dialogs import GEN, LENGTHS, REF, stack


def nested(samples: list[dict], key, layout=torch.strided) -> torch.Tensor:
    return torch.nested.as_nested_tensor([sample[key] for sample in samples], layout=layout)


def check(samples: list[dict], kl, reward, coeff: float) -> None:
    """``kl`` and ``reward``, rows, are what the definition gives."""
    for sample, k, r in zip(samples, kl, reward, strict=True):
        torch.testing.assert_close(k, sample[GEN] - sample[REF])
        torch.testing.assert_close(r, sample["reward"] - coeff * k.unsqueeze(-1))


@pytest.mark.parametrize("with_next", [False, True])
def test_stack_of_samples(samples, with_next):
    data = stack(samples)
    if with_next:
        data = lazy_stack([TensorDict(next=sample) for sample in data.tensordicts])
    transform = KLComputation(coeff=0.1)
    out = transform(data)
    assert out is data
    assert isinstance(transform, TorchrlKLComputation)
    target = out["next"] if with_next else out
    kl, reward = target.get("kl_penalty", as_list=True), target.get("reward", as_list=True)
    check(samples, kl, reward, 0.1)
    assert len({k.untyped_storage().data_ptr() for k in kl}) == 1, "views of one buffer"


def test_stack_of_stacks(samples):
    """A collector's batch, ``[envs, turns]``; torchrl raises ``AttributeError``."""
    data = lazy_stack([stack(samples[:1]), stack(samples[1:2])])
    KLComputation(coeff=0.5)(data)
    leaves = [inner.tensordicts[0] for inner in data.tensordicts]
    check(samples[:2], [x["kl_penalty"] for x in leaves], [x["reward"] for x in leaves], 0.5)


def test_log_probs_object(samples):
    """torchrl's policies write log-probs as a ``LogProbs``, not as a plain tensordict."""
    data = lazy_stack(
        [
            TensorDict(
                {"log_probs": LogProbs(full=s[GEN], batch_size=()), REF: s[REF]}
                | {"reward": s["reward"]}
            )
            for s in samples
        ]
    )
    KLComputation()(data)
    check(samples, data.get("kl_penalty", as_list=True), data.get("reward", as_list=True), 1.0)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_columns(samples, layout):
    """Everything keeps its layout; torchrl raises."""
    data = TensorDict(
        {key: nested(samples, key, layout) for key in (GEN, REF, "reward")}, batch_size=(3,)
    )
    KLComputation(coeff=0.1)(data)
    kl, reward = data["kl_penalty"], data["reward"]
    assert kl.is_nested and kl.layout == layout
    assert reward.is_nested and reward.layout == layout
    check(samples, kl.unbind(), reward.unbind(), 0.1)


def test_jagged_columns_with_holes(samples):
    lengths = torch.tensor(LENGTHS)

    def column(key):
        padded = torch.nn.utils.rnn.pad_sequence(
            [sample[key] for sample in samples], batch_first=True, padding_value=float("nan")
        )
        return torch.nested.narrow(padded, 1, torch.zeros(3, dtype=int), lengths, torch.jagged)

    data = TensorDict({key: column(key) for key in (GEN, REF, "reward")}, batch_size=(3,))
    KLComputation(coeff=0.1)(data)
    check(samples, data["kl_penalty"].unbind(), data["reward"].unbind(), 0.1)


def test_dense_columns():
    """torchrl answers nested here, and raises with a reward; its docstring promises ``[2, 10]``."""
    gen, ref, reward = torch.randn(2, 10), torch.randn(2, 10), torch.randn(2, 10, 1)
    data = TensorDict(next={GEN: gen, REF: ref, "reward": reward}, batch_size=(2,))
    out = KLComputation(coeff=0.1)(data)["next"]
    torch.testing.assert_close(out["kl_penalty"], gen - ref)
    torch.testing.assert_close(out["reward"], reward - 0.1 * (gen - ref).unsqueeze(-1))


def test_nan_is_a_missing_score_and_infinity_is_not(samples):
    samples[0][GEN][1] = float("nan")
    samples[1][REF][0] = float("nan")
    samples[2][REF][1] = float("-inf")
    data = KLComputation(coeff=0.1)(stack(samples))
    kl, reward = data.get("kl_penalty", as_list=True), data.get("reward", as_list=True)
    assert kl[0][1] == 0 and kl[1][0] == 0 and kl[2][1] == float("inf")
    assert reward[0][1] == samples[0]["reward"][1]
    assert reward[2][1] == float("-inf")


@pytest.mark.parametrize("kind", ["stack", "nested", "dense"])
def test_gradients_reach_both_models(samples, kind):
    """d(kl)/d(gen) = 1 and d(kl)/d(ref) = -1, weighted by non-uniform upstream gradients."""
    if kind == "dense":
        samples = [samples[0], {key: torch.randn_like(x) for key, x in samples[0].items()}]
    for sample in samples:
        sample[GEN].requires_grad_()
        sample[REF].requires_grad_()
    if kind == "stack":
        data = stack(samples)
    else:
        column = nested if kind == "nested" else (lambda s, key: torch.stack([x[key] for x in s]))
        data = TensorDict(
            {key: column(samples, key) for key in (GEN, REF, "reward")}, batch_size=len(samples)
        )
    KLComputation(coeff=0.1)(data)
    kl, reward = ([td[key] for td in data.unbind(0)] for key in ("kl_penalty", "reward"))
    up = [torch.randn_like(k) for k in kl]
    loss = sum(
        (u * k).sum() + (2 * u * r.squeeze(-1)).sum()
        for u, k, r in zip(up, kl, reward, strict=True)
    )
    loss.backward()
    for sample, u in zip(samples, up, strict=True):
        torch.testing.assert_close(sample[GEN].grad, u - 0.2 * u)
        torch.testing.assert_close(sample[REF].grad, 0.2 * u - u)


@pytest.mark.parametrize("missing", [GEN, REF])
def test_missing_log_probs_are_named(samples, missing):
    """torchrl means to raise ``ValueError``, but its message reads attributes that do not exist."""
    for sample in samples:
        del sample[missing]
    with pytest.raises(ValueError, match=r"log_probs.*found none under"):
        KLComputation()(stack(samples))


def test_one_key_for_both_models_is_refused():
    """torchrl answers a KL of 0."""
    with pytest.raises(ValueError, match="ref_log_probs_full_key: expected another key"):
        KLComputation(GEN, ("log_probs", ("full",)))


BAD = {
    "lengths": (lambda s: s[1].update({REF: torch.zeros(4)}), "ref_log_probs: sample 1"),
    "reward dimensions": (lambda s: s[2].update(reward=torch.zeros(2)), "reward: sample 2"),
    "reward columns": (lambda s: [x.update(reward=torch.zeros(4, 3)) for x in s], "reward: sample"),
    "reward length": (lambda s: s[0].update(reward=torch.zeros(2, 1)), "reward: sample 0"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_anything_changes(samples, spoil, message):
    spoil(samples)
    data = stack(samples)
    with pytest.raises(ValueError, match=message):
        KLComputation()(data)
    for sample, row in zip(samples, data.tensordicts, strict=True):
        assert "kl_penalty" not in row and row["reward"] is sample["reward"]


class Untouchable(TensorDict):
    """A subclass, which is read through tensordict's public interface."""


STACKS = {
    "stack": lazy_stack,
    "stack of stacks": lambda tds: lazy_stack([lazy_stack(tds[:1]), lazy_stack(tds[1:2])]),
    "subclass": lambda tds: lazy_stack([Untouchable(td) for td in tds]),
    "sent": lambda tds: deserialize(serialize((lazy_stack(tds),)))[0],
}


@pytest.mark.parametrize("build", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("key", [GEN, REF, "reward", "next"])
def test_a_column_that_one_sample_lacks_is_refused(samples, build, lacking, key):
    """A stack hides such a column, and its rewards would go without a penalty."""
    made = [TensorDict(sample) for sample in samples]
    if key == "next":
        made = [td.set("next", td.clone()) for td in made]
    del made[lacking][key]
    data = build(made)
    before = leaves(data)
    with pytest.raises(ValueError, match=rf"under {re.escape(repr(key))} .* sample {lacking}"):
        KLComputation()(data)
    assert leaves(data) == before


def test_a_batch_without_samples_is_refused(samples):
    with pytest.raises(ValueError, match="expected at least one sample, got none"):
        KLComputation()(stack(samples)[:0])


def leaves(data) -> list[dict]:
    """What each sample has: the very objects, whose values no transform changes."""
    if isinstance(data, LazyStackedTensorDict):
        return [sample for inner in data.tensordicts for sample in leaves(inner)]
    return [{key: id(value) for key, value in data.items(True, True)}]


def test_specs_are_the_shapes_of_the_data():
    """torchrl declares the KL without a token dimension and the reward with one too many."""
    data = TensorDict(
        {GEN: torch.randn(2, 4), REF: torch.randn(2, 4), "reward": torch.zeros(2, 1, 1)}, [2]
    )
    transform = KLComputation()
    out = transform(data)
    observation = transform.transform_observation_spec(Composite(shape=(2,)))
    reward = transform.transform_reward_spec(Composite(reward=Unbounded((2, 1, 1)), shape=(2,)))
    assert observation["kl_penalty"].shape == (2, -1)
    assert reward["reward"].shape == (2, -1, 1)
    assert observation["kl_penalty"].is_in(out["kl_penalty"])
    assert reward["reward"].is_in(out["reward"])
