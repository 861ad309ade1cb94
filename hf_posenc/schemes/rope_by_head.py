"""RoPE in which each key-value head rotates pairs of its own choice."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import ScoreModule
from ..core.registry import register_scheme
from .base import RotatedScheme
from .far_rope import BaseAngles, Rotated

Pairs = tuple[int, ...]
PairsByHead = tuple[tuple[Pairs, ...], ...]
"""Layers of key-value heads of pairs."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class RopeByHead(RotatedScheme):
    """The base's rotation in some pairs of each head; the other pairs stay unrotated. Keys are cached unrotated.

    Equation: for the pairs `u` that key-value head `h` lists, `q'_t = R(t w_u) q_t` and `k'_t = R(t w_u) k_t`, with the
    base's frequencies; for all others `q'_t = q_t` and `k'_t = k_t` (section 3.1, partial RoPE). The query heads of a
    group have the pairs of their key-value head.
    Beyond the training length: no limit, as `rope`. Fewer pairs get angles that they never saw.
    Deviations: the paper goes on to compress the unrotated dimensions of keys, together with the values. Here they stay
    as they are. A factor of the base on cosines and sines (YaRN's) stays on all pairs that the base rotates.
    Source: Ji et al. 2025, arXiv:2502.14837.

    Frequencies, rotated dimensions and YaRN's factor are the base's own, layer by layer. Layers that the base does not
    rotate stay unrotated. A base without rotation gets that of `rope`. With all pairs, a float32 model with `sdpa` on a
    CPU computes the bits of the base's attention. Bases whose frequencies depend on the length of the context are
    refused.

    Args:
        pairs: the pairs that are rotated, counted from 0, the fastest. A list of numbers is for every head. A list of
            lists of lists gives them by layer of the scheme and key-value head: `[[[0, 1], [3]], [[], [0, 2]]]` for two
            layers with two heads. None means all.
    """

    name: ClassVar[str] = "rope_by_head"
    known_as: ClassVar[Mapping[str, str]] = {
        name: "rope_by_head with pairs=[...]" for name in ("partial_rope", "mha2mla", "pair_choice")
    }
    pairs: Pairs | PairsByHead | None = None

    def __post_init__(self) -> None:
        """Check the shape of the lists, and sort each. The base decides which pairs there are."""
        if self.pairs is None:
            return
        by_head = isinstance(self.pairs, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in self.pairs)
        try:
            checked = _checked(self.pairs, 3 if by_head else 1)
        except TypeError:
            raise TypeError(
                "rope_by_head: pairs must be a list of integers for every head, or lists by layer and key-value head "
                f"as [[[0, 1], [3]]], or None for all pairs, not {self.pairs!r}"
            ) from None
        object.__setattr__(self, "pairs", checked)
        if not any(head for layer in self.by_head or (self.of_layer(0),) for head in layer):
            raise ValueError("rope_by_head: pairs lists none, so that nothing would be rotated: take nope")

    def __str__(self) -> str:
        """Return the scheme as text, with the number of pairs in place of lists by head."""
        if self.by_head is None:
            return super().__str__()
        heads = [head for layer in self.by_head for head in layer]
        counted = f"pairs=[{sum(map(len, heads))} in {len(heads)} heads]"
        return str(replace(self, pairs=None)).replace("pairs=None", counted)

    @property
    def by_head(self) -> PairsByHead | None:
        """The pairs by layer and key-value head, or None if all heads have the same."""
        pairs: Any = self.pairs
        return pairs if pairs and isinstance(pairs[0], tuple) else None

    def of_layer(self, number: int) -> tuple[Pairs, ...]:
        """Return the pairs of each key-value head, or one tuple for all heads, or no tuple for all pairs.

        Args:
            number: place of the layer among the scheme's layers, from 0.
        """
        pairs: Any = self.pairs
        if pairs is None:
            return ()
        return (pairs,) if self.by_head is None else self.by_head[number]

    def turns(self, number: int) -> bool:
        """Return whether a head of a layer lists any pair, see `RotatedScheme.turns`."""
        return self.by_head is None or any(self.by_head[number])

    def with_base(
        self, length: int | None, angles: Mapping[int, BaseAngles | None], sizes: Mapping[int, Dims]
    ) -> RopeByHead:
        """Return the scheme, after comparing its lists with the base, see `RotatedScheme.with_base`.

        Raises:
            ValueError: if the lists are too many or too few, or the base has no such pair.
        """
        if self.by_head is not None and len(self.by_head) != len(angles):
            raise ValueError(
                f"rope_by_head: pairs has lists for {len(self.by_head)} layers, and the scheme is in {len(angles)}: "
                f"{', '.join(map(str, angles))}"
            )
        for number, (layer, each) in enumerate(angles.items()):
            heads, count = self.of_layer(number), 0 if each is None else len(each.frequencies)
            if self.by_head is not None and len(heads) != sizes[layer].num_key_value_heads:
                raise ValueError(
                    f"rope_by_head: pairs has lists for {len(heads)} heads in layer {layer}, which has "
                    f"{sizes[layer].num_key_value_heads} key-value heads"
                )
            unknown = [u for head in heads for u in head if u >= count]
            if unknown and (count or self.by_head is not None):
                reason = f"its pairs are 0 to {count - 1}" if count else "the base leaves it unrotated"
                raise ValueError(f"rope_by_head: layer {layer} has no pair {unknown[0]} to rotate: {reason}")
        return self

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of the first layer, with the rotation of `rope`."""
        return self.build_at(0, dims, BaseAngles.of_head(dims.head_dim))

    def build_at(self, number: int, dims: Dims, angles: BaseAngles | None) -> ScoreModule:
        """Return the module of one layer, see `RotatedScheme.build_at`."""
        return RotationByHead(angles, self.of_layer(number), dims)


def _checked(pairs: Any, depth: int) -> Any:
    """Return nested lists of pairs as tuples, the innermost sorted.

    Raises:
        TypeError: if they are not as deep.
        ValueError: if a pair is negative, or listed twice.
    """
    if not isinstance(pairs, (list, tuple)):
        raise TypeError
    if depth > 1:
        return tuple(_checked(each, depth - 1) for each in pairs)
    if any(isinstance(each, bool) for each in pairs):
        raise TypeError
    numbers = sorted(map(operator.index, pairs))
    if numbers and numbers[0] < 0:
        raise ValueError(f"rope_by_head: pairs are counted from 0, and {numbers[0]} is below")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"rope_by_head: pairs={pairs!r} lists a pair twice")
    return tuple(numbers)


class RotationByHead(Rotated):
    """The module of one layer, without parameters."""

    real = True

    def __init__(self, angles: BaseAngles | None, pairs: tuple[Pairs, ...], dims: Dims) -> None:
        """Choose the dimensions that are rotated.

        Args:
            angles: the rotation of the base, or None where it does not rotate.
            pairs: the pairs of each key-value head, or one tuple for all heads; nothing for all pairs.
            dims: sizes of the attention.
        """
        super().__init__(angles)
        count = 0 if angles is None else len(angles.frequencies)
        self.chosen = tuple(tuple(u in head for u in range(count)) for head in pairs or (range(count),))
        self.kept: tuple[tuple[bool, ...], ...] | None = None
        """For each list of pairs, whether each dimension is as the base rotates it. None if all are."""
        if angles is not None and not all(map(all, self.chosen)):
            still = [
                {d for u, both in enumerate(angles.dimensions) if not head[u] for d in both} for head in self.chosen
            ]
            self.kept = tuple(tuple(d not in of_head for d in range(dims.head_dim)) for of_head in still)

    def rotates(self, heads: int) -> Tensor:
        """Return which pairs are rotated, see `ScoreModule.rotates`."""
        return torch.tensor(self.chosen).repeat_interleave(heads // len(self.chosen), 0)

    def turned(self, call: Call, angles: BaseAngles) -> Call:
        """Return a call whose queries and keys are rotated in the listed pairs."""
        rotated = super().turned(call, angles)
        if self.kept is None:
            return rotated
        kept = torch.tensor(self.kept, device=call.query.device)

        def chosen(part: str) -> Tensor:
            x = getattr(call, part)
            here = kept.repeat_interleave(x.shape[1] // len(kept), 0)[:, None]
            return torch.where(here, getattr(rotated, part), x * angles.factor)

        return replace(rotated, query=chosen("query"), key=chosen("key"))
