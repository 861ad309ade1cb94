"""`choose_layers` and `choose_pairs`: where a base loses least when its positions are swapped.

`choose_layers` ranks the layers by what a swap of each costs. `choose_pairs` measures how much the rotation of each
pair of dimensions matters, and makes schemes without the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..api import parse_schemes, patch_model
from ..core.attention_call import Call
from ..core.errors import UnsupportedModelError
from ..core.measurement import Result
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.logits import IGNORED
from ..model.obstacles import to_be_changed
from ..patching.plan import make_plan
from ..schemes.base import Scheme
from ..schemes.far_rope import BaseAngles
from ..schemes.rope_by_head import RopeByHead
from .calibrate import calibrate
from .checks import TOKENS_AT_ONCE, check_head, check_positive, mean_loss, split_tokens
from .matching import Matching
from .observe import observe, parts, rows_of
from .pair import kl_of_rows

ByHead = tuple[tuple[tuple[float, ...], ...], ...]
"""A number for each pair: layers of key-value heads of pairs."""


@dataclass(frozen=True)
class LayerCost(Result):
    """What a swap of one layer costs, on the held-out windows.

    Attributes:
        layer: index of the layer.
        loss: the loss of the next token with this layer swapped, less the base's, in nats.
        recall: the same difference on the second copy of a passage that the model has just read. For a layer that looks
            up the first copy (as induction heads do) it is larger than `loss`.
        divergence: mean KL divergence of the layer's attention from the base's, in nats per query and head.
    """

    layer: int
    loss: float
    recall: float
    divergence: float


@dataclass(frozen=True)
class LayerChoice(Result):
    """The layers of a model, ranked by what a swap costs. It prints as a table.

    Attributes:
        scheme: the scheme, as text.
        base_loss: held-out loss of the base, in nats per token.
        base_recall: loss of the base on the second copies, in nats per token.
        costs: one entry for each layer that can be the only one with the scheme, sorted by `loss + recall`, the
            cheapest first.
        refused: index of a layer that cannot be the only one with the scheme -> the reason.
    """

    scheme: str
    base_loss: float
    base_recall: float
    costs: tuple[LayerCost, ...]
    refused: Mapping[int, str] = field(default_factory=dict)

    def cheapest(self, count: int) -> tuple[int, ...]:
        """Return the indices of the cheapest layers in increasing order, to pass as `layers=` of the scheme.

        Args:
            count: number of layers, from 1 to the number of ranked layers.

        Raises:
            ValueError: if `count` is out of this range.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(self.costs):
            raise ValueError(f"count must be an integer from 1 to {len(self.costs)}, the ranked layers, not {count!r}")
        return tuple(sorted(each.layer for each in self.costs[:count]))

    def __str__(self) -> str:
        """Return the losses of the base and a row for each layer, the cheapest first."""
        lines = [
            f"{self.scheme} in one layer: losses above the base's (nats), the cheapest layer first",
            f"  the base's loss (nats): {self.base_loss:.3f}; on repeated text {self.base_recall:.3f}",
            "  layer      loss    recall  divergence",
        ]
        lines += [
            f"  {each.layer:>5}  {each.loss:>+8.4f}  {each.recall:>+8.4f}  {each.divergence:>10.4f}"
            for each in self.costs
        ]
        lines += [f"  {layer:>5}  left out: {reason}" for layer, reason in self.refused.items()]
        return "\n".join(lines)


def choose_layers(
    model: PreTrainedModel,
    tokens: Tensor,
    scheme: str | Scheme = "nope",
    *,
    held_out: int | None = None,
    closed_windows: int | None = None,
    matching: Matching | None = None,
    seed: int = 0,
    progress: bool = False,
    **hyperparameters: object,
) -> LayerChoice:
    """Rank the layers of a model by what a swap of each layer alone costs.

    The scheme is put into one layer of a copy and calibrated there, and the losses of this copy are compared with the
    base's. The copy is a second model in memory; the model stays as it is. Swapping several layers together can cost
    more than the sum of their costs, because one layer can do the work of another. So measure the set of layers that
    you choose.

    Args:
        model: an unpatched model with a language-model head, on one device and not wrapped (DDP, FSDP, DeepSpeed).
        tokens: (N, T) int64 or int32, as for `calibrate`: at least `held_out + 1` windows of text without padding, up
            to the length that the base was trained at. T is at least 4.
        scheme: a name, or a `Scheme` instance without `layers`.
        held_out: number of windows, from the end, that the costs are measured on; None as in `calibrate`.
        closed_windows: largest number of windows that the closed forms average over; None as in `calibrate`.
        matching: settings of the second stage of each calibration; None leaves it out.
        seed: seed of new parameters that start at random.
        progress: show a progress bar of layers.
        **hyperparameters: hyper-parameters of the scheme.

    Returns:
        The ranking.

    Raises:
        UnknownSchemeError: if there is no such scheme.
        UnsupportedModelError: if the model predicts no tokens, or no layer can be the only one with the scheme.
        AlreadyPatchedError: if the model is patched.
        TypeError: for wrong hyper-parameters.
        ValueError: for an argument out of range, a scheme with `layers`, a list of schemes, or tokens that do not fit
            the model.
    """
    parsed, *others = parse_schemes(scheme, hyperparameters)
    if others or parsed.layers is not None:
        raise ValueError(f"choose_layers ranks the layers for one scheme without layers=, not for {scheme!r}")
    check_positive("integer", closed_windows=closed_windows, held_out=held_out)
    with to_be_changed(model, "patch"):
        check_head(model)
        _, held = split_tokens(tokens, model, held_out)
        layers = parsed.possible_layers(BaseModel.of(model))
    base_loss, base_recall = _losses(model, held)
    costs, refused = [], {}
    for layer in tqdm(layers, desc="layers", unit="layer", disable=not progress):
        swapped = copy.deepcopy(model)
        try:
            patch_model(swapped, replace(parsed, layers=(layer,)), seed=seed)
        except (UnsupportedModelError, ValueError) as error:
            refused[layer] = str(error)
            continue
        report = calibrate(swapped, tokens, held_out=held_out, closed_windows=closed_windows, matching=matching)
        loss, recall = _losses(swapped, held)
        divergence = sum(each.after.mean().item() for each in report.layers)
        costs.append(LayerCost(layer, loss - base_loss, recall - base_recall, divergence))
        del swapped
    if not costs:
        reason = next(iter(refused.values()), "it has none")
        raise UnsupportedModelError(f"no layer of this model can be the only one with {parsed.name}: {reason}")
    costs.sort(key=lambda cost: cost.loss + cost.recall)
    return LayerChoice(str(parsed), base_loss, base_recall, tuple(costs), refused)


def _losses(model: PreTrainedModel, windows: Tensor) -> tuple[float, float]:
    """Return a model's mean loss of the next token, in nats: on windows, and on second copies of their first halves.

    Args:
        model: a model with a head.
        windows: (N, T) token ids.
    """
    half = windows.shape[1] // 2
    twice = windows[:, :half].repeat(1, 2)
    second = twice.index_fill(1, torch.arange(half + 1, device=twice.device), IGNORED)
    with evaluation(model):
        return mean_loss(model, windows), mean_loss(model, twice, second)


@dataclass(frozen=True)
class PairChoice(Result):
    """The rotated pairs of a model, with a number for each. `scheme` keeps the largest. It prints as a table.

    A number is the mean over the query heads of a group of the KL
    divergence of the head's attention from the base's if this pair alone stops, in nats per query.

    Attributes:
        layers: indices of the layers that the base rotates.
        every_layer: whether these are all layers with attention.
        numbers: the number of each pair, by layer of `layers`, key-value head and pair. Pair 0 is the fastest.
    """

    layers: tuple[int, ...]
    every_layer: bool
    numbers: ByHead

    def scheme(self, keep: float) -> RopeByHead:
        """Return the scheme that rotates a share of the model's pairs, those with the largest numbers.

        Args:
            keep: share of the pairs to rotate, above 0 and up to 1. Their number is rounded, and at least 1. Pairs with
                the same number stay together.

        Raises:
            ValueError: for an argument out of range.
        """
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            raise ValueError(f"keep must be a share of the pairs, above 0 and up to 1, not {keep!r}")
        ranked = sorted((number for layer in self.numbers for head in layer for number in head), reverse=True)
        least = ranked[max(1, round(keep * len(ranked))) - 1]
        pairs = tuple(
            tuple(tuple(u for u, number in enumerate(head) if number >= least) for head in layer)
            for layer in self.numbers
        )
        return RopeByHead(pairs=pairs, layers=None if self.every_layer else self.layers)

    def __str__(self) -> str:
        """Return a row for each layer: the sum over its heads of each pair's number."""
        lines = ["divergence of each pair, from the fastest on: sums over the key-value heads, in nats", "  layer"]
        for layer, heads in zip(self.layers, self.numbers, strict=True):
            lines.append(f"  {layer:>5}  " + " ".join(f"{sum(each):.3g}" for each in zip(*heads, strict=True)))
        return "\n".join(lines)


def choose_pairs(model: PreTrainedModel, tokens: Tensor, *, progress: bool = False) -> PairChoice:
    """Measure on given tokens how much the rotation of each pair of dimensions matters to each head.

    `patch_model(model, choose_pairs(model, tokens).scheme(0.75))` then rotates three quarters of the pairs, and
    `calibrate` turns the queries of the others by their mean rotation. The model is read, and stays as it is. The
    attention of each layer is computed once for each pair of a head.

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
        ValueError: for an argument out of range, for tokens that do not fit the model, if its frequencies depend on the
            length of the context, or if its queries or keys are not finite.
    """
    with to_be_changed(model, "patch"):
        base = BaseModel.of(model)
        layers = tuple(layer for layer in base.sizes if base.rotated[layer])
        if not layers and (own := base.own_scheme(tuple(base.sizes))) is not None and own.rotations():
            layers = tuple(base.sizes)  # it rotates them in its own code
        if not layers:
            raise UnsupportedModelError(f"{base.name} does not rotate queries and keys: there are no pairs to choose")
        scheme = RopeByHead(layers=layers)
        make_plan(model, (scheme,), "auto")
        tokens, _ = split_tokens(tokens, model, 0)
        angles = {layer: each for layer, each in base.own_angles(scheme).items() if each is not None}
        sums: dict[int, Any] = dict.fromkeys(angles, 0.0)
        with evaluation(model), tqdm(total=len(tokens), desc="pairs", unit="window", disable=not progress) as bar:
            for batch in tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1])):
                for layer, seen in observe(model, batch, layers).items():
                    sums[layer] = sums[layer] + _divergences(seen.call, angles[layer])
                bar.update(len(batch))
    numbers = []
    for layer, total in sums.items():
        values = total / tokens.numel()
        if not torch.isfinite(values).all():
            raise ValueError(f"attention of layer {layer} is NaN or infinite: look for weights that are not finite")
        of_heads = values.unflatten(0, (base.sizes[layer].num_key_value_heads, -1)).mean(1)
        numbers.append(tuple(tuple(head) for head in of_heads.tolist()))
    return PairChoice(layers, len(layers) == len(base.sizes), tuple(numbers))


def _divergences(call: Call, angles: BaseAngles) -> Tensor:
    """Return the sums over tokens of what `PairChoice` says, (H, pairs) float64, from a call that is rotated."""
    positions = torch.arange(call.query.shape[2], device=call.query.device)[None]
    # Rotated back. The factor (YaRN's) stays on pairs that stop.
    query, key = (angles.rotate(x, -positions) / angles.factor for x in (call.query, call.key))
    found = torch.zeros(query.shape[1], len(angles.dimensions), dtype=torch.float64, device=query.device)
    for part in parts(call):
        rows = rows_of(call, part)
        for pair, dimensions in enumerate(angles.dimensions):
            here = torch.zeros(query.shape[-1], dtype=torch.bool, device=query.device)
            here[list(dimensions)] = True
            stopped = torch.where(here, query, call.query), torch.where(here, key, call.key)
            without = replace(call, query=stopped[0], key=stopped[1])
            found[:, pair] += kl_of_rows(rows, without, part).sum((0, 2))
    return found
