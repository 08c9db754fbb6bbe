"""The divergences of TRL's distillation and GKD trainers: ours beside TRL's, and float64."""

from __future__ import annotations

import inspect
import logging
import math

import pytest
import torch
from accuracy import no_worse

pytest.importorskip("trl.kernels.chunked_divergence", reason="no trl, or one without a divergence")

from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.trainer.distillation_trainer import _chunked_divergence_loss

import fusedrl
from fusedrl.integrations import trl_distillation, trl_divergence, trl_gkd, trl_log

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
OPTIONS = [{}, {"scale": 0.5, "softcap": 4.0, "temperature": 0.7}]


def heads(rows=(12,), dtype=torch.float32, teacher_dtype=None):
    """Hidden states, weight and bias of a student, and of a wider teacher that is like it."""
    sides = [
        (torch.randn(*rows, width), torch.randn(300, width) / 4, torch.randn(300))
        for width in (16, 24)
    ]
    return [x.to(dtype) for x in sides[0]], [x.to(teacher_dtype or dtype) for x in sides[1]]


def definition(student, teacher, beta, scale=1.0, softcap=None, temperature=1.0):
    """Divergence and the student's entropy in the dtype of the arguments."""

    def log_softmax(hidden, weight, bias, scale, softcap):
        logits = (hidden @ weight.T + bias) * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits / temperature, -1)

    def kl(p, q):
        return (p.exp() * (p - q)).sum(-1)

    s, t = log_softmax(*student, scale, softcap), log_softmax(*teacher, 1.0, None)
    entropy = -(s.exp() * s).sum(-1)
    if beta in (0, 1):
        return (kl(s, t) if beta else kl(t, s)), entropy
    m = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
    return beta * kl(t, m) + (1 - beta) * kl(s, m), entropy


def apply(function, student, teacher, beta, scale=1.0, softcap=None, temperature=1.0):
    """The outputs, and the gradients of a sum that weighs every row differently."""
    student = [x.clone().requires_grad_() for x in student]
    teacher = [x.clone().requires_grad_() for x in teacher]
    divergence, entropy = function(*student, *teacher, beta, temperature, scale, softcap)
    assert not entropy.requires_grad
    up = torch.linspace(-1, 1, len(divergence)).to(divergence)
    grads = torch.autograd.grad((divergence * up).sum(), [*student, *teacher], allow_unused=True)
    assert grads[3:] == (None, None, None)
    return (divergence, entropy), grads[:3]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shaped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_entropy_and_gradients_are_no_worse_than_those_of_trl(beta, options, dtype):
    student, teacher = heads(dtype=dtype)
    theirs = apply(ChunkedDivergenceFunction.apply, student, teacher, beta, **options)
    ours = apply(trl_divergence.ChunkedDivergenceFunction.apply, student, teacher, beta, **options)
    doubles = [x.double().requires_grad_() for x in student]
    exact = definition(doubles, [x.double() for x in teacher], beta, **options)
    up = torch.linspace(-1, 1, 12, dtype=torch.float64)
    exact_grads = torch.autograd.grad((exact[0] * up).sum(), doubles)
    for got, other, want in zip(ours[0], theirs[0], exact, strict=True):
        assert got.dtype == other.dtype == torch.float32
        no_worse(got, other, want.detach(), 2e-6 + 1e-6 * want.max().item())
    for got, other, want in zip(ours[1], theirs[1], exact_grads, strict=True):
        assert got.dtype == other.dtype == dtype
        no_worse(got, other, want, 2e-6 + 1e-6 * want.abs().max().item())


def test_a_teacher_of_another_dtype_and_autocast():
    student, teacher = heads(teacher_dtype=torch.bfloat16)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            theirs = apply(ChunkedDivergenceFunction.apply, student, teacher, 0.3)
            ours = apply(trl_divergence.ChunkedDivergenceFunction.apply, student, teacher, 0.3)
        rounding = 0.01 if autocast else 1e-4  # autocast rounds our biases and gradients
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


def loss_of(function, student, teacher, mask, **options):
    student = [x.clone().requires_grad_() for x in student]
    loss, entropy, count = function(
        *(student[0], teacher[0], student[1], teacher[1], mask, 0.3),
        student_lm_head_bias=student[2],
        teacher_lm_head_bias=teacher[2],
        student_final_logit_softcapping=5.0,
        teacher_logit_scale=0.5,
        temperature=0.9,
        **options,
    )
    return (loss.detach(), entropy, count), torch.autograd.grad(loss, student)


@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)])
@pytest.mark.parametrize("keep", [0.6, 0.0])
def test_the_loss_of_distillation_is_that_of_trl(items, keep):
    student, teacher = heads((3, 5))
    mask = (torch.rand(3, 5) < keep).long()
    options = {"num_items_in_batch": items}
    theirs = loss_of(_chunked_divergence_loss, student, teacher, mask, **options)
    for hidden in (student[0], teacher[0]):
        hidden[mask == 0] = torch.nan  # ours does not read them
    ours = loss_of(trl_distillation.chunked_divergence_loss, student, teacher, mask, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s, t: ([x.double() for x in s], [x.double() for x in t], 1.0), "torch.float64"),
        (lambda s, t: (s, t, -1.0), "logits scaled by -1.0"),
    ],
)
def test_what_only_trl_computes_is_left_to_it_and_logged_once(change, reason, monkeypatch, caplog):
    monkeypatch.setattr(trl_log, "_said", set())
    student, teacher, scale = change(*heads())
    expected = apply(ChunkedDivergenceFunction.apply, student, teacher, 0.3, scale)
    with caplog.at_level(logging.WARNING, logger="fusedrl"):
        for _ in range(2):
            found = apply(
                trl_divergence.ChunkedDivergenceFunction.apply, student, teacher, 0.3, scale
            )
    assert all(map(torch.equal, (*found[0], *found[1]), (*expected[0], *expected[1])))
    assert [record.message for record in caplog.records] == [caplog.records[0].message]
    assert reason in caplog.records[0].message


def gkd_loss(function, pair, **options):
    leaves = [x.clone().requires_grad_() for x in pair]
    loss = function(leaves[0][:, :-1], leaves[1][:, :-1], **options)
    return loss.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": torch.tensor(7)},
        {"reduction": "sum", "temperature": 0.7},
        {"reduction": "mean"},
    ],
    ids=str,
)
@pytest.mark.parametrize("labelled", [False, True])
def test_the_loss_of_gkd_is_that_of_trl(beta, options, labelled):
    pair = torch.randn(2, 3, 6, 200).unbind()
    labels = torch.where(torch.rand(3, 5) < 0.6, 1, -100) if labelled else None
    options = {**options, "beta": beta, "labels": labels}
    theirs = gkd_loss(trl_gkd._theirs, pair, **options)
    ours = gkd_loss(trl_gkd._generalized_jsd_loss, pair, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    exact = gkd_loss(trl_gkd._theirs, [x.double() for x in pair], **options)
    for got, other, want in zip(
        (ours[0], *ours[1]), (theirs[0], *theirs[1]), (exact[0], *exact[1]), strict=True
    ):
        no_worse(got, other, want, 1e-6 + 5e-7 * want.abs().max().item())


def test_half_logits_keep_their_dtype_and_a_batch_without_labels_its_zero():
    pair = torch.randn(2, 3, 6, 200).bfloat16().unbind()
    labels = torch.full((3, 5), -100)
    for options in ({}, {"labels": labels}):
        theirs, ours = (
            gkd_loss(f, pair, **options) for f in (trl_gkd._theirs, trl_gkd._generalized_jsd_loss)
        )
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=1e-3)  # and the dtypes
    assert ours[0] == 0


@pytest.mark.parametrize(
    ("beta", "temperature", "reason"), [(1e-32, 1.0, "a beta of 1e-32"), (0.3, -1.0, "of -1.0")]
)
def test_numbers_that_the_op_refuses_are_left_to_trl(
    beta, temperature, reason, monkeypatch, caplog
):
    monkeypatch.setattr(trl_log, "_said", set())
    student, teacher = heads()
    sides = (*student, *teacher, beta, temperature)
    expected = ChunkedDivergenceFunction.apply(*sides)
    with caplog.at_level(logging.WARNING, logger="fusedrl"):
        found = trl_divergence.ChunkedDivergenceFunction.apply(*sides)
    assert all(map(torch.equal, found, expected))
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reduction": "none"}, "reduction 'none', one value a class"),
        ({"beta": torch.tensor(0.3)}, "a beta of 0.3"),
    ],
)
def test_a_loss_of_gkd_that_only_trl_computes(options, reason, monkeypatch, caplog):
    monkeypatch.setattr(trl_log, "_said", set())
    pair = torch.randn(2, 3, 6, 20).unbind()
    expected = trl_gkd._theirs(*pair, **options)
    with caplog.at_level(logging.WARNING, logger="fusedrl"):
        assert torch.equal(trl_gkd._generalized_jsd_loss(*pair, **options), expected)
    assert reason in caplog.text


def test_the_patch_replaces_the_three_and_puts_them_back():
    from trl.experimental.gkd import gkd_trainer
    from trl.trainer import distillation_trainer

    def held():
        return (
            distillation_trainer.ChunkedDivergenceFunction,
            distillation_trainer._chunked_divergence_loss,
            inspect.getattr_static(gkd_trainer.GKDTrainer, "generalized_jsd_loss"),
        )

    before = held()
    with fusedrl.patch_trl() as report:
        assert held() == (
            trl_divergence.ChunkedDivergenceFunction,
            trl_distillation.chunked_divergence_loss,
            trl_gkd.generalized_jsd_loss,
        )
        assert not {"GKDTrainer", "DistillationTrainer"} & report.untouched.keys()
        assert report.in_part["GKDTrainer"].startswith("the divergence, from logits, but for")
        assert report.in_part["DistillationTrainer"].startswith("the divergence and the student's")
        again = fusedrl.patch_trl()
        assert "GKDTrainer.generalized_jsd_loss" in again.already
    assert held() == before
