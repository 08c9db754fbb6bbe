"""The linear ops on several threads: the same bits, whoever computes which tile."""

from __future__ import annotations

import threading

import pytest
import torch

from fusedrl import linear_exact_kl, linear_policy_loss, linear_token_log_probs

ROWS, CLASSES, WIDTH = 530, 9000, 70  # two blocks of rows, several tiles, pairs that end in a half


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16])
def leaves(request):
    """Hidden states, weight and bias of two heads."""
    shapes = [(ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,)] * 2
    return [(torch.randn(shape) / 3).to(request.param).requires_grad_() for shape in shapes]


def log_probs(hidden, weight, bias, *_):
    tokens = torch.arange(ROWS) * 17 % CLASSES
    out = linear_token_log_probs(hidden, weight, tokens, bias=bias, entropy=True)
    return out.log_probs + out.entropy


def divergence(hidden, weight, bias, ref_hidden, ref_weight, ref_bias):
    return linear_exact_kl(
        hidden,
        weight,
        ref_hidden,
        ref_weight,
        bias=bias,
        ref_bias=ref_bias,
        direction="jensen_shannon",
    ).kl


def loss(hidden, weight, bias, *_):
    tokens, mask = torch.arange(ROWS)[None] * 17 % CLASSES, torch.ones(1, ROWS).bool()
    result = linear_policy_loss(hidden[None], weight, tokens, torch.ones(1), mask, bias=bias)
    return result.loss[None]


def outcome(path, leaves, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = path(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.linspace(-1, 1, len(out)), allow_unused=True)
        return [out.detach(), *(grad for grad in grads if grad is not None)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("path", [log_probs, divergence, loss])
def test_bits_do_not_depend_on_the_number_of_threads(path, leaves):
    one = outcome(path, leaves, 1)
    assert any(grad.any() for grad in one[1:])
    for threads in (2, 3, 5):
        assert all(map(torch.equal, outcome(path, leaves, threads), one)), threads


@pytest.mark.heavy
@pytest.mark.parametrize("path", [log_probs, divergence, loss])
def test_calls_from_several_threads(path, leaves):
    want, got = outcome(path, leaves, 2), {}

    def run(caller):
        got[caller] = outcome(path, leaves, 2)

    callers = [threading.Thread(target=run, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(got) == len(callers)
    assert all(all(map(torch.equal, answers, want)) for answers in got.values())
