"""TRL's functions over logits, and the patch that puts ours in their place."""

from __future__ import annotations

import re

import pytest
import torch
from accuracy import no_worse

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

from trl.trainer import utils as theirs

import fusedrl
from fusedrl.integrations import trl as ours

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")

SHAPES = [(7, 50), (2, 5, 50), (2, 3, 2, 50), (50,)]


def make(shape, dtype=torch.float32, classes=None, seed=0):
    torch.manual_seed(seed)
    logits = (3 * torch.randn(shape)).to(dtype)
    rows = shape[:-1] if classes is None else (*shape[:-1], classes)
    return logits, torch.randint(0, shape[-1], rows)


def value_and_gradient(function, logits, *args):
    leaf = logits.clone().requires_grad_()
    value = function(leaf, *args)
    value.float().backward(torch.linspace(-1, 1, value.numel()).view(value.shape))
    return value.detach(), leaf.grad


def exact(logits, index, temperature=1.0):
    log_softmax = torch.log_softmax(logits.double() / temperature, -1)
    return torch.gather(log_softmax, -1, index)


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("classes", [None, 1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_log_probs_equal_trl(shape, classes, masked):
    logits, index = make(shape, classes=classes)
    mask = (torch.rand(index.shape) < 0.6).long() if masked else None
    args = (logits, index, 0.7, mask)
    found = value_and_gradient(ours.selective_log_softmax, *args)
    torch.testing.assert_close(found, value_and_gradient(theirs.selective_log_softmax, *args))
    if mask is not None:
        assert torch.equal(found[0][mask == 0], torch.zeros(int((mask == 0).sum())))


@pytest.mark.parametrize("classes", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_come_out_as_trl_types_them_and_no_less_accurate(dtype, classes):
    logits, index = make((4, 100, 50), dtype, classes)
    truth, gradient = value_and_gradient(
        lambda x: exact(x, index if classes else index[..., None]).view(index.shape),
        logits.double(),
    )
    by_us = value_and_gradient(ours.selective_log_softmax, logits, index)
    by_trl = value_and_gradient(theirs.selective_log_softmax, logits, index)
    assert by_us[0].dtype == by_trl[0].dtype == dtype
    assert by_us[1].dtype == dtype
    no_worse(by_us[0], by_trl[0], truth, 0)
    no_worse(by_us[1], by_trl[1], gradient, 0)
    kept = ours.selective_log_softmax(logits, index, dtype=torch.float32)
    assert (kept.double() - truth).abs().max() < 1e-5


def test_a_single_row_and_an_empty_batch():
    logits, index = make((50,), classes=3)
    torch.testing.assert_close(
        ours.selective_log_softmax(logits, index), torch.log_softmax(logits, -1)[index]
    )
    assert ours.selective_log_softmax(logits, index[0]).shape == ()
    assert ours.selective_log_softmax(logits[None][:0], index[None][:0]).shape == (0, 3)


def test_classes_of_probability_zero():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, 1.0, -torch.inf]])
    index = torch.tensor([[1, 0], [2, 0]])
    value, gradient = value_and_gradient(ours.selective_log_softmax, logits, index)
    torch.testing.assert_close(value, torch.log_softmax(logits, -1).gather(-1, index))
    assert not gradient.isnan().any()
    entropy = ours.entropy_from_logits(logits)
    torch.testing.assert_close(entropy.exp(), torch.tensor([2.0, 1.0]))


def test_masked_rows_are_not_read():
    logits, index = make((2, 5, 50))
    logits[0], index[0] = torch.nan, -100
    mask = torch.tensor([[0], [1]]).expand(2, 5)
    log_probs, gradient = value_and_gradient(ours.selective_log_softmax, logits, index, 1.0, mask)
    assert torch.equal(log_probs[0], torch.zeros(5))
    assert torch.equal(gradient[0], torch.zeros(5, 50))


def test_an_index_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"index: expected shape \(2, 5\)"):
        ours.selective_log_softmax(torch.zeros(2, 5, 50), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("classes", [None, 4])
def test_results_may_be_written_to_before_the_backward_pass(classes):
    """As DPO of TRL 1.0 does with masked tokens."""
    logits, index = make((2, 5, 50), classes=classes)

    def zeroed(module):
        def run(x):
            log_probs = module.selective_log_softmax(x, index)
            log_probs[0] = 0.0
            entropy = module.entropy_from_logits(x)
            entropy[1] = 0.0
            return log_probs.reshape(2, 5, -1) + entropy[..., None]

        return run

    torch.testing.assert_close(
        value_and_gradient(zeroed(ours), logits), value_and_gradient(zeroed(theirs), logits)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_equals_trl(shape):
    logits, _ = make(shape)
    expected = value_and_gradient(theirs.entropy_from_logits, logits, 3)
    torch.testing.assert_close(value_and_gradient(ours.entropy_from_logits, logits, 3), expected)
    half = logits.bfloat16()
    assert ours.entropy_from_logits(half).dtype == theirs.entropy_from_logits(half).dtype
    assert ours.entropy_from_logits(half, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("requires_grad", [True, False])
def test_log_probs_and_entropy_together_equal_trl(requires_grad):
    logits, index = make((2, 5, 50))
    mask = torch.rand(2, 5) < 0.6

    def stacked(function):
        return lambda x: torch.stack(function(x, index, requires_grad, 0.7, mask))

    torch.testing.assert_close(
        value_and_gradient(stacked(ours.selective_log_softmax_and_entropy), logits),
        value_and_gradient(stacked(theirs.selective_log_softmax_and_entropy), logits),
    )
    leaf = logits.requires_grad_()
    both = ours.selective_log_softmax_and_entropy(leaf, index, requires_grad)
    assert [x.requires_grad for x in both] == [True, requires_grad]


def test_the_patch_reaches_every_module_that_holds_a_function_and_reverts():
    import trl.experimental.cpo.cpo_trainer as cpo
    import trl.kernels
    from trl.kernels import chunked_logprob

    cpu = torch.device("cpu")
    before = (theirs.selective_log_softmax, trl.kernels.ChunkedLogProbFunction)
    with fusedrl.patch_trl() as report:
        assert theirs.selective_log_softmax is ours.selective_log_softmax
        assert cpo.selective_log_softmax is ours.selective_log_softmax
        assert theirs.entropy_from_logits is ours.entropy_from_logits
        assert theirs._ChunkedLogProbFunction is trl.kernels.ChunkedLogProbFunction
        assert trl.kernels.ChunkedLogProbFunction.__module__.startswith("fusedrl.")
        names = {(change.module, change.name) for change in report}
        assert ("trl.experimental.cpo.cpo_trainer", "selective_log_softmax") in names
        assert ("trl.trainer.utils", "_ChunkedLogProbFunction") in names
        # Asked whether to leave out rows, but not what computes them.
        assert theirs._use_triton(cpu) and not chunked_logprob._use_triton(cpu)
    assert (theirs.selective_log_softmax, trl.kernels.ChunkedLogProbFunction) == before
    assert cpo.selective_log_softmax is before[0]
    assert theirs._ChunkedLogProbFunction is before[1] and not theirs._use_triton(cpu)


METHOD = "GRPOTrainer._get_per_token_logps_and_entropies"


def test_names_that_are_not_known_are_refused_before_anything_changes():
    original = theirs.selective_log_softmax
    with pytest.raises(ValueError, match=r"names: expected some of .*, got 'log_softmax'"):
        fusedrl.patch_trl(["selective_log_softmax", "log_softmax"])
    with pytest.raises(TypeError, match=r"pass \['selective_log_softmax'\]"):
        fusedrl.patch_trl("selective_log_softmax")
    with pytest.raises(ValueError, match=f"names: expected no {METHOD} with share_prefixes=False"):
        fusedrl.patch_trl(["selective_log_softmax", METHOD], share_prefixes=False)
    assert theirs.selective_log_softmax is original


@pytest.mark.parametrize("name", ["entropy_from_logits", METHOD])
@pytest.mark.parametrize("missing", [True, False])
def test_what_this_trl_has_not_or_with_other_arguments_is_left_out(
    name, missing, monkeypatch, caplog
):
    from trl.trainer import grpo_trainer

    owner = theirs if name == "entropy_from_logits" else grpo_trainer.GRPOTrainer
    if missing:
        monkeypatch.delattr(owner, name.rpartition(".")[2])
    else:
        monkeypatch.setattr(owner, name.rpartition(".")[2], lambda self, probabilities: None)
    with fusedrl.patch_trl() as report:
        assert name not in {change.name for change in report}
        assert theirs.selective_log_softmax is ours.selective_log_softmax
    assert name in caplog.text
    with pytest.raises(ValueError, match=f"leave {re.escape(name)} out"):
        fusedrl.patch_trl([name])
