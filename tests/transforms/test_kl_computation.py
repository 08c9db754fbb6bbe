"""``KLComputation``: every representation in, the same one out, one formula."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.envs.llm.transforms import KLComputation as TorchrlKLComputation

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
    with pytest.raises(ValueError, match=r"log_probs.*found none; run"):
        KLComputation()(stack(samples))


def test_one_key_for_both_models_is_refused():
    """torchrl answers a KL of 0."""
    with pytest.raises(ValueError, match="ref_log_probs_full_key: expected another key"):
        KLComputation(GEN, ("log_probs", ("full",)))


BAD = {
    "lengths": (lambda s: s[1].update({REF: torch.zeros(4)}), "ref_log_probs: sample 1"),
    "reward dimensions": (lambda s: s[2].update(reward=torch.zeros(2)), "reward: sample 2"),
    "reward columns": (lambda s: [x.update(reward=torch.zeros(4, 3)) for x in s], "size"),
    "reward length": (lambda s: s[0].update(reward=torch.zeros(2, 1)), "size"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_anything_changes(samples, spoil, message):
    spoil(samples)
    data = stack(samples)
    with pytest.raises((ValueError, RuntimeError), match=message):
        KLComputation()(data)
    for sample, row in zip(samples, data.tensordicts, strict=True):
        assert "kl_penalty" not in row and row["reward"] is sample["reward"]


STACKS = {
    "stack": lazy_stack,
    "stack of stacks": lambda tds: lazy_stack([lazy_stack(tds[:1]), lazy_stack(tds[1:2])]),
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


def leaves(data) -> list[dict]:
    """What each sample has: the very objects, whose values no transform changes."""
    if isinstance(data, LazyStackedTensorDict):
        return [sample for inner in data.tensordicts for sample in leaves(inner)]
    return [{key: id(value) for key, value in data.items(True, True)}]


def test_names_of_torchrl_s_own_example():
    """Its docstring has them, though its class refuses them."""
    older = {"gen_log_probs_key": ("a", "full"), "ref_log_probs_key": ("b", "full"), "coef": 0.25}
    transform = KLComputation(**older)
    assert transform.in_keys == [("a", "full"), ("b", "full"), "reward"]
    assert transform.coeff == 0.25
    with pytest.raises(TypeError, match="nonsense: expected a known argument"):
        KLComputation(nonsense=1.0, coef=0.25)
