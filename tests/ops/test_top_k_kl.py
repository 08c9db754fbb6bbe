"""top_k_kl: against float64, torch in float32, and exact_kl where all classes are known."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse

from fusedrl import exact_kl, top_k_kl
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.top_k_kl.teachers import TAILS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around vector blocks and the chunks that are copied, and vocabularies that are no multiple.
CLASSES = [1, 2, 7, 33, 513, 4095, 4097, 8200, 32000]
INF = float("inf")


def kl(log_p, log_q):
    """Of two rows of log-probs, where a class may have none."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def divergence(student, teacher, direction, beta):
    """As the definitions have it, of log-probs over the same classes."""
    if direction == "reverse":
        return kl(student, teacher)
    if direction == "forward":
        return kl(teacher, student)
    middle = torch.logsumexp(
        torch.stack([student + torch.tensor(1 - beta).log(), teacher + torch.tensor(beta).log()]), 0
    )
    return (1 - beta) * kl(student, middle) + beta * kl(teacher, middle)


def torch_path(logits, ids, teacher, direction="reverse", tail="bucket", beta=0.5, temperature=1.0):
    """What users write: a log_softmax, a gather, and what is left of the probabilities."""
    log_p = torch.log_softmax(logits / temperature, -1)
    student, known = log_p.gather(-1, ids), teacher.to(logits)
    if tail == "renormalize":
        return divergence(student.log_softmax(-1), known.log_softmax(-1), direction, beta)
    if ids.shape[-1] < logits.shape[-1]:
        others = log_p.scatter(-1, ids, -INF).logsumexp(-1, keepdim=True)
        rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=1e-6)
        student, known = torch.cat((student, others), -1), torch.cat((known, rest.log()), -1)
    return divergence(student, known, direction, beta)


def sample(rows, classes, k, dtype=torch.float32, apart=1.0):
    """Logits, and the k likeliest classes of a teacher near them."""
    logits = torch.randn(*rows, classes) * 4
    teacher = (logits + torch.randn(*rows, classes) * apart).double().log_softmax(-1)
    log_probs, ids = teacher.topk(min(k, classes))
    order = torch.randperm(ids.shape[-1])
    return logits.to(dtype), ids[..., order], log_probs[..., order].float()


def gradient(function, logits, upstream):
    leaf = logits.detach().clone().requires_grad_()
    out = function(leaf)
    return torch.autograd.grad(out, leaf, upstream.to(out))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_no_worse_than_torch_in_float32(dtype, classes, direction, tail):
    for k, apart, temperature in ((1, 3.0, 1.0), (20, 1.0, 0.7), (64, 0.05, 25.0)):
        logits, ids, teacher = sample((9,), classes, k, dtype, apart)
        options = {"direction": direction, "tail": tail, "temperature": temperature}
        ours = top_k_kl(logits, ids, teacher, **options)
        assert ours.dtype == torch.float32
        theirs = torch_path(logits.float(), ids, teacher, **options)
        truth = torch_path(logits.double(), ids, teacher, **options)
        no_worse(ours, theirs, truth, 1e-6 + 4e-7 * truth.max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 17, 4100])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_gradients_no_worse_than_torch_in_float32(dtype, classes, direction, tail):
    logits, ids, teacher = sample((6,), classes, 12, dtype, 3.0)
    upstream = torch.randn(6)
    options = {"direction": direction, "tail": tail, "temperature": 0.7}
    mine = gradient(lambda x: top_k_kl(x, ids, teacher, **options), logits, upstream)
    path = [
        gradient(lambda x: torch_path(x, ids, teacher, **options), logits.to(t), upstream)
        for t in (torch.float32, torch.float64)
    ]
    assert mine.dtype == dtype
    no_worse(mine, path[0].to(dtype), path[1], 1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.9, 1e-3])
@pytest.mark.parametrize("tail", TAILS)
def test_the_mixture_of_any_beta(beta, tail):
    logits, ids, teacher = sample((7,), 300, 12, apart=3.0)
    options = {"direction": "jensen_shannon", "tail": tail, "beta": beta}
    upstream = torch.randn(7)

    def ours(x):
        return top_k_kl(x, ids, teacher, **options)

    def path(x):
        return torch_path(x, ids, teacher, **options)

    exact = logits.double()
    torch.testing.assert_close(ours(logits).double(), path(exact), rtol=1e-5, atol=1e-6)
    mine, truth = gradient(ours, logits, upstream), gradient(path, exact, upstream)
    torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("share", [1e-30, 1e-12, 2**-20])
def test_near_its_ends_the_mixture_is_a_share_of_a_kl(tail, impl, share):
    logits, ids, teacher = sample((7,), 300, 12, apart=1.0)
    ends = [("forward", share)] + ([("reverse", 1 - share)] if 1 - share < 1 else [])
    for direction, beta in ends:
        mixed = top_k_kl(
            *(logits, ids, teacher), direction="jensen_shannon", beta=beta, tail=tail, impl=impl
        )
        limit = torch_path(logits.double(), ids, teacher, direction, tail)
        torch.testing.assert_close(mixed.double() / share, limit, rtol=1e-3, atol=1e-6)


def test_the_ends_of_beta_are_the_kls():
    batch = sample((7,), 300, 12)
    for beta, direction in ((0, "forward"), (1, "reverse")):
        mixed = top_k_kl(*batch, direction="jensen_shannon", beta=beta)
        assert torch.equal(mixed, top_k_kl(*batch, direction=direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_reference_passes_gradcheck(direction, tail):
    logits, ids, teacher = sample((5,), 7, 3, torch.float64)
    ids[1, 2] = -1
    mask = torch.tensor([True, False, True, True, True])

    def function(x):
        return top_k_kl(x, ids, teacher, mask, direction=direction, tail=tail, temperature=0.8)

    assert torch.autograd.gradcheck(function, logits.requires_grad_())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_all_classes_known_is_the_exact_kl(direction, tail, impl):
    logits, ids, teacher = sample((5,), 40, 40, apart=2.0)
    ref_logits = torch.zeros(5, 40).scatter(-1, ids, teacher)
    upstream = torch.randn(5)
    options = {"direction": direction, "impl": impl}

    def known(x):
        return top_k_kl(x, ids, teacher, tail=tail, **options)

    def exact(x):
        return exact_kl(x, ref_logits, **options)

    torch.testing.assert_close(known(logits), exact(logits), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient(known, logits, upstream), gradient(exact, logits, upstream), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_equal_distributions_have_no_divergence(direction, impl):
    logits = torch.randn(9, 3000) * 3
    teacher, ids = logits.log_softmax(-1).topk(30)

    def path(x):
        return top_k_kl(x, ids, teacher, direction=direction, impl=impl)

    torch.testing.assert_close(path(logits), torch.zeros(9), rtol=0, atol=1e-6)
    grad = gradient(path, logits, torch.ones(9))
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-6)


@pytest.mark.parametrize("classes", [50, 9000])
def test_the_rest_of_a_sure_student_keeps_its_digits(classes):
    """One less the ids' probabilities is 0 or rounding here."""
    logits = torch.randn(4, classes)
    logits[:, 7] = torch.tensor([20.0, 30.0, 60.0, 85.0])
    ids, teacher = (
        torch.tensor([[3, 7]]).expand(4, 2),
        torch.tensor([[0.1, 0.4]]).log().expand(4, 2),
    )
    upstream = torch.randn(4)

    def ours(x):
        return top_k_kl(x, ids, teacher, direction="forward")

    def path(x):
        return torch_path(x, ids, teacher, direction="forward")

    torch.testing.assert_close(ours(logits).double(), path(logits.double()), rtol=1e-6, atol=0)
    mine, truth = (gradient(f, x, upstream) for f, x in ((ours, logits), (path, logits.double())))
    torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_teachers_that_sum_to_more_than_one_by_rounding(direction, tail, impl):
    logits = torch.randn(3, 30)
    teacher, ids = (torch.randn(3, 30) * 9).log_softmax(-1).topk(25)
    teacher = teacher + torch.tensor([[1e-6], [1e-3], [1e-2]])
    assert (teacher.exp().sum(-1) > 1).all()
    options = {"direction": direction, "tail": tail}

    def path(x):
        return top_k_kl(x, ids, teacher, impl=impl, **options)

    values = path(logits)
    expected = torch_path(logits.double(), ids, teacher, **options)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient(path, logits, torch.ones(3)).isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_an_entry_without_an_id_is_not_read(direction, tail, impl):
    logits, ids, teacher = sample((4,), 60, 5)
    upstream, options = torch.randn(4), {"direction": direction, "tail": tail, "impl": impl}
    gap = torch.full((4, 1), -1), torch.tensor([[float("nan")], [5.0], [-INF], [INF]])
    padded_ids = torch.cat((ids[:, :2], gap[0], ids[:, 2:], gap[0] * 7), -1)
    padded_teacher = torch.cat((teacher[:, :2], gap[1], teacher[:, 2:], gap[1]), -1)

    def path(x, ids, teacher):
        return top_k_kl(x, ids, teacher, **options)

    torch.testing.assert_close(path(logits, padded_ids, padded_teacher), path(logits, ids, teacher))
    torch.testing.assert_close(
        gradient(lambda x: path(x, padded_ids, padded_teacher), logits, upstream),
        gradient(lambda x: path(x, ids, teacher), logits, upstream),
    )
    nothing = torch.full((4, 2), -1), torch.zeros(4, 2)
    rounding = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(path(logits, *nothing), torch.zeros(4), **rounding)
    grad = gradient(lambda x: path(x, *nothing), logits, upstream)
    torch.testing.assert_close(grad, torch.zeros_like(grad), **rounding)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_banned_classes(direction, impl):
    """Where the rest or some of the ids have a logit of -inf, or the teacher has no probability."""
    logits, ids, teacher = sample((5,), 5000, 8)
    ids[:], teacher[:] = torch.arange(8), torch.tensor(0.1).log()
    logits[0, 8:] = -INF  # no rest, where the teacher's is 0.2
    logits[1, 8:] = -INF  # no rest on either side
    teacher[1] = torch.tensor(0.125).log()
    logits[2, :3] = -INF
    logits[3, 100:] = -INF  # whole chunks
    teacher[4, 2] = -INF

    def path(x):
        return top_k_kl(x, ids, teacher, direction=direction, impl=impl)

    log_p = logits.double().log_softmax(-1)
    rest = torch.tensor([0.2, 0.0, 0.2, 0.2, 0.3]).double().log()[:, None]
    truth = divergence(
        torch.cat((log_p[:, :8], log_p[:, 8:].logsumexp(-1, keepdim=True)), -1),
        torch.cat((teacher.double(), rest), -1),
        *(direction, 0.5),
    )
    infinite = {"reverse": [4], "forward": [0, 2], "jensen_shannon": []}[direction]
    assert truth.isinf().nonzero().flatten().tolist() == infinite
    torch.testing.assert_close(path(logits).double(), truth, rtol=1e-5, atol=1e-6)
    finite = truth.isfinite()
    grad = gradient(path, logits, torch.randn(5))
    assert grad[finite].isfinite().all()
    assert (grad[logits == -INF] == 0).all()
    assert grad[finite & (torch.arange(5) != 1)].any(-1).all()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_rows_without_a_softmax_are_nan(impl):
    logits, ids, teacher = sample((6,), 5000, 8)
    logits[0], logits[1, 4000], logits[2, ids[2, 3]] = -INF, float("nan"), float("nan")
    logits[3, ids[3, 0]] = INF
    logits[4], ids[4] = -INF, -1
    for direction in DIRECTIONS:
        nan = top_k_kl(logits, ids, teacher, direction=direction, impl=impl).isnan()
        assert nan.tolist() == [True, True, True, True, True, False]


@pytest.mark.parametrize("offset", [-1e4, 1e4, -3e37, 3e37])
def test_rows_far_from_zero(offset):
    logits, ids, teacher = sample((4,), 6000, 8)
    logits = logits + offset
    truth = torch_path(logits.double(), ids, teacher)
    torch.testing.assert_close(top_k_kl(logits, ids, teacher).double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_contract_is_bitwise(dtype):
    """A row's bits are the same alone, in a batch, shuffled, and on 1 or 2 threads."""
    logits, ids, teacher = sample((40,), 9001, 20, dtype)
    upstream = torch.randn(40)

    def both(rows):
        leaf = logits[rows].requires_grad_()
        out = top_k_kl(leaf, ids[rows], teacher[rows], direction="forward")
        return out.detach(), torch.autograd.grad(out, leaf, upstream[rows])[0]

    whole = both(torch.arange(40))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (torch.randperm(40), torch.tensor([5]), torch.arange(20, 40)):
                for part, all_rows in zip(both(rows), whole, strict=True):
                    assert torch.equal(part, all_rows[rows])
    finally:
        torch.set_num_threads(threads)
