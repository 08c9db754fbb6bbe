"""Sequences that are split over ranks (context parallelism): one wrapper for every op over rows.

With a shift, the last row of a rank predicts the first token of the next one. A row is much larger
than what is known of a token. Hence the token goes to the rank that has its row, the op runs there
without a shift, and the value comes back. Gradients take the same way in reverse.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from fusedrl.compat.torch import in_no_graph_of_its_caller
from fusedrl.ops import _dispatch, _rows

P = ParamSpec("P")
R = TypeVar("R")

TO_NEXT, TO_PREVIOUS = 1, -1


def accepts_parts(
    *columns: str, per_sequence: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let an op over rows take a ``sequence_group``; calls without one go to the op itself.

    As this is what a call of any such op meets first, flags that are no bools are refused here.

    The op gets each column as its rows need it, ``shift=False``, and the offsets of its own part.
    Its answer, or what has one value a token in a named tuple, belongs to the rows that it computed
    and is brought back to their tokens.

    Args:
        columns: arguments with an entry for each token, a number or a row, which a shift moves.
        per_sequence: a column with an entry for each token or, not moved, for each sequence. The op
            gets it as ``[1, N]`` or ``[B, 1]``, as a part may have as many tokens as sequences.
    """

    def wrap(op: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            _dispatch.check_flags(kwargs)
            if kwargs.get("sequence_group") is None:
                return op(*args, **kwargs)
            return on_a_part(*args, **kwargs)

        @in_no_graph_of_its_caller  # no graph holds what ranks tell each other
        def on_a_part(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            name = next(iter(given))
            if given.get("support") is not None:
                raise ValueError(
                    "sequence_group: expected None with support, whose rows a shift does not move "
                    "to other ranks, got a group; leave out one of the two"
                )
            shift = given.get("shift", False)
            rows, offsets = given[name], given.get("offsets")
            _check_rows(name, rows, offsets, shift)
            moving = _columns(given, columns, rows)
            either = _Either(per_sequence or "", given.get(per_sequence or ""))
            part = _part_of(given["sequence_group"], rows, offsets, columns, moving, either)
            given["offsets"] = part.offsets
            if either.value is not None:
                if part.either_is_of_tokens:
                    given[either.name] = either.value.reshape(rows.shape[:-1])
                    moving[either.name] = given[either.name]
                else:
                    given[either.name] = either.value.reshape(-1, 1)
            if shift:
                given |= part.of_rows(moving) | {"shift": False}
            if part.either_is_of_tokens and rows.dim() == 2:
                given[either.name] = given[either.name][None]
            result: Any = op(**given)  # pyright: ignore[reportCallIssue]
            if not shift:
                return result
            if isinstance(result, Tensor):
                return part.of_tokens(result)  # pyright: ignore[reportReturnType]
            of_rows = {
                field: value
                for field, value in result._asdict().items()
                if isinstance(value, Tensor) and value.shape == part.goes_on.shape
            }
            return result._replace(**{field: part.of_tokens(x) for field, x in of_rows.items()})

        return wrapped

    return wrap


class Part(NamedTuple):
    """What a rank has of the sequences.

    Args:
        group: the ranks.
        offsets: of this part alone, with an entry for each sequence of all ranks.
        goes_on: whether the token behind each row is one of the row's sequence, shaped like the
            tokens; the rank does not know of the last one whether it exists.
        either_is_of_tokens: whether the column of tokens or sequences is of tokens, on all ranks.
    """

    group: dist.ProcessGroup
    offsets: Tensor | None
    goes_on: Tensor
    either_is_of_tokens: bool

    def of_rows(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each column as rows need it: at a row, the entry of the token that it predicts."""
        place = self.goes_on.dim() - 1  # of tokens among the dimensions
        firsts = [_carried(column.narrow(place, 0, 1)) for column in columns.values()]
        count = self.goes_on.shape[-1]
        # Zeros for the last rank: none of its sequences goes on.
        behind = _sent(firsts, self.group, TO_PREVIOUS)
        moved = {
            name: torch.cat((column.narrow(place, 1, count - 1), last.to(column.dtype)), place)
            for (name, column), last in zip(columns.items(), behind, strict=True)
        }
        moved["mask"] = moved["mask"] & self.goes_on
        return moved

    def of_tokens(self, values: Tensor) -> Tensor:
        """What the rows computed, brought to the tokens that they predict."""
        first = _Moved.apply(values[..., -1:], self.group, TO_NEXT)
        return torch.cat((first, values[..., :-1]), -1)


def summed(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the ranks; its gradient is summed over what all ranks computed from it."""
    return values if group is None else _Summed.apply(values, group)


def check_group(name: str, group: Any) -> None:
    """Refuse what is no process group."""
    if not isinstance(group, dist.ProcessGroup):
        kind = repr(group) if isinstance(group, str) else type(group).__name__
        raise TypeError(
            f"{name}: expected a torch.distributed.ProcessGroup, got {kind}; pass "
            "torch.distributed.group.WORLD, or what torch.distributed.new_group returns"
        )


def _check_rows(name: str, rows: Any, offsets: Tensor | None, shift: bool) -> None:
    _dispatch.check_tensor(name, rows, _dispatch.DENSE, _dispatch.NESTED)
    if rows.is_nested:
        raise ValueError(
            f"sequence_group: expected None with nested {name}, whose offsets are of one rank "
            "alone, got a group; pass packed values, with the offsets of all ranks' tokens"
        )
    _rows.check_rows(name, rows, offsets if rows.dim() == 3 else None, False)
    if offsets is not None:
        _dispatch.check_offsets_kind(offsets, rows.device)
    elif rows.dim() == 2 and shift:
        raise ValueError(
            f"offsets: expected the sequence boundaries of all ranks' packed {name} with "
            "shift=True, got None; pass offsets=torch.tensor([0, N]), N their number on all "
            "ranks, if all are one sequence"
        )


def _columns(given: dict[str, Any], columns: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
    """The columns that were given, and a mask; one without an entry for each token is refused."""
    shape, device = rows.shape[:-1], rows.device
    mask, like = given.get("mask"), f" for {next(iter(given))}"
    _dispatch.check_mask(mask, shape, device, like, rows)
    moving = {"mask": torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask}
    for name in columns:
        value = given.get(name)
        if value is None or name == "mask":
            continue
        _dispatch.check_tensor(name, value)
        start = torch.Size(value.shape[: len(shape)])
        if start != shape:
            _dispatch.check_same(name, value, shape, device, like, rows)
        _dispatch.check_device(name, value, device)
        moving[name] = value
    return moving


class _Either(NamedTuple):
    """A column with an entry for each token, or for each sequence; no value where none is given."""

    name: str
    value: Tensor | None

    def meanings(self, rows: Tensor, sequences: int) -> int:
        """What it may be of on this rank, a bit each: tokens, sequences."""
        if not isinstance(self.value, Tensor):
            return 0
        of_tokens, of_sequences = _rows.fits(self.value.shape, rows.shape[:-1], sequences)
        return of_tokens * _OF_TOKENS + of_sequences * _OF_SEQUENCES


_OF_TOKENS, _OF_SEQUENCES = 1, 2
_MEANINGS = ("of neither tokens nor sequences", "of tokens", "of sequences", "of either")


def _numbers_a_token(columns: dict[str, Tensor], rows: Tensor) -> int:
    """How many numbers a token has in the columns of rows; refuses rows of unequal shapes."""
    shape = rows.shape[:-1]
    of_rows = {name: x for name, x in columns.items() if x.dim() > len(shape)}
    if not of_rows:
        return 1
    row = next(iter(of_rows.values())).shape[len(shape) :]
    for name, value in of_rows.items():
        _dispatch.check_same(name, value, torch.Size((*shape, *row)), rows.device)
    return row.numel()


class _Layout(NamedTuple):
    """What ranks tell each other of their parts before they exchange anything."""

    dimensions: int
    sequences: int  # of a padded batch; of offsets, one more
    offsets_end: int  # -1 without offsets
    offsets_sum: int  # of each times its number, which tells those of ranks apart
    columns: int  # a bit each
    meanings: int  # what the column of tokens or sequences may be of, a bit each
    numbers: int  # a token, in the columns that have a row of them
    tokens: int  # in this part of each sequence, or of all packed ones

    @property
    def form(self) -> str:
        """Which sequences a rank has a part of, for an error that compares ranks."""
        if self.dimensions == 3:
            return f"{self.sequences} padded sequences"
        if self.sequences == 0:
            return "packed rows without offsets"
        return f"packed rows with {self.sequences} offsets up to {self.offsets_end}"

    def of_tokens(self, columns: Sequence[str]) -> str:
        """Which of the columns have an entry for each token."""
        return ", ".join(name for i, name in enumerate(columns) if self.columns >> i & 1)


def _part_of(
    group: Any,
    rows: Tensor,
    offsets: Tensor | None,
    columns: Sequence[str],
    moving: dict[str, Tensor],
    either: _Either,
) -> Part:
    present = sum(1 << i for i, column in enumerate(columns) if column in moving)
    numbers = _numbers_a_token(moving, rows)
    sequences = len(rows) if rows.dim() == 3 else 0 if offsets is None else len(offsets)
    end, of_offsets = (-1, 0) if offsets is None else _end_and_sum(offsets)
    meanings = either.meanings(rows, _rows.count_sequences(rows[..., 0], offsets))
    mine = _Layout(
        rows.dim(), sequences, end, of_offsets, present, meanings, numbers, rows.shape[-2]
    )
    layouts = _layouts(group, mine, rows.device)
    rank = dist.get_rank(group)
    _check_layouts(layouts, rank, columns)
    is_of_tokens = either.value is not None and _is_of_tokens(either, layouts, rank)
    start = sum(layout.tokens for layout in layouts[:rank])
    total = sum(layout.tokens for layout in layouts)
    goes_on = torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
    if offsets is None:
        return Part(group, None, goes_on, is_of_tokens)
    if end != total:
        raise ValueError(
            f"offsets: expected those of the {total} tokens of all ranks, the same on each, got "
            f"{end} as the last; pass the boundaries of the whole batch, not "
            "those of this rank's part"
        )
    _dispatch.check_offsets(offsets, total, rows.device)
    offsets = offsets.to(torch.int64)
    behind = torch.arange(start + 1, start + 1 + len(rows), device=rows.device)
    goes_on = torch.isin(behind, offsets, invert=True)
    return Part(group, (offsets - start).clamp(0, len(rows)), goes_on, is_of_tokens)


def _end_and_sum(offsets: Tensor) -> list[int]:
    numbers = torch.arange(len(offsets), device=offsets.device)
    return torch.stack((offsets[-1].long(), (numbers * offsets).sum())).tolist()


def _layouts(group: Any, mine: _Layout, device: torch.device) -> list[_Layout]:
    check_group("sequence_group", group)
    if dist.get_rank(group) < 0:
        raise ValueError(
            "sequence_group: expected a group that this rank is in, got another; call on the ranks "
            "of the group alone"
        )
    own = torch.tensor(mine, device=device)
    every = own.new_empty((dist.get_world_size(group), len(own)))
    dist.all_gather(list(every.unbind()), own, group=group)
    return [_Layout(*numbers) for numbers in every.tolist()]


def _check_layouts(layouts: list[_Layout], rank: int, columns: Sequence[str]) -> None:
    """Refuse parts that do not fit together. Every rank raises, as each knows all layouts."""
    mine = layouts[rank]
    for other, layout in enumerate(layouts):
        if layout.form != mine.form:
            raise ValueError(
                f"sequence_group: expected parts of the same sequences on all its ranks, got "
                f"{mine.form} on rank {rank} and {layout.form} on rank {other}; "
                "pass the whole batch's offsets, or as many padded sequences, on each"
            )
        if layout.offsets_sum != mine.offsets_sum:
            raise ValueError(
                f"offsets: expected the same on all ranks of sequence_group, got others on rank "
                f"{other} than on rank {rank}; pass the whole batch's on each"
            )
        if layout.columns != mine.columns:
            raise ValueError(
                "sequence_group: expected a value a token for the same arguments on all its ranks, "
                f"got it for {mine.of_tokens(columns)} on rank {rank} and "
                f"{layout.of_tokens(columns)} on rank {other}; pass them alike on each"
            )
        if layout.numbers != mine.numbers:
            raise ValueError(
                "sequence_group: expected as many numbers a token on all its ranks, got "
                f"{mine.numbers} on rank {rank} and {layout.numbers} on rank {other}; pass as many "
                "known classes on each"
            )
        if layout.tokens == 0:
            raise ValueError(
                "sequence_group: expected at least one token on each rank, got none on rank "
                f"{other}; split the sequences so that every rank has some, or use fewer ranks"
            )


def _is_of_tokens(either: _Either, layouts: list[_Layout], rank: int) -> bool:
    """Whether the column is of tokens on all ranks, rather than of sequences on all.

    Every rank raises where neither fits all ranks, or where both do and differ.
    """
    name = either.name
    _dispatch.check_tensor(name, either.value)
    common = functools.reduce(operator.and_, (layout.meanings for layout in layouts))
    if common == 0:
        each = ", ".join(f"{_MEANINGS[x.meanings]} on rank {i}" for i, x in enumerate(layouts))
        raise ValueError(
            f"{name}: expected a shape of tokens or one of sequences on all ranks of "
            f"sequence_group, got one {each}; pass them alike on each"
        )
    # One token of each sequence on a rank is that sequence's there, in whichever way it is meant.
    mine = layouts[rank]
    if common == _OF_TOKENS | _OF_SEQUENCES and mine.dimensions == 2 and mine.sequences > 2:
        raise ValueError(
            f"{name}: expected [B, 1] or [1, N] where every rank of sequence_group has as many "
            f"packed tokens as there are sequences, got {mine.sequences - 1} in one dimension; "
            "reshape them with .view(-1, 1) if they are of sequences, or with .view(1, -1) if of "
            "tokens"
        )
    return bool(common & _OF_TOKENS)


def _carried(column: Tensor) -> Tensor:
    """The column in a dtype that holds all values exactly: dtypes may differ between ranks."""
    return column.to(torch.float64 if column.is_floating_point() else torch.int64)


def _sent(tensors: Sequence[Tensor], group: dist.ProcessGroup, step: int) -> list[Tensor]:
    """Send tensors to the rank ``step`` further on, and return what the rank ``step`` before sent.

    A rank that has none before it gets zeros.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
    transfers = []
    for leaving, space in zip(tensors, arriving, strict=True):
        for peer, call, tensor in (
            (rank + step, dist.isend, leaving.contiguous()),
            (rank - step, dist.irecv, space),
        ):
            if 0 <= peer < ranks and tensor.numel():
                transfers.append(dist.P2POp(call, tensor, group=group, group_peer=peer))
    if transfers:
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
    return arriving


class _Moved(torch.autograd.Function):
    """A value from a neighbouring rank, to which its gradient is sent back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, step: int) -> Tensor:
        ctx.group, ctx.step = group, step
        return _sent([values], group, step)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Moved.apply(grads[0], ctx.group, -ctx.step), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(grads[0], ctx.group), None
