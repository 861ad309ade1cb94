"""Closed forms: what a base's positions do to scores on average, put into a scheme's parameters and into queries."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..call import Call
from ..forms import Bias, Factors, Slopes
from ..patching.plan import BaseModel
from ..upstream.rotary import by_pair
from .maps import parts, rows_of

TAIL = 4
"""A curve is fitted to this many times the distances that were seen; what was not seen goes on as it ended."""

TAIL_WEIGHT = 1e-3
"""Weight of a distance that was not seen, relative to the mean weight of those that were."""


@dataclass
class Averages:
    """Sums over pairs of a query and a visible key, by distance, of one layer.

    Attributes:
        pairs: (T,) number of pairs.
        difference: (H, T) sum of the base's score minus `q . k` of the scheme's queries and keys.
        product: (H, T) sum of the base's score times that `q . k`, clipped at 0 if the scheme clips it.
        square: (H, T) sum of its squares.
        mass: (H, T) sum of the base's attention weights.
    """

    pairs: Tensor
    difference: Tensor
    product: Tensor
    square: Tensor
    mass: Tensor

    @classmethod
    def none(cls, heads: int, distances: int, device: torch.device) -> Averages:
        """Return sums over nothing."""
        pairs = torch.zeros(distances, dtype=torch.float64, device=device)
        return cls(pairs, *(torch.zeros(heads, distances, dtype=torch.float64, device=device) for _ in range(4)))

    @torch.no_grad()
    def add(self, base: Call, scheme: Call, *, relu: bool = False) -> None:
        """Add the pairs of a batch.

        Args:
            base: what the base's attention was asked.
            scheme: what the scheme's is on the same hidden states.
            relu: whether the scheme clips negative `q . k`.
        """
        for part in parts(base):
            theirs, ours = rows_of(base, part), rows_of(scheme, part, content=True)
            shape = theirs.scores.shape
            visible = theirs.visible.expand(shape)
            at = theirs.distance.expand(shape).transpose(0, 1).flatten(1).long()  # (H, B R L)
            s, n, w = (
                each.double().masked_fill(~visible, 0.0).transpose(0, 1).flatten(1)
                for each in (theirs.scores, ours.scores, theirs.log_weights()[..., : shape[-1]].exp())
            )
            self.pairs.index_add_(0, at[0], visible[:, 0].double().flatten())
            clipped = n.clamp(min=0) if relu else n
            for sums, values in (
                (self.difference, s - n),
                (self.product, s * clipped),
                (self.square, clipped * clipped),
                (self.mass, w),
            ):
                sums.scatter_add_(1, at, values)

    @property
    def mean_difference(self) -> Tensor:
        """The base's score minus `q . k`, the mean by distance, (H, T)."""
        return self.difference / self.pairs.clamp(min=1)


def curve(module: Any, like: Tensor, count: int) -> Tensor | None:
    """Return a module's bias, or factor, of the distances 0, 1, ..., (H, count); None if it has no such curve."""
    form = module.form(like)
    return form.table(count) if isinstance(form, (Bias, Slopes, Factors)) else None


def target_of(module: Any, like: Tensor, averages: Averages) -> tuple[Tensor, Tensor]:
    """Return the curve that would serve the averages best, and what each of its numbers weighs, (H, T) each.

    A bias: the mean of what the base's positions add. A factor: least squares of the base's score by it times `q . k`.
    """
    if isinstance(module.form(like), Factors):
        return averages.product / averages.square.clamp(min=1e-12), averages.square
    return averages.mean_difference, averages.pairs.expand_as(averages.difference)


def fit(module: nn.Module, like: Tensor, targets: list[tuple[Tensor, Tensor]]) -> None:
    """Fit a module's parameters to curves, by least squares of float64; a bias may differ by a constant of the head.

    Args:
        module: a scheme's, with a bias or factor by distance.
        like: has the device, and the dtype beside which positions are computed.
        targets: curve and weights, (H, T) each, one pair for each layer that the module serves.
    """
    owner: Any = copy.deepcopy(module).double()
    parameters = [each for each in owner.parameters() if each.requires_grad]
    if not parameters:
        return
    wide = like.double()
    added = not isinstance(owner.form(wide), Factors)
    seen = targets[0][0].shape[1]
    curves = torch.stack([_continued(target) for target, _ in targets])
    weights = torch.stack([_with_tail(weight) for _, weight in targets])
    weights = weights / weights.sum(-1, keepdim=True)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        off = owner.form(wide).table(seen * TAIL) - curves
        if added:  # which the softmax does not see
            off = off - (weights * off).sum(-1, keepdim=True)
        value = (weights * off.square()).sum()
        value.backward()
        return value

    optimizer.step(loss)
    kept = [each.detach().clone() for each in module.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), owner.parameters(), strict=True):
            mine.copy_(theirs)
        found: Any = module
        if not torch.isfinite(found.form(like).table(seen * TAIL)).all():  # the search ran off to infinity
            for mine, before in zip(module.parameters(), kept, strict=True):
                mine.copy_(before)


def _continued(target: Tensor) -> Tensor:
    """Return a curve (H, T) with a tail that goes on as it ends, (H, TAIL * T)."""
    seen = target.shape[1]
    end = target[:, -max(1, seen // 4) :].mean(-1, keepdim=True)
    return torch.cat([target, end.expand(-1, seen * (TAIL - 1))], -1)


def _with_tail(weight: Tensor) -> Tensor:
    tail = TAIL_WEIGHT * weight.mean(-1, keepdim=True)
    return torch.cat([weight, tail.expand(-1, weight.shape[1] * (TAIL - 1))], -1)


# ------------------------------------------------------------------------------------------------------------ queries


@dataclass(frozen=True)
class Turn:
    """The mean rotation of each head and pair, which can be put into the projection that makes queries.

    Attributes:
        projection: makes the queries, rows in the order of heads.
        factors: (H, pairs) complex.
        size: D.
        interleaved: whether neighbouring dimensions are a pair, and not `(u, u + R/2)`.
    """

    projection: nn.Linear
    factors: Tensor
    size: int
    interleaved: bool

    @torch.no_grad()
    def apply(self, heads: Tensor) -> None:
        """Turn the rows of some heads, bool (H,)."""
        pairs = self.factors.shape[1]
        order = torch.arange(2 * pairs)
        real, imaginary = (order[::2], order[1::2]) if self.interleaved else (order[:pairs], order[pairs:])
        tensors = [self.projection.weight] + ([] if self.projection.bias is None else [self.projection.bias])
        for tensor in tensors:
            rows = tensor.view(-1, self.size, *tensor.shape[1:])
            for head in heads.nonzero()[:, 0].tolist():
                factor = self.factors[head].to(tensor.device)
                shape = (-1, *([1] * (tensor.ndim - 1)))
                re, im = (each.view(shape) for each in (factor.real, factor.imag))
                a, b = rows[head, real].double(), rows[head, imaginary].double()
                rows[head, real] = (re * a - im * b).to(tensor.dtype)
                rows[head, imaginary] = (im * a + re * b).to(tensor.dtype)


def turn_of(base: BaseModel, layer: int, rotary: nn.Module, mass: Tensor, kind: str | None) -> Turn | None:
    """Return the mean rotation of a layer's heads, weighted by where the base attends to; None if queries hide it.

    `sum_d mass(d) e^(i w d)` of each pair with angle `w` per token: what the rotation does on average to the product of
    a pair. It goes into the projection where that alone makes the queries: not through a norm, a fused or a latent
    projection.

    Args:
        base: the model.
        layer: index.
        rotary: the base's rotary module.
        mass: (H, T) attention weights of the base by distance.
        kind: layer type, for a rotary module that asks for it.
    """
    attention: Any = base.found.attention_of[layer]
    dims, projection = base.sizes[layer], getattr(base.found.attention_of[layer], "q_proj", None)
    normed = any("norm" in name and name.startswith(("q_", "qk_", "query_")) for name, _ in attention.named_children())
    if not isinstance(projection, nn.Linear) or normed or base.family.rotary_part is not None:
        return None
    if projection.out_features != dims.num_heads * dims.head_dim:
        return None
    distances = torch.arange(mass.shape[1], device=mass.device)
    turned = rotary(
        projection.weight.new_empty(0, dtype=torch.float32), distances[None], *(() if kind is None else (kind,))
    )
    cos, sin = (each[0].double() for each in by_pair(turned, base.family.angles))
    share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-12)
    factors = torch.complex(share @ cos, share @ sin) * torch.hypot(cos[0], sin[0])  # queries and keys both have it
    return Turn(projection, factors, dims.head_dim, base.pairs == "interleaved")
