"""Which pairs of dimensions a layer turns and how fast, from its queries and keys at different positions.

A layer gets the same hidden states at other positions. What changes in its queries and keys then is their rotation. So
this reads no rotary module and no config, and needs no family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..model.watch import LayerCall, recorded
from .runner import InFloat32, Runner, again

LENGTHS = (23, 19, 17, 13, 11, 7)
"""Numbers of tokens to choose from: odd, because a score matrix must not look like a head, whose size is even."""

STEP = 16
"""Factor between two shifts. The angle of one shift must tell the turns of the next one."""

LARGEST_SHIFT = 2**16
"""Largest shift in tokens, which decides how slow a pair can be seen to turn."""

EXACT = 2e-3
"""Relative difference up to which two frequencies are the same.

An angle `p w` in float32 is off by up to `p w eps`: a relative difference of the frequency, whatever the length.
"""

NOT_A_TURN = 0.1
"""Part of a dimension's change that its pair may leave unexplained."""

MOST = 0.9
"""Part of the values that must be found again, so that neither chance nor a rounding decides."""

UNEXPLAINED = 1e-5
"""Part of a pair's change from which a turn alone is not the whole explanation."""

FAR_BETTER = 1e4
"""Factor by which another fit must explain the change better."""

_BEFORE = {"scaled_dot_product_attention": 0, "matmul": 0, "__matmul__": 0, "bmm": 0, "baddbmm": 1}
"""Name of a function that computes scores -> number of its tensors before queries and keys."""


class _Seen(Exception):
    """Ends a run once everything has been seen. It is no error."""


class _Watch(TorchFunctionMode):
    """Records the queries and keys of the first attention that is computed, and ends the run there.

    Attributes:
        length: T, the number of tokens.
        seen: queries and keys, (heads, T, D) each; None if no attention was computed.
        first: what all functions before returned for the first token, in their order.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.seen: tuple[Tensor, Tensor] | None = None
        self.first: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if (before := _BEFORE.get(name)) is not None:
            tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
            self._record(*tensors[before : before + 2], transposed=name != "scaled_dot_product_attention")
        result = func(*args, **named)
        if isinstance(result, Tensor) and result.is_floating_point() and list(result.shape).count(self.length) == 1:
            self.first.append(result.detach().movedim(result.shape.index(self.length), 0)[0].flatten().cpu())
        return result

    def _record(self, query: Tensor, key: Tensor, *, transposed: bool) -> None:
        if query.ndim < 3 or key.ndim != query.ndim:
            return
        key = key.transpose(-1, -2) if transposed else key
        if query.shape[-2] == key.shape[-2] == self.length and query.shape[-1] == key.shape[-1] != self.length:
            self.seen = query.detach().flatten(0, -3).cpu(), key.detach().flatten(0, -3).cpu()
            raise _Seen


@dataclass(frozen=True)
class Turning:
    """How the heads of one layer turn.

    Attributes:
        size: D, the number of dimensions of a head.
        pairs: ((a, b), ...), the dimensions of a head that turn together, sorted.
        frequencies: (heads, F) float64, radians per token, one for each pair; 0 in a head whose pair stands. A head
            whose pair is zero throughout, as in sparse weights, gets the frequency of the head with the largest one.
        precision: radians per token up to which a frequency is known, beside `EXACT` of it. A slower pair may look as
            if it stood.
        odd: dimensions that change with the position, but not as one of a turning pair.
        zero: dimensions that are zero in all heads, as in sparse weights, so that nothing can be said of them.
        unexplained: (F,) float64, the part of each pair's change that its turn leaves unexplained.
        rescaled: whether dimensions are multiplied by weights after the turn, by other ones within a pair.
    """

    size: int
    pairs: tuple[tuple[int, int], ...]
    frequencies: Tensor
    precision: float
    odd: tuple[int, ...]
    zero: tuple[int, ...]
    unexplained: Tensor
    rescaled: bool = False

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
    def heads(self) -> tuple[Turning, ...]:
        """How each head turns, where heads turn differently; otherwise empty."""
        if bool(close(self.frequencies, self.frequencies[:1], self.precision).all()):
            return ()
        return tuple(replace(self, frequencies=each[None]) for each in self.frequencies)


def close(measured: Tensor, wanted: Tensor, precision: float, exact: float = EXACT) -> Tensor:
    """Return for each frequency whether it is as wanted, up to `exact` times its value and what can be told."""
    return (measured - wanted).abs() <= exact * wanted.abs() + precision


def fit_turning(states: Tensor, moved: dict[int, Tensor], eps: float, *, rescaled: bool = False) -> Turning:
    """Fit rotations by pairs to the change of queries or keys.

    Args:
        states: (heads, T, D) float64.
        moved: shift in tokens, ascending from 1 -> the states of the same tokens, that many positions later.
        eps: rounding of the numbers.
        rescaled: whether weights may rescale the dimensions after the turn, as a norm of queries does.
    """
    heads, _, size = states.shape
    # A rotation rounds a dimension relative to its pair, a norm after it relative to itself: never to the whole head,
    # whose largest dimensions are thousands of times larger in trained models.
    threshold = 16 * eps * states.abs().amax(1, keepdim=True).clamp(min=1e-300)
    changes = torch.stack([(other - states).abs() / threshold for other in moved.values()]).amax((0, 1, 2))
    zero = tuple((states == 0).all(0).all(0).nonzero().flatten().tolist())
    precision = (4096 if rescaled else 64) * eps / max(moved)
    fit = _fit_rescaled if rescaled else _fit_turns
    fits = [fit(states, other) for other in moved.values()]
    # What a pair leaves unexplained, as a part of the change of its two dimensions.
    change = torch.stack([(other - states).square().sum((0, 1)) for other in moved.values()])
    change = (change[:, :, None] + change[:, None]).clamp(min=1e-300)
    lefts = torch.stack([left.sum(0) for _, left in fits])
    left = lefts.sum(0) / change.sum(0)
    left.fill_diagonal_(math.inf)
    partner = left.argmin(-1).tolist()
    pairs = [
        (a, b)
        for a, b in enumerate(partner)
        if a < b and partner[b] == a and left[a, b] < NOT_A_TURN and max(changes[a], changes[b]) > 1
    ]
    paired = {each for pair in pairs for each in pair}
    # Of a turn at the shift that shows it best: small angles drown in roundings of dimensions, large ones in their own.
    best = (lefts / change).amin(0)
    energy = states.square().sum(1)
    frequencies = []
    for a, b in pairs:
        measured = _frequency({shift: angle[:, a, b] for shift, (angle, _) in zip(moved, fits, strict=True)})
        energy_of_head = energy[:, [a, b]].sum(1)
        frequencies.append(measured.where(energy_of_head > 0, measured[energy_of_head.argmax()]))
    return Turning(
        size,
        tuple(pairs),
        torch.stack(frequencies, -1) if pairs else torch.zeros(heads, 0, dtype=torch.float64),
        precision,
        tuple(each for each in range(size) if each not in paired and changes[each] > 4),
        zero,
        torch.stack([best[pair] for pair in pairs]) if pairs else torch.zeros(0, dtype=torch.float64),
        rescaled,
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
    """How a layer turns its queries and its keys.

    Attributes:
        queries: how it turns queries.
        keys: how it turns keys.
        first: queries and keys (heads, D) of a token at position 0, where a rotation turns by nothing, as they are
            compared; None if the first token was at another position.
        unturned: (N,), the sorted absolute values of all numbers of that token that the layer computed before, if they
            do not depend on the position.
    """

    queries: Turning
    keys: Turning
    first: tuple[Tensor, Tensor] | None
    unturned: Tensor

    def holds(self, values: Tensor) -> bool:
        """Return whether most values are among those that do not depend on the position, up to their signs."""
        wanted = values.abs().flatten()
        if not len(self.unturned) or not len(wanted):
            return False
        above = torch.searchsorted(self.unturned, wanted).clamp(max=len(self.unturned) - 1)
        nearest = [(self.unturned[index] - wanted).abs() for index in (above, (above - 1).clamp(min=0))]
        return bool((torch.minimum(*nearest) <= 1e-6 * wanted).double().mean() >= MOST)


def fingerprint(
    runner: Runner, layers: list[nn.Module], limit: int, last: int | None = None, start: int = 0
) -> dict[int, LayerTurning]:
    """Return layer index -> how the layer turns queries and keys, for layers whose attention could be seen.

    Args:
        runner: runs the model, here in float32 whatever its dtype.
        layers: its decoder layers.
        limit: positions from `start` to `start + limit - 1` are used.
        last: position of one more token behind all others, in every run; None for no such token. A scaling that depends
            on the length then sees one length.
        start: the first position.
    """
    length = next((each for each in LENGTHS if 2 * each <= limit), LENGTHS[-1])
    shifts = [1]
    while shifts[-1] < min(LARGEST_SHIFT, limit - length):
        shifts.append(min(STEP * shifts[-1], LARGEST_SHIFT, limit - length))
    tokens, count = runner.tokens(length), length - (last is not None)
    runs: dict[int, list[_Watch]] = {}
    original: list[LayerCall] = []
    with InFloat32():
        for shift in (0, *shifts):
            positions = runner.positions(length, start + shift)
            if last is not None:
                positions[:, -1] = last
            with recorded(layers) as calls, _ending(layers[-1]):
                runner.at(tokens, positions)
            original = original or calls
            # At once, because code of anybody may keep the positions of its last run.
            runs[shift] = [_watched(*three, length) for three in zip(layers, original, calls, strict=True)]
    found = {}
    for index in range(len(layers)):
        seen = {shift: run[index].seen for shift, run in runs.items()}
        if None in seen.values():
            continue
        sides = [{shift: both[side].double() for shift, both in seen.items() if both} for side in (0, 1)]
        first = (sides[0][0][:, 0], sides[1][0][:, 0])
        queries, keys = (
            _closest(side.pop(0)[:, :count], {shift: each[:, :count] for shift, each in side.items()}) for side in sides
        )
        both_runs = zip(runs[0][index].first, runs[shifts[-1]][index].first, strict=False)
        unturned = torch.cat([torch.zeros(1), *(one.abs().double() for one, other in both_runs if one.equal(other))])
        found[index] = LayerTurning(queries, keys, None if start else first, unturned.unique())
    return found


@contextmanager
def _ending(layer: nn.Module) -> Iterator[None]:
    """End a run of a model where it would enter a layer."""

    def end(layer: nn.Module, args: Any) -> None:
        raise _Seen

    hook = layer.register_forward_pre_hook(end)
    try:
        yield
    except _Seen:
        pass
    finally:
        hook.remove()


def _closest(states: Tensor, moved: dict[int, Tensor]) -> Turning:
    """Fit turns. If they leave odd dimensions, allow for a factor that grows with the position, and for weights.

    Weights near one leave no odd dimension, and yet bend the angles: then the fit that allows for weights explains the
    change far better.
    """
    eps = torch.finfo(torch.float32).eps
    units = _unit(states), {shift: _unit(each) for shift, each in moved.items()}
    best = fit_turning(states, moved, eps)
    for (before, after), rescaled in ((units, False), ((states, moved), True), (units, True)):
        if best.odd:
            other = fit_turning(before, after, eps, rescaled=rescaled)
            best = min(best, other, key=lambda turning: len(turning.odd))
        elif rescaled and bool((best.unexplained > UNEXPLAINED).any()):
            other = fit_turning(before, after, eps, rescaled=True)
            if not other.odd and other.pairs == best.pairs:
                far_better = (best.unexplained > UNEXPLAINED) & (FAR_BETTER * other.unexplained < best.unexplained)
                best = other if bool(far_better.any()) else best
    return best


def _unit(states: Tensor) -> Tensor:
    return states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def _watched(layer: nn.Module, original: LayerCall, moved: LayerCall, length: int) -> _Watch:
    """Return what is seen of a layer on its original hidden states, at the positions of another run."""
    watch = _Watch(length)
    with suppress(_Seen), watch:
        again(layer, moved, original.hidden_states)
    return watch
