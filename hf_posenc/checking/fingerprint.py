"""Which pairs of dimensions a layer turns and how fast, from its queries and keys at different positions.

A layer gets the same hidden states at other positions. What changes in its queries and keys then is their rotation. So
this reads no rotary module and no config, and needs no family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..live.watch import LayerCall, recorded
from .runs import Runner

LENGTHS = (23, 19, 17, 13, 11, 7)
"""Numbers of tokens to choose from: odd, because a score matrix must not look like a head, whose size is even."""

STEP = 16
"""Factor between two shifts. The angle of one shift must tell the turns of the next one, also in half precision."""

LARGEST_SHIFT = 2**16
"""Largest shift in tokens, which decides how slow a pair can be seen to turn."""

NOT_A_TURN = 0.1
"""Part of a dimension's change that its pair may leave unexplained."""

FAR_BETTER = 1e4
"""Factor by which another fit must explain the change better."""

_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
_SUMS_OF_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)


class _Watch(TorchFunctionMode):
    """Records the queries and keys of the first attention that is computed, (heads, T, D) each."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.seen: tuple[Tensor, Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.seen is None:
            named = kwargs or {}
            if func is torch.nn.functional.scaled_dot_product_attention:
                self._record(args[0] if args else named["query"], args[1] if len(args) > 1 else named["key"])
            elif func in _PRODUCTS and len(args) == 2:
                self._record(args[0], args[1], transposed=True)
            elif func in _SUMS_OF_PRODUCTS:
                both = [*args[1:3], *(named[name] for name in ("batch1", "batch2") if name in named)]
                self._record(both[0], both[1], transposed=True)
        return func(*args, **(kwargs or {}))

    def _record(self, query: Tensor, key: Tensor, transposed: bool = False) -> None:
        if query.ndim < 3 or key.ndim != query.ndim:
            return
        key = key.transpose(-1, -2) if transposed else key
        if query.shape[-2] == key.shape[-2] == self.length and query.shape[-1] == key.shape[-1] != self.length:
            self.seen = query.detach().flatten(0, -3).double().cpu(), key.detach().flatten(0, -3).double().cpu()


@dataclass(frozen=True)
class Turning:
    """How the heads of one layer turn.

    Attributes:
        size: D, the number of dimensions of a head.
        pairs: ((a, b), ...), the dimensions of a head that turn together, sorted.
        frequencies: (heads, F) float64, radians per token, one for each pair; 0 in a head whose pair stands. A head
            whose pair is zero throughout, as in sparse weights, gets the frequency of the head with the largest one.
        precision: radians per token up to which a frequency is known. A slower pair may look as if it stood.
        odd: dimensions that change with the position, but not as one of a turning pair.
        zero: dimensions that are zero in all heads, as in sparse weights, so that nothing can be said of them.
        unexplained: largest part of a pair's change that its turn leaves unexplained.
    """

    size: int
    pairs: tuple[tuple[int, int], ...]
    frequencies: Tensor
    precision: float
    odd: tuple[int, ...]
    zero: tuple[int, ...]
    unexplained: float = 0.0

    @property
    def layout(self) -> str | None:
        """`half` or `interleaved`; `mixed` for any other layout; None if there is no pair, or a single one."""
        if len(self.pairs) < 2:
            return None
        if all(second == first + 1 for first, second in self.pairs):
            return "interleaved"
        gaps = {second - first for first, second in self.pairs}
        return "half" if len(gaps) == 1 else "mixed"

    @property
    def heads_differ(self) -> bool:
        """Whether the heads turn by different frequencies."""
        return bool((self.frequencies - self.frequencies[:1]).abs().max() > self.precision) if self.pairs else False


def fit_turning(states: Tensor, moved: dict[int, Tensor], eps: float, *, rescaled: bool = False) -> Turning:
    """Fit rotations by pairs to the change of queries or keys.

    Args:
        states: (heads, T, D) float64.
        moved: shift in tokens, ascending from 1 -> the states of the same tokens, that many positions later.
        eps: rounding of the model's dtype.
        rescaled: whether weights may rescale the dimensions after the turn, as a norm of queries does.
    """
    heads, _, size = states.shape
    # Norms after the rotation let roundings of the whole head reach dimensions that stand.
    threshold = 16 * eps * states.abs().amax((-1, -2), keepdim=True)
    changes = (torch.stack([(other - states).abs() for other in moved.values()]) / threshold.clamp(min=1e-300)).amax(0)
    changed, clearly = ((changes.amax((0, 1)) > limit) for limit in (1, 4))
    dimensions = changed.nonzero().flatten().tolist()
    zero = tuple((states == 0).all(0).all(0).nonzero().flatten().tolist())
    precision = (4096 if rescaled else 64) * eps / max(moved)
    if not dimensions:
        return Turning(size, (), torch.zeros(heads, 0, dtype=torch.float64), precision, (), zero)
    before = states[..., changed]
    fit = _fit_rescaled if rescaled else _fit_turns
    fits = [fit(before, other[..., changed]) for other in moved.values()]
    angles = {shift: angle for shift, (angle, _) in zip(moved, fits, strict=True)}
    # What a pair leaves unexplained, as a part of the change of its two dimensions.
    change = torch.stack([(other[..., changed] - before).square().sum((0, 1)) for other in moved.values()]).sum(0)
    left = torch.stack([left.sum(0) for _, left in fits]).sum(0) / (change[:, None] + change)
    left.fill_diagonal_(math.inf)
    partner = left.argmin(-1).tolist()
    pairs = [(a, b) for a, b in enumerate(partner) if a < b and partner[b] == a and left[a, b] < NOT_A_TURN]
    paired = {each for pair in pairs for each in pair}
    energy = before.square().sum(1)
    frequencies = []
    for a, b in pairs:
        measured = _frequency({shift: angle[:, a, b] for shift, angle in angles.items()})
        energy_of_head = energy[:, [a, b]].sum(1)
        frequencies.append(measured.where(energy_of_head > 0, measured[energy_of_head.argmax()]))
    return Turning(
        size,
        tuple((dimensions[a], dimensions[b]) for a, b in pairs),
        torch.stack(frequencies, -1) if pairs else torch.zeros(heads, 0, dtype=torch.float64),
        precision,
        tuple(each for number, each in enumerate(dimensions) if number not in paired and clearly[each]),
        zero,
        max((left[a, b].item() for a, b in pairs), default=0.0),
    )


def _fit_turns(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a turn of every two dimensions; return its angle and what it leaves, both (heads, D, D).

    With `z = x_a + i x_b` the angle is that of `sum z' conj(z)`, and `|z'|^2 + |z|^2 - 2 |sum z' conj(z)|` is left.
    """
    mixed = after.transpose(1, 2) @ before
    own = mixed.diagonal(dim1=1, dim2=2)
    cosine, sine = own[:, :, None] + own[:, None, :], mixed.transpose(1, 2) - mixed
    energy = before.square().sum(1) + after.square().sum(1)
    left = energy[:, :, None] + energy[:, None, :] - 2 * torch.hypot(cosine, sine)
    return torch.atan2(sine, cosine), left.clamp(min=0)


def _fit_rescaled(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Fit any 2 x 2 matrix to every two dimensions; return as `_fit_turns` does.

    Such a matrix is `[[c, -s w], [s / w, c]]`, with the ratio `w` of the weights.
    """
    gram, mixed = before.transpose(1, 2) @ before, after.transpose(1, 2) @ before
    energy, own = gram.diagonal(dim1=1, dim2=2), mixed.diagonal(dim1=1, dim2=2)[:, :, None]
    aa, bb = energy[:, :, None], energy[:, None, :]
    determinant = (aa * bb - gram.square()).clamp(min=1e-300)
    by_own = (own * bb - mixed * gram) / determinant
    by_other = (mixed * aa - own * gram) / determinant
    left = after.square().sum(1)[:, :, None] - by_own * own - by_other * mixed
    sine = by_other.transpose(1, 2).sign() * (-by_other * by_other.transpose(1, 2)).clamp(min=0).sqrt()
    return torch.atan2(sine, (by_own + by_own.transpose(1, 2)) / 2), (left + left.transpose(1, 2)).clamp(min=0)


def _frequency(angles: dict[int, Tensor]) -> Tensor:
    """Return the frequency of a pair in each head, from its angles at ascending shifts without their whole turns."""
    frequency = torch.zeros_like(angles[1])
    for shift, angle in angles.items():
        turns = ((frequency * shift - angle) / (2 * math.pi)).round()
        frequency = (angle + 2 * math.pi * turns) / shift
    return frequency


@dataclass(frozen=True)
class LayerTurning:
    """How a layer turns its queries and its keys."""

    queries: Turning
    keys: Turning


def fingerprint(
    runner: Runner, layers: list[nn.Module], limit: int, last: int | None = None, start: int = 0
) -> dict[int, LayerTurning]:
    """Return layer index -> how the layer turns queries and keys, for layers whose attention could be seen.

    Args:
        runner: runs the model.
        layers: its decoder layers.
        limit: positions from `start` to `start + limit - 1` are used.
        last: position of one more token behind all others, in every run; None for no such token. A scaling that depends
            on the length then sees one length.
        start: the first position.
    """
    extra = 0 if last is None else 1
    length = next((each for each in LENGTHS if 2 * each <= limit), LENGTHS[-1])
    shifts = [1]
    while shifts[-1] < min(LARGEST_SHIFT, limit - length):
        shifts.append(min(STEP * shifts[-1], LARGEST_SHIFT, limit - length))
    tokens, count = runner.tokens(length), length - extra
    calls: dict[int, list[LayerCall]] = {}
    for shift in (0, *shifts):
        positions = start + shift + torch.arange(length, device=runner.device)[None]
        if last is not None:
            positions[:, -1] = last
        with recorded(layers) as calls_of_run:
            runner.at(tokens, positions)
        calls[shift] = calls_of_run
    eps = max(torch.finfo(dtype).eps for dtype in (runner.model.dtype, torch.float32))  # cosines are float32
    found = {}
    for index, layer in enumerate(layers):
        seen = {shift: _queries_and_keys(layer, calls[0][index], calls[shift][index], length) for shift in calls}
        if any(each is None for each in seen.values()):
            continue
        both = cast(dict[int, tuple[Tensor, Tensor]], seen)
        queries, keys = (
            _closest(both[0][side][:, :count], {shift: both[shift][side][:, :count] for shift in shifts}, eps)
            for side in (0, 1)
        )
        found[index] = LayerTurning(queries, keys)
    return found


def _closest(states: Tensor, moved: dict[int, Tensor], eps: float) -> Turning:
    """Fit turns. If they leave odd dimensions, allow for a factor that grows with the position, and for weights.

    Weights near one leave no odd dimension, and yet bend the angles: then the fit that allows for weights explains the
    change far better.
    """
    units = _unit(states), {shift: _unit(each) for shift, each in moved.items()}
    best = fit_turning(states, moved, eps)
    for (before, after), rescaled in ((units, False), ((states, moved), True), (units, True)):
        if best.odd:
            other = fit_turning(before, after, eps, rescaled=rescaled)
            best = min(best, other, key=lambda turning: len(turning.odd))
        elif rescaled and best.unexplained > 1e-5:
            other = fit_turning(before, after, eps, rescaled=True)
            if not other.odd and other.pairs == best.pairs and FAR_BETTER * other.unexplained < best.unexplained:
                best = other
    return best


def _unit(states: Tensor) -> Tensor:
    return states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def _queries_and_keys(
    layer: nn.Module, original: LayerCall, moved: LayerCall, length: int
) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys of a layer on its original hidden states, at the positions of another run."""
    # Layers write the keys that they lend to others into a dict of the call.
    kwargs = {name: dict(value) if isinstance(value, dict) else value for name, value in moved.kwargs.items()}
    with _Watch(length) as watch:
        layer(original.hidden_states, *moved.args, **kwargs)
    return watch.seen


def longest_list(model: PreTrainedModel, count: int | None) -> list[nn.Module]:
    """Return the layers of a model that no family describes: its list of `count` modules, or its longest list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return next((each for each in lists if len(each) == count), max(lists, key=len, default=[]))
