"""Run a model on a few tokens to find out what it does with padding, packing and its head."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusedrl.channel.forking import renew_in_children
from fusedrl.channel.tensors import is_dtensor
from fusedrl.compat.torch import buffers_of
from fusedrl.compat.transformers import attention_of
from fusedrl.models.forwards import SHARING
from fusedrl.models.prefix_tree import laid_out
from fusedrl.models.split import Parts, autocast_as, autocast_of, uncompiled
from fusedrl.models.tree_mask import mask_of
from fusedrl.ops._head import scaled_and_capped

SHORT, LONG = 5, 8  # tokens of the two sequences
FAR = 1 << 20  # a position beyond those that rotary embeddings are made for
PEAK = 128.0  # the logits of an amplified run: a cap that does not bend those bends none

Ask = Callable[..., Tensor]  # the logits [B, T, V] of inputs by name


class ProbeResult(NamedTuple):
    """The findings of the runs.

    Args:
        splits: the head's product with the decoder's states gives the model's logits.
        packs: sequences stay apart in one row in which positions start again.
        pads: sequences stay apart in a right-padded batch.
        steady: logits depend on nothing after their token, and not on the length of the call.
        ahead: logits depend on later tokens.
        telling: the logits could be compared: they were not only zeros or infinities.
        autocast: the dtype of autocast in the model's forward, whoever enters it.
        shares: sequences stay apart in one row that has their common beginning once.
        why: the reason why the model does not split.
    """

    splits: bool
    packs: bool = False
    pads: bool = False
    steady: bool = True
    ahead: bool = False
    telling: bool = True
    autocast: torch.dtype | None = None
    shares: bool = False
    why: str = "its logits are not those of its head"


class Whole(NamedTuple):
    """The logits ``[1, T, V]`` of each row ``[1, T]`` alone, in the rounding of a dtype."""

    rows: tuple[Tensor, Tensor]
    logits: list[Tensor]
    dtype: torch.dtype

    def is_like(self, *logits: Tensor) -> bool:
        """Whether logits of the rows, one tensor each, are those of each row alone."""
        pairs = zip(logits, self.logits, strict=True)
        return all(_agree(ours, theirs, self.dtype) for ours, theirs in pairs)


def probe_parts(parts: Parts, packable: bool, below: int | None) -> ProbeResult:
    """Compare the parts with the whole, and sequences that share a forward with each alone.

    ``below`` is the length from which on the model says that its calls depend on their length.
    """
    if not parts.shared:
        return _probe_parts(uncompiled(parts.model), parts, packable, below)
    found = ProbeResult(False)
    forward = parts.base.forward

    def probe() -> tuple[Tensor, ...]:
        nonlocal found
        found = _probe_parts(forward, parts, packable, below)
        return (marked,)

    marked = torch.linspace(-1, 1, SHORT, device=parts.embeddings.device).view(1, SHORT, 1)
    rows = _rows(min(parts.classes, len(parts.embeddings)), parts.embeddings.device)
    with torch.no_grad():
        (left,) = parts.within(probe, rows[0])
    if not torch.equal(left, marked):
        return ProbeResult(False, why="what is around it changes what its forward returns")
    return found


def _probe_parts(
    model: Callable[..., Any], parts: Parts, packable: bool, below: int | None
) -> ProbeResult:
    device = parts.embeddings.device
    rows = _rows(min(parts.classes, len(parts.embeddings)), device)
    with _undisturbed(device):
        plain = _AtHead.run(model, parts, rows[0], 1.0)
        autocasts = set(plain.autocasts) or {autocast_of(device)}
        if len(autocasts) > 1:
            return ProbeResult(False, why="its head is under another autocast than its embeddings")
        (autocast,) = autocasts
        with autocast_as(device, autocast):
            found = _compared(model, parts, rows, plain, packable, below)
        return found._replace(autocast=autocast)


def _compared(
    model: Callable[..., Any],
    parts: Parts,
    rows: tuple[Tensor, Tensor],
    plain: _AtHead,
    packable: bool,
    below: int | None,
) -> ProbeResult:
    """As :func:`probe_parts`, after the first run of the model, in the autocast of its forward."""
    hidden = [parts.hidden(input_ids=row) for row in rows]
    logits = [_logits(parts, states) for states in hidden]
    if not all(0 < _peak(values) < math.inf for values in (plain.logits, *logits)):
        return ProbeResult(False, telling=False)
    # Amplified, because a cap changes nothing near 0; by a power of two, which rounds nothing.
    gained = _AtHead.run(model, parts, rows[1], _gain(parts, hidden[0]))
    if not (_is_head(parts, plain, hidden[0]) and _is_head(parts, gained, hidden[1])):
        return ProbeResult(False)

    def ask(**inputs: Tensor) -> Tensor:
        return _logits(parts, parts.hidden(**inputs))

    whole = Whole(rows, logits, _rounding(parts))
    steady = _steady(ask, whole)
    packs = packable and steady and _packs(ask, whole)
    if packs:
        with _forgotten(parts.decoder):
            steady = _steady_ahead(ask, whole, FAR if below is None else max(below - 1, 0))
    pads = steady and _pads(ask, whole)
    packs = packs and steady
    ahead = not steady and _ahead(ask, whole)
    return ProbeResult(
        True, packs, pads, steady, ahead, shares=packs and _shares(ask, whole, parts)
    )


def probe_whole(
    model: Any, device: torch.device, vocabulary: int, kwargs: Mapping[str, Any]
) -> ProbeResult:
    """Compare the model's own logits of a padded batch with those of each sequence alone."""

    def ask(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = model(input_ids, attention_mask=mask, **kwargs)["logits"]
        return logits[:, -input_ids.shape[1] :]

    rows = _rows(vocabulary, device)
    with _undisturbed(device):
        whole = Whole(rows, [ask(input_ids=row) for row in rows], _dtype_of(model))
        steady = _steady(ask, whole)
        pads = steady and _pads(ask, whole)
        telling = all(0 < _peak(logits) < math.inf for logits in whole.logits)
        ahead = not steady and _ahead(ask, whole)
        return ProbeResult(False, pads=pads, steady=steady, ahead=ahead, telling=telling)


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The narrowest dtype that a model computes in, whose rounding its logits have."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    halves = [dtype for dtype in dtypes if torch.finfo(dtype).bits == 16]
    return halves[0] if halves else torch.float32


class _AtHead(TorchFunctionMode):
    """Records, and multiplies by a gain, what this thread multiplies with a head.

    It also records autocast at the first and the last step, the embeddings and the head: a forward
    may enter it by itself.
    """

    def __init__(self, parts: Parts, gain: float) -> None:
        super().__init__()
        self.parts, self.gain = parts, gain
        self.entered: list[Tensor] = []
        self.autocasts: list[torch.dtype | None] = []
        self.logits = torch.empty(0)

    @classmethod
    def run(cls, model: Callable[..., Any], parts: Parts, row: Tensor, gain: float) -> _AtHead:
        """The model's logits of a row, and what entered its head."""
        with cls(parts, gain) as head:
            logits = model(input_ids=row, use_cache=False, return_dict=True).logits
        head.logits = logits.full_tensor() if is_dtensor(logits) else logits
        return head

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Asked now, because a weight may be another tensor while ranks have gathered it.
        if func is torch.nn.functional.embedding and args[1] is self.parts.embeddings:
            self.autocasts.append(autocast_of(args[1].device))
        if func is torch.nn.functional.linear and args[1] is self.parts.head.weight:
            self.autocasts.append(autocast_of(args[1].device))
            states = args[0]
            self.entered.append(states.full_tensor() if is_dtensor(states) else states)
            args = (args[0] * self.gain, *args[1:])
        return func(*args, **(kwargs or {}))


def _rows(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.arange(SHORT + LONG, device=device).remainder(vocabulary)[None]
    return ids[:, :SHORT], ids[:, SHORT:]


def _is_head(parts: Parts, run: _AtHead, hidden: Tensor) -> bool:
    """Whether the decoder's states entered the head, once, and gave the model's logits there."""
    dtype = _rounding(parts)
    if len(run.entered) != 1 or not _agree(hidden, run.entered[0], dtype):
        return False
    return _same_function(_logits(parts, run.entered[0] * run.gain), run.logits, dtype)


def _rounding(parts: Parts) -> torch.dtype:
    """The dtype in which the head multiplies."""
    autocast = autocast_of(parts.weight.device)
    dtype = parts.weight.dtype
    return dtype if autocast is None or dtype == torch.float64 else autocast


def _gain(parts: Parts, hidden: Tensor) -> float:
    """A power of two that makes the largest logit ``PEAK`` or more, where the dtype has room."""
    product = _peak(_logits(parts._replace(scale=None, softcap=None), hidden))
    wanted = PEAK / (product * abs(parts.scale or 1.0))
    room = torch.finfo(hidden.dtype).max / 4 / max(product, _peak(hidden))
    return max(1.0, 2.0 ** min(math.ceil(math.log2(wanted)), math.floor(math.log2(room))))


def _packs(ask: Ask, whole: Whole) -> bool:
    positions = torch.cat([torch.arange(n, device=whole.rows[0].device) for n in (SHORT, LONG)])
    packed = ask(input_ids=torch.cat(whole.rows, 1), position_ids=positions[None])
    return whole.is_like(*packed.split((SHORT, LONG), dim=1))


def _shares(ask: Ask, whole: Whole, parts: Parts) -> bool:
    """Whether a row that has the beginning of two sequences once keeps them apart."""
    if attention_of(parts.config) not in SHARING:
        return False
    short, long = whole.rows
    common = SHORT - 1
    other = torch.cat((long[:, :common], short), 1)
    places = laid_out([LONG, common + SHORT], [0, common])
    positions = torch.cat(
        [torch.arange(n, device=long.device) + first for n, first in ((LONG, 0), (SHORT, common))]
    )[None]
    alone = [whole.logits[1], ask(input_ids=other)]
    try:
        row = ask(
            input_ids=torch.cat((long, short), 1),
            position_ids=positions,
            attention_mask=mask_of(places, parts.config, parts.embeddings),
        )
    except Exception:  # the decoder takes no mask of this form
        return False
    paths = (part.path.to(row.device) for part in places)
    return Whole((long, other), alone, whole.dtype).is_like(*(row[:, path] for path in paths))


def _pads(ask: Ask, whole: Whole) -> bool:
    short, long = whole.rows
    ids = torch.cat((torch.nn.functional.pad(short, (0, LONG - SHORT)), long))
    mask = torch.ones_like(ids)
    mask[0, SHORT:] = 0
    try:
        padded = ask(input_ids=ids, attention_mask=mask)
    except Exception:  # the model takes no batch, or no mask
        return False
    return whole.is_like(padded[:1, :SHORT], padded[1:])


def _steady(ask: Ask, whole: Whole) -> bool:
    cut = ask(input_ids=whole.rows[1][:, :SHORT])
    return _agree(cut, whole.logits[1][:, :SHORT], whole.dtype)


def _ahead(ask: Ask, whole: Whole) -> bool:
    """Whether later tokens change the logits, in calls of the same length."""
    ids = whole.rows[1].clone()
    ids[:, SHORT:] = whole.rows[0][:, : LONG - SHORT]
    return not _agree(ask(input_ids=ids)[:, :SHORT], whole.logits[1][:, :SHORT], whole.dtype)


def _steady_ahead(ask: Ask, whole: Whole, position: int) -> bool:
    """Whether a token at a far position changes nothing for the tokens before it."""
    positions = torch.arange(SHORT, device=whole.rows[0].device)
    positions[-1] = position
    logits = ask(input_ids=whole.rows[0], position_ids=positions[None])
    return _agree(logits[:, :-1], whole.logits[0][:, :-1], whole.dtype)


@contextmanager
def _forgotten(decoder: nn.Module) -> Iterator[None]:
    """Restore, after the block, what rotary modules remember of the positions of calls."""
    saved = []
    for module in decoder.modules():
        if hasattr(module, "inv_freq") or hasattr(module, "rope_type"):
            buffers = dict(buffers_of(module))
            values = [(b, b.clone()) for b in buffers.values() if b is not None]
            saved.append((module, dict(vars(module)), buffers, values))
    try:
        yield
    finally:
        for module, attributes, buffers, values in saved:
            vars(module).clear()
            vars(module).update(attributes)
            own = buffers_of(module)
            own.clear()
            own.update(buffers)
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


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


def _logits(parts: Parts, hidden: Tensor) -> Tensor:
    # In the dtype of the head: a float32 copy of a large one would cost gigabytes.
    (logits,) = parts.at_head(
        hidden, lambda states: (torch.nn.functional.linear(states, parts.weight, parts.bias),)
    )
    if parts.shard:
        logits = _gathered(logits, parts)
    logits = logits.to(hidden.dtype if hidden.dtype == torch.float64 else torch.float32)
    return scaled_and_capped(logits, parts.scale or 1.0, parts.softcap or 0.0)


def _gathered(logits: Tensor, parts: Parts) -> Tensor:
    """The logits of all ranks' classes, of which each has a part."""
    group = parts.shard["vocab_group"]
    each = -(-parts.classes // group.size())  # all but the last parts have as many
    own = torch.nn.functional.pad(logits, (0, each - logits.shape[-1]))
    shards = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(shards, own, group)
    return torch.cat(shards, -1)[..., : parts.classes]


def _peak(values: Tensor) -> float:
    """The largest finite value; infinity if there is a NaN, and 0 for an empty tensor."""
    if bool(values.isnan().any()):
        return math.inf
    finite = values[values.isfinite()].float()
    return finite.abs().max().item() if len(finite) else 0.0


def _agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether two differ by no more than the rounding of whole layers, beside the largest value."""
    tolerance = 5e-2 if torch.finfo(dtype).bits == 16 else 2e-4
    return _within(ours, theirs, relative=0.0, absolute=tolerance, drift=tolerance / 10)


def _same_function(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether two differ by no more than a few roundings of the same product.

    Each logit is compared with itself, because a tolerance for the largest one could hide a cap.
    """
    eps = max(torch.finfo(dtype).eps, 1e-4)
    return _within(ours, theirs, relative=2 * eps, absolute=eps / 50, drift=eps / 4)


def _within(ours: Tensor, theirs: Tensor, relative: float, absolute: float, drift: float) -> bool:
    """Whether each value is, and a common factor, in which rounding to either side cancels out.

    ``absolute`` is a part of the largest value. Infinities must be the same.
    """
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
