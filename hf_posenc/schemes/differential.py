"""Differential attention: the weights of one head less those of another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import QueryModule, parameter
from ..core.registry import register_scheme
from .base import WeightScheme, init

EACH, PAIRS = "each", "pairs"

KINDS = (EACH, PAIRS)
"""Values of `kind`."""

EPS = 1e-5
"""Added to the mean square in the norm of a pair."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Differential(WeightScheme):
    """Weights of a head less a part of its partner's, beside a layer's positions. It starts without the difference.

    Equation: with the heads `2n` and `2n + 1` as partners and their softmax weights `A`, by `kind`

    - `each`: the weights of every head are `A_h - lambda_h A_partner`;
    - `pairs`: both heads have the weights `A_2n - lambda_n A_(2n+1)`, each for its own values. Their outputs are
      divided by the root of their mean square over both, and multiplied by a number that starts at `1 - start`.

    Neutral start: `each` with `start=0`, its default, changes nothing. `pairs` has none: it gives up every second map.
    Beyond the training length: no limit; it does not depend on positions.
    Deviations: `lambda` itself is trained, one number per head or pair. The paper makes one number per layer of four
    vectors, and starts it at `0.8 - 0.6 exp(-0.3 l)` in layer `l`, the default of `pairs`. Its norm has a weight for
    each dimension, and a fixed factor `1 - start`; here one number per pair is both.
    Source: Ye, Dong, Xia et al. 2024, arXiv:2410.05258.

    Args:
        kind: `each` or `pairs`.
        start: start of `lambda`, at least 0 and below 1; None means 0 for `each`, and the paper's for `pairs`.
    """

    name: ClassVar[str] = "differential"
    kind: str = EACH
    start: float | None = None

    def __post_init__(self) -> None:
        self.one_of("kind", KINDS)
        if self.start is not None:
            self.number("start", lambda start: 0 <= start < 1, "at least 0 and below 1")

    def check(self, dims: Dims) -> None:
        """Raise ValueError unless every head has a partner."""
        if dims.num_heads % 2:
            raise ValueError(f"differential: {dims.num_heads} heads are no pairs")

    def build(self, dims: Dims) -> QueryModule:
        by_depth = 0.8 - 0.6 * math.exp(-0.3 * dims.layer) if self.kind == PAIRS else 0.0
        return Difference(dims.num_heads, by_depth if self.start is None else self.start, pairs=self.kind == PAIRS)


class Difference(QueryModule):
    """The module of `differential`: `factor`, the `lambda`, (H,), or (H / 2,) for pairs, and their `scale` (H / 2,)."""

    def __init__(self, num_heads: int, start: float, *, pairs: bool) -> None:
        """Make the factors.

        Args:
            num_heads: H.
            start: their start.
            pairs: whether both heads of a pair have the same weights.
        """
        super().__init__()
        self.start = start
        self.factor = parameter(num_heads // 2 if pairs else num_heads)
        self.scale = parameter(num_heads // 2) if pairs else None

    def reset_parameters(self) -> None:
        """Start at the start of the scheme."""
        init.constant_(self.factor, self.start)
        if self.scale is not None:
            init.constant_(self.scale, 1 - self.start)

    def forward(self, call: Call) -> Call:
        scale = self.scale
        factor = self.factor.view(1, -1, 2 if scale is None else 1, 1, 1)

        def differ(weights: Tensor) -> Tensor:
            pairs = weights.unflatten(1, (-1, 2))
            kept, less = (pairs, pairs.flip(2)) if scale is None else (pairs[:, :, :1], pairs[:, :, 1:])
            return (kept - factor.to(weights.dtype) * less).expand_as(pairs).flatten(1, 2)

        changed = replace(call, weight_changes=(*call.weight_changes, differ))
        if scale is None:
            return changed

        def norm(output: Tensor) -> Tensor:
            pairs = output.float().unflatten(2, (-1, 2)) if output.itemsize < 4 else output.unflatten(2, (-1, 2))
            size = (pairs.square().mean((-2, -1), keepdim=True) + EPS).sqrt()
            return (scale.to(pairs.dtype).view(-1, 1, 1) * pairs / size).flatten(2, 3).to(output.dtype)

        return replace(changed, output_changes=(*call.output_changes, norm))
