"""What holds of every op: forms of a batch, dropped tokens, views, frozen inputs, empty batches."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from fusedrl.ops.cases import OPS, cases_of

from .every_case import FEW, LENGTH, SEQUENCES, gradients, is_of_tokens, leaves_of, padded_cases

LENGTHS = [2, 4]
INSIDE = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
OFFSETS = torch.tensor([0, 2, 6])
FORMS = {
    "packed": lambda x: x,
    "jagged": lambda x: torch.nested.nested_tensor_from_jagged(x, OFFSETS),
    "strided": lambda x: torch.nested.as_nested_tensor(list(x.split(LENGTHS))),
}
LINEAR = [op for op in OPS if op.startswith("linear")]


def with_mask(case, mask):
    """A case whose mask drops what this one drops, too."""
    both = case.others.get("mask", mask) & mask
    return case._replace(others=case.others | {"mask": both})


def close(found, expected, case, rtol=1e-5):
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            mine, other, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m: f"{case.name}: {m}"
        )


def same(found, expected, case):
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other), case.name


@pytest.mark.parametrize("op", OPS)
def test_packed_and_nested_batches_are_padded_ones_without_padding(op):
    for case in padded_cases(op):
        padded = with_mask(case, INSIDE)
        leaves = leaves_of(padded)
        results = padded.call(leaves)
        grads = gradients([x[INSIDE] if x.dim() else x for x in results], leaves)
        grads = [x[INSIDE] if is_of_tokens(x) else x for x in grads]
        for form, make in FORMS.items():

            def change(x, make=make):
                return make(x[INSIDE]) if is_of_tokens(x) else x

            others = {name: change(value) for name, value in padded.others.items()}
            flat = {
                name: (x[INSIDE] if is_of_tokens(x) else x).detach().requires_grad_()
                for name, x in padded.inputs.items()
            }
            inputs = {
                name: make(x) if is_of_tokens(padded.inputs[name]) else x
                for name, x in flat.items()
            }
            # With offsets a reward is one a sequence.
            options = {"offsets": OFFSETS} if form == "packed" and "reward" not in inputs else {}
            out = case._replace(others=others).call(inputs, **options)
            layouts = {"packed": torch.strided, "jagged": torch.jagged, "strided": torch.strided}
            assert all(x.layout == layouts[form] for x in out if x.dim())
            assert all(x.is_nested == (form != "packed") for x in out if x.dim())
            out = [torch.cat(list(x.unbind())) if x.is_nested else x for x in out]
            close(out, [x[INSIDE] if x.dim() else x for x in results], case)
            close(gradients(out, flat), grads, case)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_a_dropped_token_holds_reaches_neither_result_nor_gradient(op, poison):
    for case in padded_cases(op):
        if "mask" not in case.others:
            continue
        kept = case.others["mask"].clone()
        if case.others.get("shift"):
            kept[:, 0] = False
        read = kept.roll(-1, 1) if case.others.get("shift") else kept
        assert 0 < kept.sum() < kept.numel()

        def spoil(name, x, kept=kept, read=read):
            if not is_of_tokens(x) or name in ("mask", "reward"):  # a reward is kept
                return x
            if name == "tokens":
                return x.masked_fill(~kept, -100)
            return (
                torch.where(read[..., None], x, poison)
                if x.dim() == 3
                else (torch.where(kept, x, poison))
            )

        found = []
        for dirty in (False, True):
            inputs, others = (
                {name: spoil(name, x) if dirty else x for name, x in given.items()}
                for given in (case.inputs, case.others)
            )
            each = case._replace(inputs=inputs, others=others)
            leaves = leaves_of(each)
            results = each.call(leaves)
            upstream = [torch.linspace(1, 2, x.numel()).view_as(x) for x in results]
            if dirty and "reward" not in inputs:
                upstream = [torch.where(kept, up, poison) if up.dim() else up for up in upstream]
            grads = torch.autograd.grad(results, list(leaves.values()), upstream)
            found.append((results, grads))
        for clean, dirty in zip(*found, strict=True):
            same(dirty, clean, case)
        results, grads = found[1]
        for x in results[: 1 if "reward" in case.inputs else None]:
            assert x.dim() == 0 or not x[~kept].any()
        for grad in grads:
            if is_of_tokens(grad) and grad.dim() == 3:
                assert not grad[~read].any() and grad[read].any(-1).all()


VIEWS = {
    "gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "misaligned": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_give_what_copies_give(op, dtype):
    size = {"classes": 1030, "sequences": 3, "length": 5, "width": 21}
    for case in cases_of(op, **size):
        leaves = leaves_of(case, dtype)
        results = case.call(leaves)
        expected = [*results, *gradients(results, leaves)]
        for view in VIEWS.values():
            given = {name: view(x) for name, x in leaves.items()}
            results = case.mapped(lambda x, view=view: view(x) if x.dim() else x).call(given)
            found = [*results, *gradients(results, leaves)]
            close(found, expected, case, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("op", OPS)
def test_one_row_for_all_tokens(op):
    """As a view whose strides are 0."""
    for case in padded_cases(op):
        wide = {name: x[:1, :1].expand_as(x) for name, x in case.inputs.items() if x.dim() == 3}
        found, expected = (
            case.call(case.inputs | rows)
            for rows in (wide, {name: x.contiguous() for name, x in wide.items()})
        )
        close(found, expected, case)


@pytest.mark.parametrize("op", ["token_log_probs", "exact_kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_a_row_are_its_own(op, dtype):
    """Alone and in a batch, on one thread and on two."""
    threads = torch.get_num_threads()
    for case in cases_of(op, classes=9001, sequences=40, length=1):
        if "offsets" in case.others:
            continue
        plain = {"mask": None, "shift": False}
        inputs = {name: x.detach() for name, x in leaves_of(case, dtype).items()}
        whole = case.call(inputs, **plain)
        for row in range(40):
            one = case.mapped(lambda x, row=row: x[row : row + 1] if x.dim() else x)
            alone = {name: x[row : row + 1] for name, x in inputs.items()}
            same(one.call(alone, **plain), [x[row : row + 1] for x in whole], case)
        try:
            for number in (1, 2):
                torch.set_num_threads(number)
                same(case.call(inputs, **plain), whole, case)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("op", OPS)
def test_only_what_requires_a_gradient_gets_one(op):
    """And its bits are those that it has beside the others'."""
    for case in padded_cases(op):
        leaves = leaves_of(case)
        everything = dict(zip(leaves, gradients(case.call(leaves), leaves), strict=True))
        for name in leaves:
            some = {other: x.detach().requires_grad_(other == name) for other, x in leaves.items()}
            results = [x for x in case.call(some) if x.requires_grad]
            upstream = [torch.linspace(1, 2, x.numel()).view_as(x) for x in results]
            torch.autograd.backward(results, upstream)
            assert [other for other, x in some.items() if x.grad is not None] == [name]
            assert torch.equal(some[name].grad, everything[name]), f"{case.name}: {name}"


NOTHING = {
    "no sequences": lambda x: x[:0],
    "no tokens": lambda x: x[:, :0],
    "nothing kept": lambda x: torch.zeros_like(x) if x.dtype == torch.bool else x,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_nothing_to_do(op, impl):
    for case in padded_cases(op):
        for title, less in NOTHING.items():
            if title == "nothing kept" and ("mask" not in case.others or "reward" in case.inputs):
                continue
            empty = case.mapped(lambda x, less=less: less(x) if is_of_tokens(x) else x)
            leaves = leaves_of(empty)
            results = empty.call(leaves, impl=impl)
            shape = less(torch.zeros(SEQUENCES, LENGTH)).shape
            for x in results:
                assert torch.equal(x, torch.zeros(shape if x.dim() else ())), case.name
            for grad, leaf in zip(gradients(results, leaves), leaves.values(), strict=True):
                assert torch.equal(grad, torch.zeros_like(leaf)), case.name


@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_autocast_takes_the_heads_in_its_dtype(op, impl):
    for case in padded_cases(op):
        leaves, halves = leaves_of(case), leaves_of(case, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            results = case.call(leaves, impl=impl)
        expected = case.call(halves, impl=impl)
        same(results, expected, case)
        grads = gradients(results, leaves)
        assert all(grad.dtype == torch.float32 for grad in grads)
        close(grads, [x.float() for x in gradients(expected, halves)], case)


def test_int32_tokens_and_offsets():
    case = FEW["token_log_probs, V=5 packed mask shift entropy"]
    narrow = {name: case.others[name].int() for name in ("tokens", "offsets")}
    same(case.call(case.inputs, **narrow), case.call(case.inputs), case)


@pytest.mark.parametrize("name", FEW)
def test_a_forward_mode_tangent_is_refused(name):
    case = FEW[name]
    plain = case.call(case.inputs)
    for argument in case.inputs:
        with forward_ad.dual_level():
            same(case.call(case.inputs), plain, case)
            dual = forward_ad.make_dual(
                case.inputs[argument], torch.ones_like(case.inputs[argument])
            )
            for context in (torch.enable_grad(), torch.no_grad()):
                with (
                    context,
                    pytest.raises(NotImplementedError, match=f"^{argument}: .* impl='reference'"),
                ):
                    case.call(case.inputs | {argument: dual})
