"""Sequences that are split over ranks: together they compute what one rank does."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from prepared import processes
from sequence_ranks import (
    CASES,
    GRID,
    GRID_CASES,
    LAYOUTS,
    SHARDS,
    on_a_grid,
    on_a_rank,
    on_a_rank_of_splits,
    problem,
    run,
    second_derivative,
    split_of,
)

from fusedrl import (
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_log_probs,
    top_k_kl,
)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)

PLACES = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def found_by(target, ranks, folder, *arguments):
    """What each of the ranks has saved."""
    started = [
        processes.Process(target=target, args=(rank, *arguments, str(folder)))
        for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        assert [process.exitcode for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def ranks_found(tmp_path_factory):
    """What each of two and of three ranks has computed of its part."""
    return {
        ranks: found_by(on_a_rank, ranks, tmp_path_factory.mktemp(f"ranks-{ranks}"), ranks)
        for ranks in LAYOUTS
    }


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def alone(layout, shift=True, dtype=torch.float64):
    """The inputs and options of one rank that has all of it."""
    inputs = problem(layout)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
    offsets = None if layout.offsets is None else torch.tensor(layout.offsets)
    return inputs, {"shift": shift, "offsets": offsets}


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("ranks", "name"), PLACES)
def test_ranks_equal_one(ranks_found, ranks, name, case, shift):
    layout = LAYOUTS[ranks][name]
    inputs, options = alone(layout, shift)
    whole = run(CASES[case], inputs, **options)
    parts = [found[name, case, shift] for found in ranks_found[ranks]]
    for i, truth in enumerate(whole.of_tokens):
        together = torch.cat([part.of_tokens[i] for part in parts], -1)
        torch.testing.assert_close(together.double(), truth, **CLOSE)
        assert torch.equal(together == 0, truth == 0)  # of dropped and of first tokens
    for i, truth in enumerate(whole.of_batch):
        total = torch.stack([part.of_batch[i] for part in parts]).sum()
        torch.testing.assert_close(total.double(), truth, **CLOSE)
    for leaf, truth in whole.gradients.items():
        for rank, part in enumerate(parts):
            if truth.shape[:-1] == inputs["tokens"].shape:
                mine = truth[(*layout.part(rank), slice(None))]
                torch.testing.assert_close(part.gradients[leaf].double(), mine, **CLOSE)
        if truth.shape[:-1] != inputs["tokens"].shape:
            total = torch.stack([part.gradients[leaf] for part in parts]).sum(0)
            torch.testing.assert_close(total.double(), truth, **CLOSE)


def test_parts_of_sequences_and_shards_of_the_vocabulary(tmp_path):
    ranks = found_by(on_a_grid, 4, tmp_path)
    inputs, options = alone(GRID)
    for case in GRID_CASES:
        whole = run(CASES[case], inputs, **options)
        for shard in (0, 1):
            parts = [ranks[2 * place + shard][case] for place in (0, 1)]
            for i, truth in enumerate(whole.of_tokens):
                together = torch.cat([part.of_tokens[i] for part in parts], -1)
                torch.testing.assert_close(together.double(), truth, **CLOSE)
            for i, truth in enumerate(whole.of_batch):
                total = sum(part.of_batch[i] for part in parts)
                torch.testing.assert_close(total.double(), truth, **CLOSE)
            hidden = torch.cat([part.gradients["hidden"] for part in parts])
            torch.testing.assert_close(hidden.double(), whole.gradients["hidden"], **CLOSE)
            for name in ("weight", "bias"):
                total = sum(part.gradients[name] for part in parts)
                mine = whole.gradients[name][slice(*SHARDS[shard : shard + 2])]
                torch.testing.assert_close(total.double(), mine, **CLOSE)


@pytest.mark.parametrize(
    "case", ["token_log_probs", "token_log_probs, mask and entropy", "exact_kl", "top_k_kl"]
)
@pytest.mark.parametrize(("ranks", "name"), PLACES)
def test_rows_have_the_bits_of_one_rank(ranks_found, ranks, name, case):
    layout = LAYOUTS[ranks][name]
    inputs, options = alone(layout, dtype=torch.float32)
    whole = run(CASES[case], inputs, **options)
    for rank, found in enumerate(ranks_found[ranks]):
        part = found[name, case, True]
        for got, value in zip(part.of_tokens, whole.of_tokens, strict=True):
            assert torch.equal(got, value[layout.part(rank)])
        for leaf, gradient in part.gradients.items():
            assert torch.equal(gradient, whole.gradients[leaf][(*layout.part(rank), slice(None))])


@pytest.mark.parametrize(("ranks", "name"), PLACES)
def test_second_derivatives_of_the_reference(ranks_found, ranks, name):
    layout = LAYOUTS[ranks][name]
    inputs, options = alone(layout, dtype=torch.float32)
    truth = second_derivative(inputs, **options)
    for rank, found in enumerate(ranks_found[ranks]):
        mine = truth[(*layout.part(rank), slice(None))]
        torch.testing.assert_close(found[name, "second derivative"], mine)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_function_may_call_one(one_rank):
    inputs, options = alone(LAYOUTS[2]["goes on"], dtype=torch.float32)

    def loss(logits):
        values = token_log_probs(2 * logits, inputs["tokens"], **options, sequence_group=one_rank)
        return (3 * values).sum()

    torch._dynamo.reset()
    logits = inputs["logits"].requires_grad_()
    (found,) = torch.autograd.grad(torch.compile(loss, backend="eager")(logits), logits)
    (expected,) = torch.autograd.grad(loss(logits), logits)
    assert torch.equal(found, expected)


def test_layouts_have_every_kind_of_boundary():
    """A part's first token starts a sequence or not, and is kept or dropped."""
    kinds = set()
    for ranks, name in PLACES:
        layout = LAYOUTS[ranks][name]
        mask = problem(layout)["mask"]
        for bound in layout.bounds[1:-1]:
            starts = bound in (layout.offsets or ())
            kinds |= {(starts, kept) for kept in mask[..., bound].flatten().tolist()}
    assert kinds == set(itertools.product((True, False), repeat=2))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 600), marks=pytest.mark.slow)], ids=str
)
def test_whose_advantages_these_are_depends_on_no_size(ranks, seeds, tmp_path):
    found = found_by(on_a_rank_of_splits, ranks, tmp_path, ranks, seeds)
    refused = 0
    for seed, form in found[0]:
        split, parts = split_of(seed, ranks), [x[seed, form] for x in found]
        count = len(split.offsets) - 1
        ambiguous = "1" not in form and set(split.lengths) == {count} and count > 1
        refused += ambiguous
        if ambiguous:
            assert all(part.startswith("advantages: expected [B, 1] or [1, N]") for part in parts)
        else:
            whole = split.loss(None, {"[B]": "[B, 1]", "[N]": "[1, N]"}.get(form, form))
            torch.testing.assert_close(torch.stack(parts).sum(), whole)
    assert 0 < refused < len(found[0]) / 2


def said_on(rank):
    """What a rank says where its part does not fit that of the other one."""
    other = 1 - rank
    ends, forms = (3, 6), ("packed rows with 2 offsets up to 6", "2 padded sequences")
    parts = "sequence_group: expected parts of the same sequences on all its ranks, got "
    return [
        "offsets: expected those of the 6 tokens of all ranks, the same on each, got 3 as the last",
        f"{parts}packed rows with 2 offsets up to {ends[rank]} on rank {rank} and packed rows with "
        f"2 offsets up to {ends[other]} on rank {other}; pass the whole batch's offsets",
        f"offsets: expected the same on all ranks of sequence_group, got others on rank {other}",
        "sequence_group: expected at least one token on each rank, got none on rank 0; split",
        f"{parts}{rank + 1} padded sequences on rank {rank} and {other + 1} padded",
        f"{parts}{forms[rank]} on rank {rank} and {forms[other]} on rank {other}; pass the whole",
        "advantages: expected a shape of tokens or one of sequences on all ranks of "
        "sequence_group, got one of sequences on rank 0, of tokens on rank 1; pass them alike",
        f"sequence_group: expected as many numbers a token on all its ranks, got {2 + rank} on "
        f"rank {rank} and {2 + other} on rank {other}; pass as many known classes on each",
    ]


def test_every_rank_refuses_parts_that_do_not_fit(ranks_found):
    for rank, found in enumerate(ranks_found[2]):
        for said, start in zip(found["refusals"], said_on(rank), strict=True):
            assert said.startswith(start)


def test_a_group_of_one_rank_is_as_none(one_rank):
    layout = LAYOUTS[2]["goes on"]
    inputs, options = alone(layout)
    for case in CASES.values():
        expected = run(case, inputs, **options)
        found = run(case, inputs, sequence_group=one_rank, **options)
        for ours, theirs in zip(
            found.of_tokens + found.of_batch, expected.of_tokens + expected.of_batch, strict=True
        ):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(found.gradients, expected.gradients)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sequence_group": "all"}, TypeError, "sequence_group: expected a torch.distributed.Pro"),
        ({"offsets": None}, ValueError, "offsets: expected the sequence boundaries of all ranks'"),
        ({"offsets": torch.tensor([0.0, 3.0])}, ValueError, "offsets: expected a 1-D int64 tensor"),
        ({"offsets": torch.tensor([0, 4])}, ValueError, "offsets: expected those of the 3 tokens"),
        ({"offsets": torch.tensor([1, 3])}, ValueError, "offsets: expected non-decreasing values"),
        ({"mask": torch.ones(3)}, TypeError, "mask: expected torch.bool"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, ValueError, r"mask: expected shape \(3,\)"),
        ({"tokens": torch.zeros(2, dtype=torch.int64)}, ValueError, r"tokens: expected shape"),
        ({"logits": torch.zeros(2, 3, 5)}, ValueError, "offsets: expected None with padded"),
        (
            {"logits": torch.nested.nested_tensor([torch.zeros(3, 5)], layout=torch.jagged)},
            ValueError,
            "sequence_group: expected None with nested logits",
        ),
    ],
)
def test_bad_input_is_refused(one_rank, change, error, message):
    given = {
        "logits": torch.zeros(3, 5),
        "tokens": torch.zeros(3, dtype=torch.int64),
        "mask": None,
        "offsets": torch.tensor([0, 3]),
        "sequence_group": one_rank,
    }
    with pytest.raises(error, match=message):
        token_log_probs(**given | change, shift=True)


def test_columns_of_unequal_rows_are_refused(one_rank):
    ids, teacher = torch.arange(3).expand(4, 3), torch.full((4, 2), -2.0)
    options = {"offsets": torch.tensor([0, 4]), "shift": True, "sequence_group": one_rank}
    expected = r"^teacher_log_probs: expected shape \(4, 3\), got \(4, 2\)"
    with pytest.raises(ValueError, match=expected):
        top_k_kl(torch.zeros(4, 5), ids, teacher, **options)
    with pytest.raises(ValueError, match=expected):
        linear_top_k_kl(torch.zeros(4, 2), torch.zeros(5, 2), ids, teacher, **options)


def test_what_needs_other_ranks_rows_is_refused(one_rank):
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="group: expected the process group of the shards"):
        linear_token_log_probs(hidden, weight, tokens, vocab_offset=0, sequence_group=one_rank)
    with pytest.raises(ValueError, match="importance: expected level='token' with sequence_group"):
        linear_policy_loss(
            *(hidden, weight, tokens, torch.zeros(2), None), sequence_group=one_rank,
            rollout_log_probs=torch.zeros(2, 3), importance={"level": "sequence"},
        )  # fmt: skip
