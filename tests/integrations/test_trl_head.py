"""The fused LM head of TRL's trainers: ours beside TRL's."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction

from fusedrl.integrations import trl_head

OURS = ("entropy", "mean_logits", "is_top1")


def make(dtype=torch.float32, rows=60, seed=0):
    """Hidden states that predict two thirds of the targets, half of these surely."""
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(rows, 16), torch.randn(300, 16), torch.randn(300)
    targets = torch.randint(0, 300, (rows,))
    hidden[::2] *= 0.2
    likely = (hidden @ weight.T + bias).argmax(-1)
    targets[rows // 3 :] = likely[rows // 3 :]
    return [x.to(dtype) for x in (hidden, weight, bias)], targets


def run(function, tensors, targets, *options):
    """The outputs, and the gradients of a sum that weighs every row differently."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = function.apply(*leaves, targets, *options)
    up = torch.linspace(-1, 1, len(targets), dtype=tensors[0].dtype)
    loss = (outputs[0] * up).sum()
    if outputs[1] is not None:
        loss = loss + (outputs[1] * up.flip(0)).sum()
    return outputs, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ((1.0, 128), OURS),
        ((0.7, 128), ("log_probs", "entropy")),
        ((1.3, 128, None, 0.25), OURS),
        ((1.0, 128, 5.0, 0.5), ("entropy", "is_top1")),
        ((1.0, 128), ()),
    ],
)
def test_outputs_and_gradients_equal_trl(options, outputs):
    tensors, targets = make()
    options = (*options, None, 1.0)[:4] if len(options) < 4 else options
    expected = run(ChunkedLogProbFunction, tensors, targets, *options, outputs)
    found = run(trl_head.ChunkedLogProbFunction, tensors, targets, *options, outputs)
    assert [x is None for x in found[0]] == [x is None for x in expected[0]]
    for ours, theirs in zip(found[0], expected[0], strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_some_targets_are_decided_by_their_probability_and_some_multiplied(monkeypatch):
    multiplied = []

    def counting(hidden, *args, _argmax=trl_head._argmax):
        multiplied.append(len(hidden))
        return _argmax(hidden, *args)

    monkeypatch.setattr(trl_head, "_argmax", counting)
    tensors, targets = make()
    options = (1.0, 128, None, 1.0, ("is_top1",))
    found = trl_head.ChunkedLogProbFunction.apply(*tensors, targets, *options)[4]
    assert torch.equal(found, ChunkedLogProbFunction.apply(*tensors, targets, *options)[4])
    assert 0 < multiplied[0] < int(found.sum()) < len(targets)


def test_the_top_class_is_the_first_of_the_likeliest():
    """Also where its probability does not tell: another class may have more than 0.3."""
    rows = torch.tensor([[0.6, 0.3, 0.1], [0.45, 0.45, 0.1], [0.4, 0.3, 0.3]]).log()
    for target, expected in enumerate(([True, True, True], [False] * 3, [False] * 3)):
        targets = torch.full((3,), target)
        *_, top = trl_head.ChunkedLogProbFunction.apply(
            rows, torch.eye(3), None, targets, 1.0, 128, None, 1.0, ("is_top1",)
        )
        assert top.tolist() == expected


@pytest.mark.parametrize("autocast", [False, True])
def test_half_heads_are_no_less_accurate_than_trl(autocast):
    tensors, targets = make(torch.bfloat16)
    options = (1.0, 128, None, 1.0, ("entropy",))
    logits = tensors[0].double() @ tensors[1].double().T + tensors[2].double()
    truth = torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)
    given = [x.float() for x in tensors] if autocast else tensors
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        by_us, gradients = run(trl_head.ChunkedLogProbFunction, given, targets, *options)
        by_trl, theirs = run(ChunkedLogProbFunction, given, targets, *options)
    assert by_us[0].dtype == by_trl[0].dtype == torch.float32
    assert [x.dtype for x in gradients] == [x.dtype for x in theirs] == [x.dtype for x in given]
    no_worse(by_us[0].detach(), by_trl[0].detach(), truth, 1e-5)


def test_a_half_weight_is_multiplied_in_the_dtype_of_the_hidden_states():
    (hidden, weight, bias), targets = make(torch.bfloat16)
    args = (hidden.float(), weight, bias, targets, 1.0, 128, None, 1.0, ("entropy",))
    found = trl_head.ChunkedLogProbFunction.apply(*args)
    expected = ChunkedLogProbFunction.apply(*args)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("softcap", "scale", "outputs", "reason"),
    [
        (None, 1.0, OPTIONAL_OUTPUTS, "log_sum_sq_probs"),
        (5.0, 1.0, ("mean_logits",), "softcap"),
        (None, 0.0, ("entropy",), "no fused head for logit_scale=0.0"),
    ],
)
def test_what_only_trl_computes_is_left_to_it_and_logged_once(
    softcap, scale, outputs, reason, caplog
):
    tensors, targets = make()
    options = (1.0, 128, softcap, scale, outputs)
    for _ in range(2):
        found = trl_head.ChunkedLogProbFunction.apply(*tensors, targets, *options)
    torch.testing.assert_close(
        found, ChunkedLogProbFunction.apply(*tensors, targets, *options), rtol=0, atol=0
    )
    assert len(caplog.records) == 1
    assert reason in caplog.text


@pytest.mark.heavy
def test_compiles_without_a_graph_break():
    tensors, targets = make()
    options = (0.9, 128, None, 1.0, ("entropy", "mean_logits"))

    class Compiled:
        apply = staticmethod(
            torch.compile(
                trl_head.ChunkedLogProbFunction.apply, fullgraph=True, backend="aot_eager"
            )
        )

    torch.testing.assert_close(
        run(Compiled, tensors, targets, *options),
        run(trl_head.ChunkedLogProbFunction, tensors, targets, *options),
    )
