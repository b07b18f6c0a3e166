"""Hidden inputs: a problem's own ``get_inputs()``, called with changed random numbers.

A kernel can rely on properties of its problem's inputs: positive, sorted, symmetric, with rows that sum to one, or one
input as a part of another. So each draw inside ``get_inputs()`` is changed when it happens, and the inputs computed
from it have the properties by construction. Only where torch draws none of the floating numbers, as with numpy,
finished inputs are changed: each value by a function of itself, which keeps zeros, range, order and equal values.

The reference decides the rest of a problem's domain: :meth:`workers.judge.pipeline.reference.Reference.answer`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import torch
from torch.overrides import TorchFunctionMode

from workers.judge.channel.bits import checksum, extremes
from workers.judge.channel.randomness import ANY_SIZE, AROUND, ENDS, LARGER, NUDGED, POKED, REGIONS, set_seed
from workers.judge.channel.tensors import PACKED

#: Function that returns the tensors of one call of ``get_inputs()`` with a seed.
Draw = Callable[[int], list[torch.Tensor]]

#: torch's functions that draw from an interval, whose ends are significant. Below: all continuous distributions.
_UNIFORM: Final[frozenset[Any]] = frozenset(
    {torch.rand, torch.rand_like, torch.Tensor.uniform_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_}
)
_CONTINUOUS: Final[frozenset[Any]] = _UNIFORM | frozenset(
    {
        *(torch.randn, torch.randn_like, torch.normal, torch.nn.init.normal_, torch.nn.init.kaiming_normal_),
        *(torch.Tensor.normal_, torch.Tensor.exponential_, torch.Tensor.log_normal_, torch.Tensor.cauchy_),
    }
)
#: torch's functions that draw whole numbers.
_WHOLE: Final[frozenset[Any]] = frozenset({torch.randint, torch.randint_like, torch.randperm, torch.Tensor.random_})
#: Maximum number of groups of draws that are tried one after another.
_MOST_GROUPS: Final = 32
#: Number of values that are processed at a time.
_PIECE: Final = 1 << 24
#: Number of leading values that are compared to decide whether two draws differ.
_SHOWN: Final = 16
_SCALE: Final = 100.0
#: Factor of the kind ``larger``, because of many rows some have nearly equal largest values, and factor of outliers,
#: because Winograd's convolutions spread the rounding errors of a large value to its neighbors.
_SMALLER_SCALE: Final = 32.0
#: Range of the number of different values in a draw that was multiplied by such a factor.
_LEVELS: Final = (40, 80)
#: Factor for values that are uniform or stay within [-1, 1], because larger values might be invalid for them.
_SHRINK: Final = 1 / 128
_INTEGER: Final = 3
#: Share of the values that are replaced by special values.
_SPECIAL: Final = 1 / 64
#: Factor that brings the values of a sparse draw close to one value. Below: one of this many values stays far from it.
_NEAR: Final = 2**-14
_APART: Final = 1 << 14
#: Maximum number of far values in a sparse draw with few of them.
_FEW: Final = 16
#: Share of a draw around a position.
_AROUND: Final = 1 / 256
#: Number of values for the warm-up, enough for each kind to change at least one. Below: number of positions, because
#: a GPU selects other code for many positions.
_WARMED_UP: Final = 2 * _APART * _FEW
_MANY_POSITIONS: Final = 1 << 16
#: Maximum number of neighbors that the largest values of a line become, the minimum length of the line, and the
#: maximum number of values in all lines of one dimension.
_CLUSTER: Final = 16
_LINE: Final = 8
_GATHERED: Final = 1 << 19
#: Factor that brings values close to an end of their range. A gate that differs from 1 by half of it on average
#: forgets in about 2000 steps.
_AT_END: Final = 2**-10
#: Share of the whole numbers that a skewed draw has at one end of their range. The rest is compressed by this factor
#: towards the other end.
_TAIL: Final = 1 / 16
#: Number of blocks, and the share of its variation that each block keeps.
_BLOCKS: Final = 9
_PULLED: Final = 1 / 8
#: Range of the share of the rows in the first group, and by how much its share of the columns is larger at least.
_GROUP: Final = (3 / 8, 5 / 8)
_UNLIKE: Final = 1 / 32
#: Relative difference up to which sums or norms of lines are equal.
_EVEN: Final = 1 / 512
#: Number of values that show whether a tensor contains only whole numbers.
_SAMPLE: Final = 1 << 12
_GENERATOR: Final = torch.Generator


class Variants:
    """The variants of one input set.

    Some draws stay unchanged. Draws that do not depend on the seed make tables rather than data. Draws that determine
    inputs of whole numbers make masks, indices and lengths. A kernel can rely on the density of a mask, in each row
    too, so its draws stay. The draws of indices and lengths are moved, and also change their distribution.

    Attributes:
        seed: seed of the input set.
    """

    def __init__(self, draw: Draw, seed: int, other: int, dtype: torch.dtype) -> None:
        """Determine which draws of ``draw`` can be changed. Compare them with the draws of another seed.

        ``dtype`` is the dtype of floating inputs in calls.
        """
        self._draw = draw
        self.seed = seed
        self._makers = {**_MAKERS, NUDGED: partial(_nudged, rounding=torch.finfo(dtype).eps)}
        first, second = _Draws(), _Draws()
        # Draw one set after the other, because large inputs fit only once.
        with first:
            tensors = draw(seed)
        self._finite = [_is_finite(tensor) for tensor in tensors]
        sums = {i: checksum(tensor) for i, tensor in enumerate(tensors) if _is_whole(tensor)}
        masks = {i for i in sums if _is_mask(tensors[i])}
        # Without floating draws, those who made the tensors are unknown.
        others = [i for i in range(len(tensors)) if i not in sums and len(first.shown) == len(first.whole)]
        others = {i: checksum(tensors[i]) for i in others if self._finite[i] and not _is_normalized(tensors[i])}
        del tensors
        with second:
            tensors = draw(other)
        whole = [i for i in sums if i < len(tensors) and checksum(tensors[i]) != sums[i]]
        #: Numbers of the finished tensors that are changed themselves.
        self._made = [i for i, total in others.items() if i < len(tensors) and checksum(tensors[i]) != total]
        del tensors
        #: Number of values of each draw, and the numbers of the draws whose values can be changed, moved and skewed.
        self._sizes = first.sizes
        self._free: frozenset[int] = frozenset()
        self._movable: frozenset[int] = frozenset()
        self._skewable: frozenset[int] = frozenset()
        if len(first.shown) != len(second.shown):
            return
        pairs = enumerate(zip(first.shown, second.shown, strict=True))
        differing = [i for i, (a, b) in pairs if not torch.equal(a, b)]
        size = -(-len(differing) // _MOST_GROUPS) or 1
        for group in (frozenset(differing[begin : begin + size]) for begin in range(0, len(differing), size)):
            reached = self._reached(group, whole, sums)
            self._movable |= frozenset() if masks.intersection(reached) else group
            self._free |= frozenset() if reached else group - first.whole
        self._skewable = self._movable - self._free

    def _reached(self, draws: frozenset[int], whole: list[int], sums: dict[int, int]) -> list[int]:
        """Return the inputs among ``whole`` that some draws determine, or all of them if that is unknown."""
        if not whole or (made := self._changed(_uniform, draws)) is None:
            return whole
        return [i for i in whole if checksum(made[i]) != sums[i]]

    @property
    def drawn(self) -> int:
        """Return how many values can be changed."""
        return sum(self._sizes[number] for number in self._free)

    def make(self, kind: str, position: int = 0) -> list[torch.Tensor] | None:
        """Return the inputs of a kind, or None if nothing changes or if finite values become infinite.

        Some kinds change one value. Its position wraps around.
        """
        chosen = {"clustered": self._movable, "skewed": self._skewable}.get(kind, self._free)
        is_finished = kind in _BY_VALUE and bool(self._made)
        # The ends of a single draw have nothing to be combined with.
        if not (is_finished or chosen) or (kind in ENDS and len(chosen) < 2):
            return None
        if is_finished:
            made = self._finished(_BY_VALUE[kind])
        elif kind in _AT_A_POSITION:
            made = self._at(_AT_A_POSITION[kind], position % self.drawn)
        else:
            made = self._changed(self._makers[kind], chosen)
        if made is None or any(was and not _is_finite(is_) for was, is_ in zip(self._finite, made, strict=True)):
            return None
        return made

    def _finished(self, make: _Maker) -> list[torch.Tensor] | None:
        """Draw inputs, and change the finished ones, or return None if none changes."""
        made, new = self._draw(self.seed), dict[int, torch.Tensor]()
        for i in self._made:
            own = _range(made[i], None)
            values = None if own is None else make(made[i], own, self._generator(i, made[i].device))
            new |= {} if values is None else {i: values}
        return [new.get(i, tensor) for i, tensor in enumerate(made)] if new else None

    def _generator(self, number: int, device: torch.device) -> torch.Generator:
        """Return a separate generator for one change, so that the later draws stay unchanged."""
        return torch.Generator(device=device).manual_seed((self.seed + 1 + number) % 2**63)

    def _at(self, make: Callable[..., torch.Tensor | None], position: int) -> list[torch.Tensor] | None:
        """Draw inputs with a change of the draw that contains a position."""
        for number in sorted(self._free):
            if position < self._sizes[number]:
                return self._changed(partial(make, position=position), frozenset({number}))
            position -= self._sizes[number]
        raise AssertionError("the position is beyond all values")

    def _changed(self, make: _Maker, chosen: frozenset[int]) -> list[torch.Tensor] | None:
        """Draw inputs with the chosen draws changed, or return None if none changed."""

        def change(number: int, drawn: torch.Tensor, function: Any) -> torch.Tensor | None:
            own = _range(drawn, function) if number in chosen else None
            return None if own is None else make(drawn, own, self._generator(number, drawn.device))

        with _Draws(change) as mode:
            made = self._draw(self.seed)
        return made if mode.changed else None


def warm_up(device: torch.device | str, dtype: torch.dtype) -> None:
    """Make variants of a few values, so that a GPU loads the code for large inputs in advance."""

    def draw(seed: int) -> list[torch.Tensor]:
        set_seed(seed)
        return [torch.rand(_WARMED_UP, device=device).to(dtype)]

    variants = Variants(draw, 1, 2, dtype)
    for kind in (NUDGED, *ANY_SIZE, *REGIONS):
        variants.make(kind)
    many = torch.empty(1, device=device).expand(_MANY_POSITIONS**2)
    _positions(many, _MANY_POSITIONS, torch.Generator(device=device))


class _Draws(TorchFunctionMode):
    """Records each draw of random numbers inside the ``with`` block, and can change it.

    A mode below torch's functions would see more draws, but it imports torch's compiler, which takes seconds.

    Attributes:
        shown: first values of each draw before a change.
        sizes: number of values of each draw.
        whole: numbers of the draws of whole numbers.
        changed: True if a draw was changed.
    """

    def __init__(self, change: Callable[[int, torch.Tensor, Any], torch.Tensor | None] | None = None) -> None:
        """Initialize the mode. ``change`` gets number, values and function of a draw, and returns None to keep it."""
        super().__init__()
        self._change = change
        self.shown: list[torch.Tensor] = []
        self.sizes: list[int] = []
        self.whole: set[int] = set()
        self.changed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and record or change its draw."""
        out = func(*args, **(kwargs or {}))
        is_continuous = func in _CONTINUOUS and not out.is_conj() and (out.is_floating_point() or out.is_complex())
        if is_continuous or (func in _WHOLE and out.dtype is not torch.bool):
            if func in _WHOLE:
                self.whole.add(len(self.shown))
            with torch.no_grad():
                values = torch.view_as_real(out) if out.is_complex() else out
                new = self._change(len(self.shown), values, func) if self._change is not None else None
                self.shown.append(values.reshape(-1)[:_SHOWN].clone())
                self.sizes.append(values.numel())
                if new is not None:
                    if new is not values:
                        values.copy_(new)
                    self.changed = True
        return out


# Changes of a draw --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Range:
    """Minimum and maximum of one draw, and whether a variant must stay in that range, and have distinct values."""

    low: float
    high: float
    bounded: bool
    distinct: bool


#: Function that returns a changed draw, possibly changed in place, or None if it cannot change the draw.
_Maker = Callable[[torch.Tensor, _Range, torch.Generator], torch.Tensor | None]


def _scaled(
    tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, factor: float = _SCALE, has_levels: bool = True
) -> torch.Tensor | None:
    """Multiply by a factor and round to a few levels, or multiply by 1/128 if the range is bounded, in place."""
    if own.bounded:
        is_apart = own.low > own.high * _SHRINK or own.high < own.low * _SHRINK  # from zero
        return None if is_apart else tensor.mul_(_SHRINK)
    if not _fits(tensor, own, factor):
        return None
    tensor.mul_(factor)
    if has_levels:
        # Of many different values some would be so near a threshold that rounding them changes the answer.
        levels = torch.randint(*_LEVELS, (1,), device=tensor.device, generator=generator)
        step = factor * (own.high - own.low) / int(levels)
        tensor.div_(step).floor_().add_(0.5).mul_(step)
    return tensor


def _uniform(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:
    """Draw uniformly from the draw's own range."""
    if not tensor.is_floating_point():
        return torch.empty_like(tensor).random_(int(own.low), int(own.high) + 1, generator=generator)
    drawn = torch.empty_like(tensor).uniform_(generator=generator)
    return (drawn * (own.high - own.low) + own.low).clamp(own.low, own.high)


def _integers(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:
    """Draw small whole numbers, because sums of their products are exact in any order."""
    low, high = math.ceil(max(own.low, -_INTEGER)), math.floor(min(own.high, _INTEGER))
    return None if low >= high else torch.empty_like(tensor).random_(low, high + 1, generator=generator)


def _adversarial(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:
    """Replace a few values by extremes, outliers, zeros of both signs, and denormals."""
    specials = [own.low, own.high]
    if own.low <= 0 <= own.high:
        specials += [0.0, -0.0] if own.low < 0 else [0.0]
    if own.low < 0 < own.high:
        denormal = torch.finfo(tensor.dtype).tiny / 4
        specials += [denormal, -denormal]
    if not own.bounded and _fits(tensor, own, _SMALLER_SCALE):
        specials += [_SMALLER_SCALE * bound for bound in (own.low, own.high) if abs(bound) > 1]
    positions = _positions(tensor, max(1, int(tensor.numel() * _SPECIAL)), generator)
    values = torch.tensor(specials, dtype=tensor.dtype, device=tensor.device)
    flat = tensor.reshape(-1).clone()
    chosen = torch.randint(len(specials), positions.shape, device=tensor.device, generator=generator)
    chosen += values[chosen] == flat[positions]  # use another value if the same one is already there
    flat[positions] = values[chosen % len(specials)]
    return flat.view(tensor.shape)


def _sparse(
    tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, most: int = sys.maxsize
) -> torch.Tensor | None:
    """Bring all but a few values close to zero or to one end of their range, in place."""
    # The few values dominate sums and norms, so an estimate from a sample is wrong. A large sample can contain its
    # share of many far values by chance. With few of them, it contains none or too many.
    rest = 0.0 if own.low <= 0 <= own.high else own.low
    if rest:
        tensor.sub_(rest).mul_(_NEAR).add_(rest)
    else:
        tensor.mul_(_NEAR)  # one pass, because it can be gigabytes
    positions = _positions(tensor, min(most, max(1, tensor.numel() // _APART)), generator)
    far = torch.empty(positions.shape, device=tensor.device).uniform_(0.75, 1, generator=generator)
    end = own.high if own.high - rest >= rest - own.low else own.low
    tensor.view(-1)[positions] = (rest + far * (end - rest)).clamp(own.low, own.high).to(tensor.dtype)
    return tensor


def _blocks(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:
    """Bring values to the lower or the upper end of their range, in blocks of random sizes, in place."""
    # No part of the values then represents the rest.
    flat = tensor.view(-1)
    cuts = torch.randint(flat.numel() + 1, (_BLOCKS - 1,), device=tensor.device, generator=generator).sort().values
    begin = 0
    for number, end in enumerate([*cuts.tolist(), flat.numel()]):
        _pull(flat[begin:end], own.low if number % 2 else own.high)
        begin = end
    return tensor.clamp_(own.low, own.high)


def _divided(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:
    """Divide rows and columns into two groups, and bring values to one end of their range where groups meet, in place.

    Values between the other groups come to the other end. Iterative methods converge slowly on nearly separate groups
    that hold slightly different shares of the rows and of the columns.
    """
    if tensor.dim() < 2 or tensor.shape[-1] < _LINE:
        return None
    share, more = torch.rand(2, device=tensor.device, generator=generator).tolist()
    share = _GROUP[0] + share * (_GROUP[1] - _GROUP[0])
    rows, columns = tensor.shape[-2:]
    row, column = round(rows * share), int(columns * (share + _UNLIKE * (1 + more)))
    lines = tensor.view(-1, rows, columns)
    for block, near, far in ((lines[:, :row], own.high, own.low), (lines[:, row:], own.low, own.high)):
        _pull(block[..., :column], near)
        _pull(block[..., column:], far)
    # No row has ties at its ends.
    for at, end in ((lines.argmax(-1, keepdim=True), own.high), (lines.argmin(-1, keepdim=True), own.low)):
        lines.scatter_(-1, at, end)
    return tensor.clamp_(own.low, own.high)


def _clustered(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:  # noqa: ARG001
    """Move the largest and the smallest values of each line to neighboring positions, in place.

    The values are as likely as in any other order. Lines along the last dimension have the same positions. Along other
    dimensions they have their own, so that no row consists of nearly equal values.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size >= _LINE]
    for dim in dims:
        lines = tensor.view(math.prod(tensor.shape[:dim]), tensor.shape[dim], -1)
        length = min(lines.shape[1], _GATHERED)
        inner = min(lines.shape[2], _GATHERED // length)
        for axis, extent in ((1, length), (2, inner), (0, min(lines.shape[0], _GATHERED // (length * inner)))):
            begin = torch.randint(lines.shape[axis] - extent + 1, (1,), device=tensor.device, generator=generator)
            lines = lines.narrow(axis, int(begin), extent)
        count, half = min(_CLUSTER, length // 4), length // 2
        groups = (1, 1, 1) if dim == tensor.dim() - 1 else (lines.shape[0], 1, lines.shape[2])
        for least, largest in ((0, True), (half, False)):
            begin = torch.randint(half - count + 1, groups, device=tensor.device, generator=generator)
            _gather(lines, least + begin, count, largest=largest)
    return tensor if dims else None


def _gather(lines: torch.Tensor, begin: torch.Tensor, count: int, *, largest: bool) -> None:
    """Move the largest or the smallest values of each line to ``count`` positions from ``begin`` on, in place."""
    at = lines.topk(count, dim=1, largest=largest).indices
    # Every other line keeps its own order. The rest has the largest value at the same position.
    at[::2] = at[::2].sort(dim=1).values
    values = lines.gather(1, at)
    window = (begin + torch.arange(count, device=lines.device).view(1, -1, 1)).expand_as(at)
    # Values leave the window for the positions that become free. Both are counted in the same order.
    stays = (at >= begin) & (at < begin + count)
    kept = torch.zeros_like(lines, dtype=torch.bool).scatter_(1, at, True).gather(1, window)
    leaving = lines.gather(1, window.gather(1, kept.int().argsort(dim=1, stable=True)))
    lines.scatter_(1, at.gather(1, stays.int().argsort(dim=1, stable=True)), leaving)
    lines.scatter_(1, window, values)


def _skewed(tensor: torch.Tensor, own: _Range, generator: torch.Generator) -> torch.Tensor | None:
    """Bring nearly all values close to one end of their range, and the rest to the other end."""
    if own.distinct:
        shift = int(torch.randint(tensor.numel(), (1,), device=tensor.device, generator=generator))
        return tensor.sort().values.roll(shift)
    near, far = own.low, own.high
    if torch.randint(2, (1,), device=tensor.device, generator=generator):
        near, far = far, near
    # Trunc leaves whole numbers whole.
    steps = (tensor.reshape(-1).to(torch.float64) - near) * _TAIL
    flat = near + (steps if tensor.is_floating_point() else steps.trunc())
    flat[_positions(flat, max(1, int(flat.numel() * _TAIL)), generator)] = far
    return flat.view(tensor.shape).to(tensor.dtype)


def _ends(tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, turn: int) -> torch.Tensor | None:
    """Bring a draw close to one end of its range, in place, or keep it: each of these in one of three turns."""
    choice = (int(torch.randint(3, (1,), device=tensor.device, generator=generator)) + turn) % 3
    if not choice:
        return None
    return _pull(tensor, own.low if choice == 1 else own.high, _AT_END).clamp_(own.low, own.high)


def _nudged(tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, rounding: float) -> torch.Tensor | None:
    """Multiply each value by about one plus a rounding error, in place."""
    for piece in tensor.view(-1).split(_PIECE):
        moves = torch.empty_like(piece).normal_(generator=generator)
        piece.mul_(moves.mul_(rounding).add_(1)).clamp_(own.low, own.high)
    return tensor


def _region(tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, share: float) -> torch.Tensor | None:
    """Bring values in one random region to the end of their range that is farther from them, in place."""
    # All other values stay, so a sample of the values hardly ever shows the change.
    length = max(1, int(tensor.numel() * share))
    begin = int(torch.randint(tensor.numel() - length + 1, (1,), device=tensor.device, generator=generator))
    _bring_to_an_end(tensor.view(-1)[begin : begin + length], own)
    return tensor


def _poked(tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, position: int) -> torch.Tensor | None:  # noqa: ARG001
    """Bring one value to the end of the range that is farther from it, in place."""
    _bring_to_an_end(tensor.view(-1)[position : position + 1], own)
    return tensor


def _around(tensor: torch.Tensor, own: _Range, generator: torch.Generator, *, position: int) -> torch.Tensor | None:  # noqa: ARG001
    """Bring values around a position to the end of their range that is farther from them, in place."""
    length = max(1, int(tensor.numel() * _AROUND))
    begin = max(0, min(position - length // 2, tensor.numel() - length))
    _bring_to_an_end(tensor.view(-1)[begin : begin + length], own)
    return tensor


def _outliers(tensor: torch.Tensor, own: _Range, _: torch.Generator) -> torch.Tensor | None:
    """Bring all values but those farthest from it close to zero, or to the lower end of their range."""
    rest = 0.0 if own.low <= 0 <= own.high else own.low
    away = (tensor - rest).abs_()
    least = away.view(-1).topk(max(1, tensor.numel() // _APART)).values[-1]
    return torch.where(away < least, (tensor - rest).mul_(_NEAR).add_(rest), tensor)


def _bring_to_an_end(values: torch.Tensor, own: _Range) -> None:
    """Move values, in place, towards the minimum or maximum of their range, whichever is farther from their mean."""
    middle = float(values.mean(dtype=torch.float32))
    _pull(values, own.high if own.high - middle >= middle - own.low else own.low).clamp_(own.low, own.high)


def _pull(values: torch.Tensor, target: float, kept: float = _PULLED) -> torch.Tensor:
    """Bring values close to ``target``, in place, and keep a share of their distance."""
    return values.mul_(kept).add_((1 - kept) * target)


_MAKERS: Final[dict[str, _Maker]] = {
    "scaled": _scaled,
    LARGER: partial(_scaled, factor=_SMALLER_SCALE),
    "uniform": _uniform,
    "integers": _integers,
    "adversarial": _adversarial,
    "sparse": _sparse,
    # Small tensors of the kind before have few far values anyway.
    "few": lambda x, own, chance: _sparse(x, own, chance, most=_FEW) if x.numel() > _APART * _FEW else None,
    "blocks": _blocks,
    "clustered": _clustered,
    "divided": _divided,
    "skewed": _skewed,
    **{kind: partial(_ends, turn=turn) for turn, kind in enumerate(ENDS)},
    **{kind: partial(_region, share=share) for kind, share in REGIONS.items()},
}
#: Changes that depend on each value alone.
_BY_VALUE: Final[dict[str, _Maker]] = {
    "scaled": partial(_scaled, has_levels=False),
    LARGER: partial(_scaled, factor=_SMALLER_SCALE, has_levels=False),
    "sparse": _outliers,
}
_AT_A_POSITION: Final[dict[str, Callable[..., torch.Tensor | None]]] = {POKED: _poked, AROUND: _around}


def _positions(tensor: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """Return distinct random positions in a tensor, because a GPU writes duplicates in any order."""
    return torch.randint(tensor.numel(), (most,), device=tensor.device, generator=generator).unique()


def _fits(tensor: torch.Tensor, own: _Range, factor: float) -> bool:
    """Return whether the values times ``factor`` are far from overflow."""
    return factor * max(abs(own.low), abs(own.high)) < torch.finfo(tensor.dtype).max / 64


def _range(tensor: torch.Tensor, function: Any) -> _Range | None:
    """Return the range of a draw, or None if it is empty or not finite."""
    if tensor.numel() < 2:
        return None
    low, high = torch.stack(tensor.aminmax()).tolist()
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return None
    return _Range(
        low, high, function is None or function in _UNIFORM or (low >= -1 and high <= 1), function is torch.randperm
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether all values are whole, or infinite as in a mask."""
    if not tensor.is_floating_point():
        return not tensor.is_complex()
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return False  # torch cannot convert it. On a GPU the attempt fails a device assertion.
    return all(torch.equal(piece, piece.round()) for piece in _pieces(tensor))


def _is_mask(tensor: torch.Tensor) -> bool:
    """Return whether there are at most two different values."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return True
    low, high = tensor.aminmax()
    return all(bool(((piece == low) | (piece == high)).all()) for piece in _pieces(tensor))


def _is_normalized(tensor: torch.Tensor) -> bool:
    """Return whether some lines of a tensor have equal sums or norms, or its dtype has no norm."""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        return True
    for dim in range(tensor.dim()):
        for lines in (tensor.sum(dim).abs(), *(torch.linalg.vector_norm(tensor, order, dim=dim) for order in (1, 2))):
            usual = lines.mean() if lines.numel() > 1 else 1.0
            if bool(((lines - usual).abs() <= _EVEN * usual).all()):
                return True
    return False


def _is_finite(tensor: torch.Tensor) -> bool:
    can_be_infinite = (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype is not torch.float4_e2m1fn_x2
    return not (can_be_infinite and tensor.numel()) or bool(torch.stack(extremes(tensor)).isfinite().all())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in pieces, which need little memory to process."""
    for piece in tensor.reshape(-1).split(_PIECE):
        yield piece.float() if piece.dtype.itemsize == 1 else piece


def moved(tensor: torch.Tensor, rounding: float) -> torch.Tensor:
    """Return floating values in float64, finite ones changed by about ``rounding`` but within the tensor's range."""
    if tensor.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(tensor.resolve_conj()), rounding))
    if not tensor.is_floating_point() or tensor.dtype in PACKED or not tensor.numel():
        return tensor
    wide = tensor.double()
    if _is_whole(wide) and _is_mask(wide) and not bool((wide.abs() <= _INTEGER).all()):
        return wide  # A mask that is added to scores has no rounding errors.
    squares = wide.square().nan_to_num_(posinf=0.0)
    usual = squares.mean()
    if tensor.dim() and tensor.shape[-1] >= _LINE:  # A line of small values has small rounding errors.
        usual = squares.mean(-1, keepdim=True).clamp_(usual * _NEAR**2, usual)
    nan = wide.isnan()
    ends = wide.masked_fill(nan, math.inf).amin(), wide.masked_fill(nan, -math.inf).amax()
    return squares.add_(usual).sqrt_().mul_(torch.randn_like(wide)).mul_(rounding).add_(wide).clamp_(*ends)


def rounded_otherwise(tensor: torch.Tensor, rounding: float, *, keep: bool = True) -> torch.Tensor:
    """Return a copy with each value changed by about ``rounding`` of it, but ``keep`` values that are whole numbers."""
    # Whole numbers are often masks, one-hot vectors or indices, whose change is more than a rounding error.
    some = tensor.reshape(-1)[:_SAMPLE]
    if tensor.is_complex():
        return torch.view_as_complex(rounded_otherwise(torch.view_as_real(tensor.resolve_conj()), rounding, keep=keep))
    if not tensor.is_floating_point() or tensor.dtype in PACKED:
        return tensor.clone()
    if keep and torch.equal(some.float(), some.float().round()):
        return tensor.clone()
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.dtype.itemsize > 1 else tensor.float()
    return torch.randn_like(exact).mul_(rounding).mul_(exact).nan_to_num_(0.0, 0.0, 0.0).add_(exact).to(tensor.dtype)


class _OnHost(type):
    """Class of the replacement of torch's generators, which have no subclasses."""

    def __call__(cls, device: object = None) -> torch.Generator:  # noqa: ARG002 -- the argument of torch's class
        return _GENERATOR()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _GENERATOR)


class OnHost(TorchFunctionMode):
    """Replaces CUDA devices by the CPU in calls of torch, and in new generators, which no mode can see."""

    def __enter__(self) -> Self:
        setattr(torch, "Generator", _OnHost("Generator", (), {}))  # noqa: B010 -- torch declares it as a class
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        setattr(torch, "Generator", _GENERATOR)  # noqa: B010
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        given = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._replaced, args), **given)

    @staticmethod
    def _replaced(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
