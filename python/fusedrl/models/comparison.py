"""One comparison of the way to compute a model's log-probs with the model's own logits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from fusedrl.channel.forking import renew_in_children
from fusedrl.channel.tensors import is_dtensor
from fusedrl.compat.transformers import attention_of
from fusedrl.models.forwards import SHARING
from fusedrl.models.prefix_tree import laid_out, row_of
from fusedrl.models.split import Parts, autocast_as, autocast_of, uncompiled
from fusedrl.models.tree_mask import mask_of
from fusedrl.ops._head import scaled_and_capped

LENGTH, COMMON = 8, 5  # tokens of each of the two sequences, and of their common beginning
FAR = 1 << 20  # a position beyond those that rotary embeddings are made for
PEAK = 128.0  # the logits of an amplified run: a cap that does not bend those bends none


class Way(IntEnum):
    """How log-probs are computed. Ranks that differ take the slowest way, which comes last."""

    PACKED = 0  # from the hidden states of sequences that share a row
    PADDED = 1  # from the model's own logits, of padded batches
    ALONE = 2  # from the model's own logits, of one sequence at a time


class Verdict(NamedTuple):
    """The fastest way that agrees with the model's own logits.

    Args:
        way: that way, or the fastest one that this comparison leaves open.
        why: what a slower way is taken for.
        autocast: the dtype of autocast in the model's forward, whoever enters it.
        shares: whether sequences stay apart in one row that has their common beginning once.
        ahead: whether logits depend on later tokens.
        telling: whether logits could be compared: they were not only zeros or infinities.
    """

    way: Way
    why: str = ""
    autocast: torch.dtype | None = None
    shares: bool = False
    ahead: bool = False
    telling: bool = True


def compare_parts(parts: Parts, below: int | None, first: int = 0) -> Verdict:
    """Compare sequences that share a row of the decoder with the model's logits of each alone.

    Args:
        parts: decoder and head.
        below: the length from which on the model says that its calls depend on their length.
        first: the first token id.
    """
    device = parts.embeddings.device
    rows = _rows(min(parts.classes, len(parts.embeddings)), first)
    marked = torch.linspace(-1, 1, LENGTH + 1, device=device)
    model = parts.base.forward if parts.shared else uncompiled(parts.model)
    found = []

    def compare() -> tuple[Tensor, ...]:
        found.append(_compare_parts(model, parts, rows, below))
        return (marked,)

    with _undisturbed(device):
        (left,) = parts.within(compare, rows[0][None].to(device))
    if not torch.equal(left, marked):
        return Verdict(Way.PADDED, "what is around it changes what its forward returns")
    return found[0]


def _compare_parts(
    model: Callable[..., Any], parts: Parts, rows: list[Tensor], below: int | None
) -> Verdict:
    device = parts.embeddings.device
    # One is amplified, because a cap changes nothing near 0.
    runs = [_AtHead.run(model, parts, row, peak) for row, peak in zip(rows, (0, PEAK), strict=True)]
    autocasts = {dtype for run in runs for dtype in run.autocasts} or {autocast_of(device)}
    if len(autocasts) > 1:
        return Verdict(Way.PADDED, "its head is under another autocast than its embeddings")
    not_its_head = Verdict(Way.PADDED, "its logits are not those of its head")
    if any(len(run.entered) != 1 for run in runs):
        return not_its_head
    (autocast,) = autocasts
    with autocast_as(device, autocast):
        product = runs[0].dtype  # in which the head multiplies
        product = product if autocast is None or product == torch.float64 else autocast
        layers = _narrowest(parts.base, product)
        alone = [_logits(parts, run.entered[0]) for run in runs]
        if not all(0 < _peak(logits) < math.inf for logits in (runs[0].logits, *alone)):
            return not_its_head._replace(telling=False)
        if not _agree(alone[0][:, :COMMON], alone[1][:, :COMMON], layers):
            return Verdict(Way.ALONE, "its logits depend on later tokens", ahead=True)
        # Positions start again, and a token far ahead shows whether a call's length matters.
        packed = row_of([*rows, rows[0][:1]], laid_out([LENGTH, LENGTH, 1], [0, 0, 0]), device)
        packed["position_ids"][0, -1] = FAR if below is None else max(below - 1, 0)
        logits = _logits(parts, parts.hidden(**packed))[:, :-1]
        if not _agree(logits, torch.cat(alone, 1), layers):
            return Verdict(Way.ALONE, "it does not keep sequences in one row apart")
        for run in runs:
            logits = _logits(parts, run.entered[0] * run.gain)
            if not _agree(logits, run.logits, product, one_product=True):
                return not_its_head
        shares = False
        if attention_of(parts.config) in SHARING:
            tree = laid_out([LENGTH, LENGTH], [0, COMMON])
            inputs = row_of(rows, tree, device)
            mask = mask_of(tree, parts.config, parts.embeddings)
            logits = _logits(parts, parts.hidden(**inputs, attention_mask=mask))
            path = torch.cat([part.path for part in tree]).to(logits.device)
            shares = _agree(logits[:, path], torch.cat(alone, 1), layers)
        return Verdict(Way.PACKED, autocast=autocast, shares=shares)


def compare_batch(
    model: Any, device: torch.device, vocabulary: int, kwargs: Mapping[str, Any]
) -> Verdict:
    """Compare the model's own logits of a padded batch with those of each sequence alone."""

    def ask(ids: Tensor, mask: Tensor) -> Tensor:
        logits = model(ids.to(device), attention_mask=mask.to(device), **kwargs)["logits"]
        return logits[:, -ids.shape[1] :]

    with _undisturbed(device):
        rows = _rows(vocabulary)
        first, second = (ask(row[None], torch.ones_like(row)[None]) for row in rows)
        dtype = _narrowest(model, torch.float32)
        ahead = not _agree(first[:, :COMMON], second[:, :COMMON], dtype)
        telling = all(0 < _peak(logits) < math.inf for logits in (first, second))
        # Shorter than alone: the length of a call may matter too.
        batch = rows[0][:-1], rows[1][:COMMON]
        mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
        try:
            padded = ask(pad_sequence(list(batch), batch_first=True), mask)
        except Exception:  # the model takes no batch, or no mask
            return Verdict(Way.ALONE, "it takes no padded batch")
        pairs = ((padded[0], first[0, :-1]), (padded[1, :COMMON], second[0, :COMMON]))
        if not ahead and all(_agree(ours, theirs, dtype) for ours, theirs in pairs):
            return Verdict(Way.PADDED, telling=telling)
        why = "its numbers change with what is behind a token"
        return Verdict(Way.ALONE, why, ahead=ahead, telling=telling)


class _AtHead(TorchFunctionMode):
    """Records what this thread multiplies with a head, and amplifies it for logits of ``peak``.

    It also records autocast at the first and the last step, the embeddings and the head: a forward
    may enter it by itself.
    """

    def __init__(self, parts: Parts, peak: float) -> None:
        super().__init__()
        self.parts, self.peak, self.gain = parts, peak, 1.0
        self.entered: list[Tensor] = []
        self.autocasts: list[torch.dtype | None] = []
        self.logits = torch.empty(0)
        self.dtype = torch.float32  # of the weight as it is multiplied, which ranks may convert

    @classmethod
    def run(cls, model: Callable[..., Any], parts: Parts, row: Tensor, peak: float) -> _AtHead:
        """The model's logits of a row, and what entered its head."""
        ids = row[None].to(parts.embeddings.device)
        with cls(parts, peak) as head:
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        head.logits = _whole(logits)
        return head

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Asked now, because a weight may be another tensor while ranks have gathered it.
        if func is torch.nn.functional.embedding and args[1] is self.parts.embeddings:
            self.autocasts.append(autocast_of(args[1].device))
        if func is torch.nn.functional.linear and args[1] is self.parts.head.weight:
            self.autocasts.append(autocast_of(args[1].device))
            self.entered.append(_whole(args[0]))
            self.dtype = args[1].dtype
            product = _peak(_whole(func(*args, **(kwargs or {}))))
            if self.peak and 0 < product < math.inf:
                # A power of two rounds nothing; the dtype has to have room for what comes out.
                wanted = self.peak / (product * abs(self.parts.scale or 1.0))
                most = max(product, _peak(self.entered[-1]))
                room = torch.finfo(args[0].dtype).max / 4 / most
                exponent = min(math.ceil(math.log2(wanted)), math.floor(math.log2(room)))
                self.gain = max(1.0, 2.0**exponent)
            args = (args[0] * self.gain, *args[1:])
        return func(*args, **(kwargs or {}))


def _rows(vocabulary: int, first: int = 0) -> list[Tensor]:
    """Two sequences that differ behind their common beginning, the same on all ranks."""
    ids = (torch.arange(2 * LENGTH - COMMON, device="cpu") + first).remainder(vocabulary)
    return [ids[:LENGTH], torch.cat((ids[:COMMON], ids[LENGTH:]))]


def _narrowest(model: Any, dtype: torch.dtype) -> torch.dtype:
    """A dtype or the one of the model's parameters that rounds most."""
    dtypes = {dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    return max(dtypes, key=lambda x: torch.finfo(x).eps)


def _logits(parts: Parts, hidden: Tensor) -> Tensor:
    """The logits of hidden states, from the weight and bias of the head."""

    def multiplied(states: Any) -> tuple[Tensor, ...]:
        weight: Any = parts.head.weight
        if not parts.shard:  # a float32 copy of a large weight would cost gigabytes
            return (torch.nn.functional.linear(states, parts.weight, parts.bias),)
        from torch.distributed.tensor import DTensor, Replicate  # loaded late: it takes seconds

        states = DTensor.from_local(states, weight.device_mesh, [Replicate()], run_check=False)
        return (_whole(torch.nn.functional.linear(states, weight, parts.head.bias)),)

    (logits,) = parts.at_head(hidden, multiplied)
    logits = logits.to(hidden.dtype if hidden.dtype == torch.float64 else torch.float32)
    return scaled_and_capped(logits, parts.scale or 1.0, parts.softcap or 0.0)


def _whole(values: Any) -> Tensor:
    return values.full_tensor() if is_dtensor(values) else values


def _peak(values: Tensor) -> float:
    """The largest finite value; infinity if there is a NaN, and 0 for an empty tensor."""
    if bool(values.isnan().any()):
        return math.inf
    finite = values[values.isfinite()].float()
    return finite.abs().max().item() if len(finite) else 0.0


def _agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype, one_product: bool = False) -> bool:
    """Whether two differ by no more than the rounding of whole layers, or of ``one_product``.

    Layers are compared beside the largest value, but a product value by value, because a tolerance
    for the largest one could hide a cap. So is a common factor, in which rounding to either side
    cancels out. Infinities must be the same.
    """
    relative, absolute = 0.0, 5e-2 if torch.finfo(dtype).bits <= 16 else 2e-4
    drift = absolute / 10
    if one_product:
        eps = max(torch.finfo(dtype).eps, 1e-4)
        relative, absolute, drift = 2 * eps, eps / 50, eps / 4
    wide = torch.promote_types(torch.promote_types(ours.dtype, theirs.dtype), torch.float32)
    ours, theirs = ours.to(wide), theirs.to(theirs.device, wide)
    finite = theirs.isfinite()
    if not torch.equal(ours.where(~finite, 0), theirs.where(~finite, 0)):
        return False
    ours, theirs = ours[finite], theirs[finite]
    if not len(theirs):
        return True
    size = theirs.abs()
    near = (ours - theirs).abs() <= relative * size + absolute * size.max()
    factor = (ours * theirs).sum() / theirs.square().sum().clamp(min=torch.finfo(wide).tiny)
    return bool(near.all()) and (not bool(size.any()) or abs(factor.item() - 1) <= drift)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, dropout or compilation; the user's random numbers are not drawn."""
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            UNCOMPILED,  # a graph would hide the head's product
            _NoDropout(),
        ):
            yield
    finally:
        # Autocast keeps weights that it has converted, here without a gradient graph.
        torch.clear_autocast_cache()


class _Uncompiled:
    """Lets compiled functions run uncompiled while any thread is in its ``with`` block.

    The block of torch restores what it found. Two threads that overlap would find each other's, and
    leave the process uncompiled for ever.
    """

    def __init__(self) -> None:
        self._blocks = 0
        self._stance = ExitStack()
        self._lock = threading.Lock()
        renew_in_children(self, _lock=threading.Lock)

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._stance.close()


UNCOMPILED = _Uncompiled()


class _NoDropout(TorchFunctionMode):
    """Skips dropout in this thread, without a change to the modules that call it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout:
            return args[0]
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
