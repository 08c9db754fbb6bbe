"""Tensors without values: every op answers with shapes and dtypes, on ``meta`` and when fake."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedrl import (
    VocabPart,
    exact_kl,
    importance_weights,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_kl,
    token_log_probs,
    top_k_kl,
)
from fusedrl.integrations.trl import selective_log_softmax, selective_log_softmax_and_entropy


class Inputs:
    """Batches of four tokens, five classes and three features, on one device."""

    def __init__(self, device, dtype, requires_grad):
        self.float = {"device": device, "dtype": dtype, "requires_grad": requires_grad}
        self.device = device

    def values(self, *shape):
        return torch.zeros(shape, **self.float)

    def tokens(self, *shape):
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def ids(self, *shape):
        return torch.arange(shape[-1], device=self.device).expand(shape)

    def constants(self, *shape):
        return torch.full(shape, -3.0, device=self.device)

    def mask(self, *shape):
        return torch.zeros(shape, dtype=torch.bool, device=self.device)

    def offsets(self):
        if self.device == "meta":
            return torch.empty(3, dtype=torch.int64, device="meta")
        return torch.tensor([0, 1, 4], device=self.device)

    def scalar(self):
        return torch.ones((), device=self.device)

    def head(self):
        return self.values(4, 3), self.values(5, 3)


def weighed(*args, **options):
    weights, mismatch = importance_weights(*args, **options)
    return (*weights, *mismatch) if isinstance(weights, list) else (weights, *mismatch)


CASES = {
    "token_log_probs": lambda i: token_log_probs(
        i.values(4, 5), i.tokens(4), i.mask(4), offsets=i.offsets(), shift=True, entropy=True
    ),
    "token_log_probs, padded": lambda i: token_log_probs(
        i.values(2, 4, 5), i.tokens(2, 4), shift=True, temperature=i.scalar()
    ),
    "linear_token_log_probs": lambda i: linear_token_log_probs(
        *(*i.head(), i.tokens(4), i.mask(4)), bias=i.values(5), softcap=3.0, entropy=True
    ),
    "linear_policy_loss": lambda i: (
        linear_policy_loss(
            *(*i.head(), i.tokens(4), i.mask(4), torch.stack([i.scalar(), i.scalar()])),
            bias=i.values(5),
            offsets=i.offsets(),
            shift=True,
            entropy_coeff=0.1,
        ).loss
    ),
    "top_k_kl": lambda i: top_k_kl(
        i.values(2, 4, 5), i.ids(2, 4, 2), i.constants(2, 4, 2), shift=True
    ),
    "linear_top_k_kl": lambda i: linear_top_k_kl(
        *(*i.head(), i.ids(4, 2), i.constants(4, 2), i.mask(4)), tail="renormalize"
    ),
    "token_kl": lambda i: token_kl(
        *(i.values(4), i.values(4), i.mask(4)), offsets=i.offsets(), reward=i.values(2)
    ),
    "token_kl, a coefficient": lambda i: token_kl(
        i.values(2, 4), i.values(2, 4), reward=i.values(2), coeff=i.scalar()
    ),
    "token_kl, a list": lambda i: tuple(
        token_kl([i.values(3), i.values(1)], [i.values(3), i.values(1)])
    ),
    "importance_weights": lambda i: weighed(
        i.values(4), i.values(4), i.mask(4), i.offsets(), level="sequence"
    ),
    "importance_weights, padded": lambda i: weighed(
        i.values(2, 4), i.values(2, 4), high=i.scalar()
    ),
    "importance_weights, a list": lambda i: weighed(
        [i.values(3), i.values(1)], [i.values(3), i.values(1)], low=0.5
    ),
    "exact_kl": lambda i: exact_kl(i.values(4, 5), i.values(4, 5), i.mask(4)),
    "exact_kl, Jensen-Shannon": lambda i: exact_kl(
        i.values(2, 4, 5), i.values(2, 4, 5), direction="jensen_shannon", shift=True
    ),
    "exact_kl, its entropy": lambda i: exact_kl(
        i.values(4, 5), i.values(4, 5), direction="jensen_shannon", beta=0.0, entropy=True
    ),
    "linear_exact_kl": lambda i: linear_exact_kl(*i.head(), *i.head(), i.mask(4)),
    "linear_exact_kl, its entropy": lambda i: linear_exact_kl(
        *i.head(), *i.head(), direction="jensen_shannon", beta=0.3, entropy=True
    ),
    "selective_log_softmax": lambda i: selective_log_softmax(i.values(4, 5), i.tokens(4, 2)),
    "selective_log_softmax_and_entropy": lambda i: selective_log_softmax_and_entropy(
        i.values(2, 4, 5), i.tokens(2, 4)
    ),
}

CONSTANT = {name for name in CASES if name.startswith("importance_weights")}


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def described(tensors):
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_meta_in_meta_out(name, dtype, requires_grad):
    expected = flat(CASES[name](Inputs("cpu", dtype, requires_grad)))
    inputs = Inputs("meta", dtype, requires_grad)
    results = flat(CASES[name](inputs))
    assert all(x.is_meta for x in results)
    if not name.startswith("selective"):
        assert described(results) == described(expected)
    if requires_grad and name not in CONSTANT:
        torch.autograd.backward([x.sum() for x in results])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_fake_in_fake_out(name, dtype, requires_grad):
    expected = described(flat(CASES[name](Inputs("cpu", dtype, requires_grad))))
    with FakeTensorMode():
        results = flat(CASES[name](Inputs("cpu", dtype, requires_grad)))
        assert described(results) == expected
        if requires_grad and name not in CONSTANT:
            torch.autograd.backward([x.sum() for x in results])


@pytest.mark.parametrize("name", [x for x in CASES if "selective" not in x and x not in CONSTANT])
def test_a_gradient_has_the_shape_of_its_input(name):
    class Remembering(Inputs):
        def __init__(self):
            super().__init__("meta", torch.bfloat16, True)
            self.leaves = []

        def values(self, *shape):
            self.leaves.append(super().values(*shape))
            return self.leaves[-1]

    inputs = Remembering()
    results = flat(CASES[name](inputs))
    grads = torch.autograd.grad([x.sum() for x in results], inputs.leaves)
    assert described(grads) == [(*entry[:2], False) for entry in described(inputs.leaves)]
    assert all(x.is_meta for x in grads)


def test_the_reference_on_meta():
    out = token_log_probs(
        torch.empty(4, 5, device="meta", dtype=torch.float64),
        torch.empty(4, device="meta", dtype=torch.int64),
        impl="reference",
    )
    assert out.is_meta
    assert (out.shape, out.dtype) == ((4,), torch.float64)


def test_jagged_meta():
    lengths = torch.tensor([0, 1, 4], device="meta")
    logits = torch.nested.nested_tensor_from_jagged(
        torch.empty(4, 5, device="meta"), lengths, min_seqlen=1, max_seqlen=3
    )
    tokens = torch.nested.nested_tensor_from_jagged(
        torch.empty(4, dtype=torch.int64, device="meta"), lengths, min_seqlen=1, max_seqlen=3
    )
    out = token_log_probs(logits, tokens)
    assert out.is_nested
    assert out.values().is_meta
    assert out.values().shape == (4,)


def test_shards_on_meta():
    i = Inputs("meta", torch.float32, False)
    parts = [linear_token_log_probs(*i.head(), i.tokens(4), vocab_offset=n) for n in (0, 5)]
    assert VocabPart.combine(parts).shape == (4,)


def test_other_implementations_are_refused_on_meta():
    logits = torch.empty(4, 5, device="meta")
    tokens = torch.empty(4, dtype=torch.int64, device="meta")
    for impl in ("cpu", "cuda"):
        with pytest.raises(
            ValueError, match=f"impl: expected tensors on {impl} with '{impl}', got meta"
        ):
            token_log_probs(logits, tokens, impl=impl)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_companion_on_another_device_is_refused(device):
    here, there = Inputs(device, torch.float32, False), {"cpu": "meta", "meta": "cpu"}[device]
    elsewhere = Inputs(there, torch.float32, False)
    refused = {
        "tokens": lambda: token_log_probs(here.values(4, 5), elsewhere.tokens(4)),
        "mask": lambda: token_log_probs(here.values(4, 5), here.tokens(4), elsewhere.mask(4)),
        "offsets": lambda: token_log_probs(
            here.values(4, 5), here.tokens(4), offsets=elsewhere.offsets()
        ),
        "weight": lambda: linear_token_log_probs(
            here.values(4, 3), elsewhere.values(5, 3), here.tokens(4)
        ),
        "bias": lambda: linear_token_log_probs(
            *here.head(), here.tokens(4), bias=elsewhere.values(5)
        ),
        "ref_log_probs": lambda: token_kl(here.values(4), elsewhere.values(4)),
        "reward": lambda: token_kl(here.values(4), here.values(4), reward=elsewhere.values(4)),
        "ids": lambda: top_k_kl(here.values(4, 5), elsewhere.ids(4, 2), here.constants(4, 2)),
        "teacher_log_probs": lambda: linear_top_k_kl(
            *here.head(), here.ids(4, 2), elsewhere.constants(4, 2)
        ),
        "rollout_log_probs": lambda: importance_weights(here.values(4), elsewhere.values(4)),
        "ref_logits": lambda: exact_kl(here.values(4, 5), elsewhere.values(4, 5)),
        "ref_hidden": lambda: linear_exact_kl(
            *here.head(), elsewhere.values(4, 3), here.values(5, 3)
        ),
    }
    for name, call in refused.items():
        with pytest.raises(ValueError, match=f"^{name}: expected device {device}, got {there}"):
            call()


def test_a_scalar_on_meta_beside_data_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match=r"temperature: .* beside the data on cpu, got meta"):
        token_log_probs(
            torch.zeros(4, 5),
            torch.zeros(4, dtype=torch.int64),
            temperature=torch.ones((), device="meta"),
        )


def test_a_default_device_changes_nothing():
    for name, case in CASES.items():
        expected = flat(case(Inputs("cpu", torch.float32, False)))
        with torch.device("meta"):
            found = flat(case(Inputs("cpu", torch.float32, False)))
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other), name
