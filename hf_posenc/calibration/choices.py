"""`choose_layers`: the layers where a base loses least when its positions are swapped."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..api import parse_schemes, patch_model
from ..core.errors import UnsupportedModelError
from ..core.measurement import Result
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.logits import IGNORED
from ..model.obstacles import to_be_changed
from ..schemes.base import Scheme
from .calibrate import calibrate
from .checks import check_head, check_positive, mean_loss, split_tokens
from .matching import Matching


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
        lines += [f"  {c.layer:>5}  {c.loss:>+8.4f}  {c.recall:>+8.4f}  {c.divergence:>10.4f}" for c in self.costs]
        return "\n".join([*lines, *(f"  {layer:>5}  left out: {reason}" for layer, reason in self.refused.items())])


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
    with evaluation(model):
        base_loss = mean_loss(model, held)
    base_recall = _recall(model, held)
    costs, refused = [], {}
    for layer in tqdm(layers, desc="layers", unit="layer", disable=not progress):
        gc.collect()  # one copy at a time: a patched model and its patch hold each other
        swapped = copy.deepcopy(model)
        try:
            patch_model(swapped, replace(parsed, layers=(layer,)), seed=seed)
        except (UnsupportedModelError, ValueError) as error:
            refused[layer] = str(error)
            del swapped
            continue
        report = calibrate(swapped, tokens, held_out=held_out, closed_windows=closed_windows, matching=matching)
        loss, recall = report.held_out_loss.calibrated - base_loss, _recall(swapped, held) - base_recall
        costs.append(LayerCost(layer, loss, recall, sum(each.after.mean().item() for each in report.layers)))
        del swapped
    if not costs:
        reason = next(iter(refused.values()), "it has none")
        raise UnsupportedModelError(f"no layer of this model can be the only one with {parsed.name}: {reason}")
    costs.sort(key=lambda cost: cost.loss + cost.recall)
    return LayerChoice(str(parsed), base_loss, base_recall, tuple(costs), refused)


def _recall(model: PreTrainedModel, windows: Tensor) -> float:
    """Return a model's mean loss of the next token on second copies of the windows' first halves, in nats."""
    half = windows.shape[1] // 2
    twice = windows[:, :half].repeat(1, 2)
    second = twice.index_fill(1, torch.arange(half + 1, device=twice.device), IGNORED)
    with evaluation(model):
        return mean_loss(model, twice, second)
