"""`choose_pairs`: how much the rotation of each pair of dimensions matters to a base, and schemes without the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..attention_call import Call
from ..errors import UnsupportedModelError
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.obstacles import check_unwrapped
from ..patching.check import to_be_patched
from ..patching.plan import make_plan
from ..schemes.far_rope import BaseAngles
from ..schemes.rope_by_head import RopeByHead
from .checks import check_tokens
from .closed_forms import DistanceSums, mean_factors
from .matching import check_one_of
from .observe import observe
from .pair import TOKENS_AT_ONCE

BY = ("unexplained", "contribution")
"""Numbers by which pairs can be ranked."""

AMONG = ("head", "layer", "model")
"""Sets of pairs of which a share can be kept."""

ByHead = tuple[tuple[tuple[float, ...], ...], ...]
"""A number for each pair: layers of key-value heads of pairs."""


@dataclass(frozen=True)
class PairChoice:
    """The rotated pairs of a model, with two numbers for each. `scheme` keeps the largest. It prints as a table.

    Both numbers are in nats, as scores are, and means over the query heads of a group. The lists have the layers of
    `layers`, their key-value heads, and the pairs of a head from the fastest on.

    - `contribution`: the mean of `|q_u|` times the mean of `|k_u|`, times the scaling of scores: the 2-norm of Ji et
      al. 2025, section 3.1. No score of this pair is on average larger, whatever the angle.
    - `unexplained`: the part of it that a mean rotation leaves over. A pair adds `Re(z e^(i w d))` to a score, with
      `z` the product of query and key, and calibration replaces `e^(i w d)` by its mean `f` over the distances `d` to
      which the head attends. If `z` does not depend on the distance, the mean square of the error is `|z|^2 (1 -
      |f|^2) / 2`. So a slow pair, which turns by little over all that its head attends to, has little unexplained,
      however large its contribution. The number is the contribution times `sqrt(1 - |f|^2)`.

    Attributes:
        layers: indices of the layers that the base rotates.
        every_layer: whether these are all layers with attention.
        contribution: the 2-norm of each pair.
        unexplained: its part that a mean rotation leaves over.
    """

    layers: tuple[int, ...]
    every_layer: bool
    contribution: ByHead
    unexplained: ByHead

    def scheme(self, keep: float, *, by: str = "unexplained", among: str = "head") -> RopeByHead:
        """Return the scheme that rotates a share of the pairs, those with the largest numbers.

        Args:
            keep: share of the pairs to rotate, above 0 and up to 1. Their number is rounded, and at least 1.
            by: the number that ranks pairs, `unexplained` or `contribution`. Take `unexplained` for a model that is
                calibrated.
            among: of what the share is kept: of the pairs of each `head`, as the paper does, of each `layer`, or of the
                `model`. Then heads may keep different numbers of pairs, or none.

        Raises:
            ValueError: for an argument out of range.
        """
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            raise ValueError(f"keep must be a share of the pairs, above 0 and up to 1, not {keep!r}")
        check_one_of("by", by, BY)
        check_one_of("among", among, AMONG)
        numbers: ByHead = getattr(self, by)
        places = [
            (number, place, head, pair)
            for place, layer in enumerate(numbers)
            for head, values in enumerate(layer)
            for pair, number in enumerate(values)
        ]
        columns = {"head": slice(1, 3), "layer": slice(1, 2), "model": slice(0, 0)}[among]
        kept: set[tuple[int, int, int]] = set()
        for _, group in groupby(places, key=lambda each: each[columns]):
            ranked = sorted(group, key=lambda each: -each[0])
            kept |= {(place, head, pair) for _, place, head, pair in ranked[: max(1, round(keep * len(ranked)))]}
        pairs = tuple(
            tuple(tuple(u for u in range(len(values)) if (place, head, u) in kept) for head, values in enumerate(layer))
            for place, layer in enumerate(numbers)
        )
        return RopeByHead(pairs=pairs, layers=None if self.every_layer else self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a row for each layer, with the sums over its heads and pairs."""
        lines = [
            "sums over the pairs of a layer, in nats: contribution, and what a mean rotation leaves unexplained",
            "  layer  pairs  contribution  unexplained",
        ]
        for layer, contribution, unexplained in zip(self.layers, self.contribution, self.unexplained, strict=True):
            count, sums = sum(map(len, contribution)), [sum(map(sum, each)) for each in (contribution, unexplained)]
            lines.append(f"  {layer:>5}  {count:>5}  {sums[0]:>12.3f}  {sums[1]:>11.3f}")
        return "\n".join(lines)


def choose_pairs(model: PreTrainedModel, tokens: Tensor, *, progress: bool = False) -> PairChoice:
    """Measure on given tokens how much the rotation of each pair of dimensions matters to each head.

    `patch_model(model, choose_pairs(model, tokens).scheme(keep=0.5))` then rotates half of the pairs of each head, and
    `calibrate` turns the queries of the others by their mean rotation. The model is read, and stays as it is.

    Args:
        model: an unpatched model that rotates queries and keys, on one device and not wrapped (DDP, FSDP, DeepSpeed).
        tokens: (N, T) int64 or int32: windows of text without padding, up to the length that the base was trained at.
            A few thousand tokens are enough.
        progress: show a progress bar of windows.

    Returns:
        The numbers of each pair, and schemes that keep some of them.

    Raises:
        UnsupportedModelError: if the base does not rotate, if it is wrapped, sharded or offloaded, or if it cannot have
            `rope_by_head`.
        AlreadyPatchedError: if the model is patched.
        ValueError: for tokens that do not fit the model, if its frequencies depend on the length of the context, or if
            its queries or keys are not finite.
    """
    check_unwrapped(model, "choose its pairs")
    with to_be_patched(model):
        base = BaseModel.of(model)
        layers = _rotated_layers(base)
        scheme = RopeByHead(layers=layers)
        make_plan(model, (scheme,), "auto")
        check_tokens(tokens, model, 0)
        angles = {layer: each for layer, each in base.own_angles(scheme).items() if each is not None}
        tokens = tokens.to(next(base.modules.token_embedding.parameters()).device, torch.int64)
        measures = {layer: _Measure(each, base.sizes[layer].num_heads, tokens) for layer, each in angles.items()}
        with evaluation(model), tqdm(total=len(tokens), desc="pairs", unit="window", disable=not progress) as bar:
            for batch in tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1])):
                for layer, seen in observe(model, batch, layers).items():
                    measures[layer].add(seen.call)
                bar.update(len(batch))
    found = [measure.by_key_value_head(base.sizes[layer].num_key_value_heads) for layer, measure in measures.items()]
    contribution, unexplained = zip(*found, strict=True)
    return PairChoice(layers, len(layers) == len(base.sizes), contribution, unexplained)


def _rotated_layers(base: BaseModel) -> tuple[int, ...]:
    """Return the indices of the layers that the base rotates; UnsupportedModelError if there are none."""
    layers = tuple(base.sizes)
    rotated = tuple(layer for layer in layers if base.rotated[layer])
    if not rotated and (own := base.own_scheme(layers)) is not None and own.acts_on.rotations(own):
        return layers  # in its own code
    if not rotated:
        raise UnsupportedModelError(f"{base.name} does not rotate queries and keys, so there are no pairs to choose")
    return rotated


class _Measure:
    """Means over the tokens of one layer."""

    def __init__(self, angles: BaseAngles, heads: int, tokens: Tensor) -> None:
        """Begin without tokens.

        Args:
            angles: how the base rotates the layer.
            heads: H.
            tokens: (N, T) the tokens that will come.
        """
        self.angles = angles
        self.sums = DistanceSums.empty(heads, tokens.shape[1], tokens.device)
        self.count = tokens.numel()
        self.query: Tensor | float = 0.0
        self.key: Tensor | float = 0.0
        self.scaling = 1.0

    def add(self, call: Call) -> None:
        """Add the attention call of a batch."""
        self.sums.add(call, call)
        self.query = self.query + self._norms(call.query)
        self.key = self.key + self._norms(call.key)
        self.scaling = call.scaling

    def _norms(self, x: Tensor) -> Tensor:
        """Return the sums over tokens of the norm of each pair, (H|K, pairs) float64, of queries or keys."""
        count, pair_of = len(self.angles.frequencies), self.angles.pair_of(x.shape[-1])
        place = torch.tensor([count if pair is None else pair for pair in pair_of], device=x.device)
        squares = x.new_zeros(*x.shape[:-1], count + 1, dtype=torch.float64)
        squares.index_add_(-1, place, x.double().square())
        return squares[..., :count].sqrt().sum((0, 2))

    def by_key_value_head(self, heads: int) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        """Return the contribution and the unexplained part of each pair, means over the groups of K `heads`."""
        assert isinstance(self.query, Tensor)
        assert isinstance(self.key, Tensor)
        groups = len(self.query) // len(self.key)
        contribution = self.scaling * self.query * self.key.repeat_interleave(groups, 0) / self.count**2
        frequencies = torch.tensor(self.angles.frequencies, dtype=torch.float64, device=contribution.device)
        turns = torch.arange(self.sums.mass.shape[1], device=contribution.device)[:, None] * frequencies
        factors = mean_factors(self.sums.mass, turns.cos(), turns.sin())
        unexplained = contribution * (1 - factors.abs().square()).clamp(min=0).sqrt()
        if not torch.isfinite(unexplained).all():
            raise ValueError("queries or keys of this model are NaN or infinite: look for weights that are not finite")
        return _listed(contribution, heads), _listed(unexplained, heads)


def _listed(values: Tensor, heads: int) -> tuple[tuple[float, ...], ...]:
    """Return the means over the query heads of each group, from values (H, pairs)."""
    means: Sequence[Sequence[float]] = values.unflatten(0, (heads, -1)).mean(1).tolist()
    return tuple(tuple(head) for head in means)
