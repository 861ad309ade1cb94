"""`choose_pairs`: how much the rotation of each pair of dimensions matters to a base, and schemes without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
from .observe import observe, parts, rows_of
from .pair import TOKENS_AT_ONCE, kl_of_rows

AMONG = ("head", "layer", "model")
"""Sets of pairs of which a share can be kept."""

UNEXPLAINED = "unexplained"

ByHead = tuple[tuple[tuple[float, ...], ...], ...]
"""A number for each pair: layers of key-value heads of pairs."""


@dataclass(frozen=True)
class PairChoice:
    """The rotated pairs of a model, with a number for each. `scheme` keeps the largest. It prints as a table.

    The numbers are means over the query heads of a group, in nats:

    - `divergence`: KL divergence of the head's attention from the base's if this pair alone stops, per query.
    - `contribution`: the mean of `|q_u|` times the mean of `|k_u|`, times the scaling of scores: the 2-norm of Ji et
      al. 2025, section 3.1. A score gets no more from this pair, if norms are the mean ones.
    - `unexplained`: the part of the contribution that a mean rotation leaves over. The pair adds `Re(z e^(i w d))` to a
      score, with `z` the product of query and key. Calibration replaces `e^(i w d)` by its mean `f` over the distances
      `d` to which the head attends. Where `z` does not depend on the distance, the mean of `|z e^(i w d) - z f|^2` is
      `|z|^2 (1 - |f|^2)`. So the number is the contribution times `sqrt(1 - |f|^2)`. A slow pair has little unexplained
      if it hardly turns over all that its head attends to.

    Attributes:
        by: name of the number.
        layers: indices of the layers that the base rotates.
        every_layer: whether these are all layers with attention.
        numbers: the number of each pair, by layer of `layers`, key-value head and pair. Pair 0 is the fastest.
    """

    by: str
    layers: tuple[int, ...]
    every_layer: bool
    numbers: ByHead

    def scheme(self, keep: float, *, among: str = "model") -> RopeByHead:
        """Return the scheme that rotates a share of the pairs, those with the largest numbers.

        Args:
            keep: share of the pairs to rotate, above 0 and up to 1. Their number is rounded, and at least 1.
            among: of what the share is kept: of the pairs of the `model`, of each `layer`, or of each `head`, as the
                paper does. Only with `head` do all heads keep as many.

        Raises:
            ValueError: for an argument out of range.
        """
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            raise ValueError(f"keep must be a share of the pairs, above 0 and up to 1, not {keep!r}")
        check_one_of("among", among, AMONG)
        places = [
            (number, place, head, pair)
            for place, layer in enumerate(self.numbers)
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
            for place, layer in enumerate(self.numbers)
        )
        return RopeByHead(pairs=pairs, layers=None if self.every_layer else self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a row for each layer: the sum over its heads of each pair's number."""
        lines = [f"{self.by} of each pair, from the fastest on: sums over the key-value heads, in nats", "  layer"]
        for layer, heads in zip(self.layers, self.numbers, strict=True):
            lines.append(f"  {layer:>5}  " + " ".join(f"{sum(each):.3g}" for each in zip(*heads, strict=True)))
        return "\n".join(lines)


def choose_pairs(
    model: PreTrainedModel, tokens: Tensor, *, by: str = "divergence", progress: bool = False
) -> PairChoice:
    """Measure on given tokens how much the rotation of each pair of dimensions matters to each head.

    `patch_model(model, choose_pairs(model, tokens).scheme(0.75))` then rotates three quarters of the pairs, and
    `calibrate` turns the queries of the others by their mean rotation. The model is read, and stays as it is. By
    `divergence` the attention of each layer is computed once for each pair of a head.

    Args:
        model: an unpatched model that rotates queries and keys, on one device and not wrapped (DDP, FSDP, DeepSpeed).
        tokens: (N, T) int64 or int32: windows of text without padding, up to the length that the base was trained at.
            A few thousand tokens are enough.
        by: the number to measure: `divergence`, `unexplained` or `contribution`, see `PairChoice`.
        progress: show a progress bar of windows.

    Returns:
        The numbers of each pair, and schemes that keep some of them.

    Raises:
        UnsupportedModelError: if the base does not rotate, if it is wrapped, sharded or offloaded, or if it cannot have
            `rope_by_head`; by `unexplained`, if its positions have several coordinates.
        AlreadyPatchedError: if the model is patched.
        ValueError: for an argument out of range, for tokens that do not fit the model, if its frequencies depend on the
            length of the context, or if its queries or keys are not finite.
    """
    check_one_of("by", by, tuple(MEASURES))
    check_unwrapped(model, "choose its pairs")
    with to_be_patched(model):
        base = BaseModel.of(model)
        layers = _rotated_layers(base)
        if by == UNEXPLAINED and base.rotation.coordinates:
            raise UnsupportedModelError(
                f"by={UNEXPLAINED!r} needs one distance for two tokens, and positions of {base.name} have several "
                f"coordinates: choose from {', '.join(each for each in MEASURES if each != UNEXPLAINED)}"
            )
        scheme = RopeByHead(layers=layers)
        make_plan(model, (scheme,), "auto")
        check_tokens(tokens, model, 0)
        angles = {layer: each for layer, each in base.own_angles(scheme).items() if each is not None}
        tokens = tokens.to(next(base.modules.token_embedding.parameters()).device, torch.int64)
        measures = {layer: MEASURES[by](each, base.sizes[layer].num_heads, tokens) for layer, each in angles.items()}
        with evaluation(model), tqdm(total=len(tokens), desc="pairs", unit="window", disable=not progress) as bar:
            for batch in tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1])):
                for layer, seen in observe(model, batch, layers).items():
                    measures[layer].add(seen.call)
                bar.update(len(batch))
    numbers = []
    for layer, measure in measures.items():
        values = measure.numbers()
        if not torch.isfinite(values).all():
            raise ValueError(f"attention of layer {layer} is NaN or infinite: look for weights that are not finite")
        of_heads = values.unflatten(0, (base.sizes[layer].num_key_value_heads, -1)).mean(1)
        numbers.append(tuple(tuple(head) for head in of_heads.tolist()))
    return PairChoice(by, layers, len(layers) == len(base.sizes), tuple(numbers))


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
    """The number of each pair of one layer, from the calls of its attention."""

    def __init__(self, angles: BaseAngles, heads: int, tokens: Tensor) -> None:
        """Begin without calls.

        Args:
            angles: how the base rotates the layer.
            heads: H.
            tokens: (N, T) the tokens whose calls will come.
        """
        self.angles = angles
        self.shape = tokens.shape
        self.sums = torch.zeros(heads, len(angles.frequencies), dtype=torch.float64, device=tokens.device)

    def add(self, call: Call) -> None:
        """Add the call of a batch, whose queries and keys are rotated."""
        raise NotImplementedError(type(self).__name__)

    def numbers(self) -> Tensor:
        """Return the numbers, (H, pairs) float64."""
        return self.sums / self.shape.numel()


class _Divergence(_Measure):
    """`divergence`, see `PairChoice`."""

    @torch.no_grad()
    def add(self, call: Call) -> None:
        """Add a call, see `_Measure.add`."""
        positions = torch.arange(self.shape[1], device=call.query.device)[None]
        # Rotated back. The factor (YaRN's) stays on pairs that stop.
        query, key = (self.angles.rotate(x, -positions) / self.angles.factor for x in (call.query, call.key))
        for part in parts(call):
            rows = rows_of(call, part)
            for pair, dimensions in enumerate(self.angles.dimensions):
                here = torch.zeros(query.shape[-1], dtype=torch.bool, device=query.device)
                here[list(dimensions)] = True
                stopped = torch.where(here, query, call.query), torch.where(here, key, call.key)
                without = replace(call, query=stopped[0], key=stopped[1])
                self.sums[:, pair] += kl_of_rows(rows, without, part).sum((0, 2))


class _Contribution(_Measure):
    """`contribution`, see `PairChoice`."""

    def __init__(self, angles: BaseAngles, heads: int, tokens: Tensor) -> None:
        """Begin without calls, see `_Measure`."""
        super().__init__(angles, heads, tokens)
        self.keys = torch.zeros_like(self.sums)
        self.scaling = 1.0

    def add(self, call: Call) -> None:
        """Add a call, see `_Measure.add`."""
        self.sums += self._norms(call.query)
        self.keys += self._norms(call.key).repeat_interleave(call.groups, 0)
        self.scaling = call.scaling

    def _norms(self, x: Tensor) -> Tensor:
        """Return the sums over tokens of the norm of each pair, (H|K, pairs), of queries or keys."""
        return x.double()[..., torch.tensor(self.angles.dimensions)].norm(dim=-1).sum((0, 2))

    def numbers(self) -> Tensor:
        """Return the numbers, see `_Measure.numbers`."""
        return self.scaling * self.sums * self.keys / self.shape.numel() ** 2


class _Unexplained(_Contribution):
    """`unexplained`, see `PairChoice`."""

    def __init__(self, angles: BaseAngles, heads: int, tokens: Tensor) -> None:
        """Begin without calls, see `_Measure`."""
        super().__init__(angles, heads, tokens)
        self.by_distance = DistanceSums.empty(heads, self.shape[1], tokens.device)

    def add(self, call: Call) -> None:
        """Add a call, see `_Measure.add`."""
        super().add(call)
        self.by_distance.add(call, call)

    def numbers(self) -> Tensor:
        """Return the numbers, see `_Measure.numbers`."""
        frequencies = torch.tensor(self.angles.frequencies, dtype=torch.float64, device=self.sums.device)
        angles = torch.arange(self.shape[1], device=self.sums.device)[:, None] * frequencies
        factors = mean_factors(self.by_distance.mass, angles.cos(), angles.sin())
        return super().numbers() * (1 - factors.abs().square()).clamp(min=0).sqrt()


MEASURES: Mapping[str, type[_Measure]] = {
    "divergence": _Divergence,
    UNEXPLAINED: _Unexplained,
    "contribution": _Contribution,
}
"""Name of a number -> how it is measured."""
