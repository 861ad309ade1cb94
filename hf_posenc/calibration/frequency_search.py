"""`search_frequencies`: find the frequencies of RoPE that predict best beyond the trained length."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..api import patched
from ..core.errors import UnsupportedModelError
from ..core.measurement import Result
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.obstacles import to_be_changed
from ..schemes.base import RopeParameters, by_layer_type
from ..schemes.rope import Rope, longrope_factors
from ..transformers_glue.rotary import ORIGINAL_LENGTH
from .checks import check_head, check_positive, mean_loss, split_tokens
from .state import StateFile, digest_of, digest_of_tokens

Factors = tuple[float, ...]
"""For each rotated pair, the number that its frequency is divided by, (F,)."""

LEAST = 1e-4
"""Smallest factor that is tried, as in the authors' code."""

KEPT = 3
"""Number of best increments. The next halves search their span, widened by a step on each side."""

SAVE_SECONDS = 30.0
"""Seconds between two writes of the state file."""


@dataclass(frozen=True)
class FrequencySearch(Result):
    """The findings of `search_frequencies`. It prints as a table.

    Attributes:
        scheme: the scheme with the frequencies found, for `patch_model(model, result.scheme)`. It keeps the factors
            that the base's scaling has on cosines and sines (YaRN) and on scores (DeepSeek's `mscale_all_dim`).
        factors: the numbers that the frequencies of the unscaled base were divided by, (F,).
        length: length of the windows in tokens.
        scale: this length relative to the length at which the base was trained.
        before: loss of the base on the held-out windows, in nats per token.
        after: loss with the returned frequencies on the same windows. These windows chose among the tables that
            lowered the searched loss, so it is slightly optimistic.
        starts: name of the factors that the search began with (`base`, `pi`, `ntk 4`, `yarn 4`, ...) -> loss on the
            searched windows.
        lowest: lowest loss on the searched windows.
        trials: number of tables that were tried.
    """

    scheme: Rope
    factors: Factors
    length: int
    scale: float
    before: float
    after: float
    starts: Mapping[str, float]
    lowest: float
    trials: int

    def to_dict(self) -> dict[str, Any]:
        """Return name -> value, ready for JSON."""
        return super().to_dict() | {"scheme": self.scheme.hyperparameters()}

    def __str__(self) -> str:
        """Return the losses and the factors."""
        starts = ", ".join(f"{name} {loss:.4f}" for name, loss in self.starts.items())
        lines = [
            f"{self.trials} tables of frequencies tried",
            f"  length: {self.length:,} tokens, {self.scale:g} times the trained length",
            f"  loss of the searched windows (nats): {starts}; lowest {self.lowest:.4f}",
            f"  loss of the held-out windows (nats): before {self.before:.4f}, after {self.after:.4f}",
            f"  factors: {', '.join(f'{each:.4g}' for each in self.factors)}",
        ]
        return "\n".join(lines)


def search_frequencies(
    model: PreTrainedModel,
    tokens: Tensor,
    length: int,
    *,
    increments: int = 10,
    reach: float = 0.5,
    layer_type: str | None = None,
    held_out: int = 1,
    state_file: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> FrequencySearch:
    """Search the frequencies of a rotating model with which it predicts text best at a longer length.

    Nothing is trained, and the model stays as it is. Each trial patches the model with `rope` and divides the base's
    unscaled frequencies by a factor for each pair. So its loss is the one that `patch_model(model, result.scheme)`
    gives. The search begins with the best of the base's factors at this length, scaling included, and those of PI, NTK
    and YaRN. NTK and YaRN are also tried for half of the extension, a quarter, and so on; YaRN without its factor on
    cosines and sines. Then factors of a segment of pairs move together. There are two segments at first, and the one
    with the lowest frequencies is searched before the other. A search adds evenly spaced increments to all factors of
    the segment and keeps the best. Each half of the segment is then searched around the best increments, until segments
    are single pairs. The search lowers the loss of all windows but the last `held_out`. Of the tables that lowered it,
    the one with the lowest loss on the held-out windows is returned; the base's own is among them.
    Deviations: an increment stays only if it lowers the loss. `reach` is relative to the extension of the context; the
    authors add at most 5, at extensions of 8 and of 16. No frequency exceeds pi.
    Source: Yang et al. 2024, DCIS, arXiv:2412.18811, and the authors' code.

    Args:
        model: an unpatched model that rotates queries and keys, with a language-model head, on one device and not
            wrapped (DDP, FSDP, DeepSpeed).
        tokens: (N, T) int64 or int32: windows of text without padding, at least `held_out + 1`. T is at least `length`,
            and only the first `length` tokens of each are read.
        length: length in tokens, above the length at which the base was trained.
        increments: number of increments that each segment tries, at least 2.
        reach: largest increment of the first two segments, up or down, relative to the extension of the context.
        layer_type: type of the layers whose frequencies are searched, for a base whose layer types rotate differently
            (Gemma 3). The other types keep theirs.
        held_out: number of windows at the end that are not searched. They choose among the tables that lowered the
            loss.
        state_file: path of a file with the losses of all trials. It is written every 30 seconds, at the end, and if the
            search is interrupted. Trials of an existing file are not computed again. So an interrupted search goes on
            with the same result, and a search with other increments can use them too.
        progress: show a progress bar of trials.

    Returns:
        The frequencies, and the losses before and after.

    Raises:
        AlreadyPatchedError: if the model is patched.
        UnsupportedModelError: if the model rotates nothing, predicts no tokens, or is wrapped, sharded or offloaded.
        ValueError: for an argument out of range, or tokens that do not fit the model.
        CheckpointError: if the state file belongs to another search, or holds no state.
        OSError: if the state file cannot be read or written.
    """
    check_positive("integer", length=length, held_out=held_out, **{"increments - 1": increments - 1})
    check_positive("number", reach=reach)
    with to_be_changed(model, "patch"):
        check_head(model)
        searched, held = (each[:, :length] for each in split_tokens(tokens, model, held_out))
        if tokens.shape[1] < length:
            raise ValueError(f"tokens have {tokens.shape[1]} per window, fewer than length={length}")
        unscaled, base, trained, scheme = _read_rotation(BaseModel.of(model), layer_type, length)
    identity: dict[str, object] = {"layer_type": layer_type, "length": length, "held_out": held_out}
    if state_file is not None:
        identity |= {"tokens": digest_of_tokens(tokens[:, :length]), "digest of the model": digest_of(model)}
    state = StateFile(state_file, identity)
    known: dict[Factors, float] = (state.content or {}).get("losses", {})
    tried: dict[Factors, float] = {}
    improved: list[tuple[float, Factors]] = []

    def measured(factors: Factors, windows: Tensor) -> float:
        with patched(model, scheme(factors)):
            return mean_loss(model, windows)

    def loss(factors: Factors) -> float:
        """Return the loss on the searched windows. Of each table that lowers it, measure the held-out loss as well."""
        if factors not in known:
            known[factors] = measured(factors, searched)
            state.save({"losses": known}, every=SAVE_SECONDS)
        if factors not in tried:
            if known[factors] < min(tried.values(), default=math.inf):
                improved.append((measured(factors, held), factors))
            tried[factors] = known[factors]
            bar.update()
        return known[factors]

    scale = length / trained
    starts = {"base": base} | start_factors(unscaled, trained, scale)
    least = tuple(max(LEAST, w / math.pi) for w in unscaled)
    with evaluation(model), tqdm(desc="frequencies", unit="trial", disable=not progress) as bar:
        try:
            if not math.isfinite(loss(base)):
                raise ValueError("the base's loss is not finite: look for weights that are not finite")
            losses = {name: loss(each) for name, each in starts.items()}
            best = min(starts.values(), key=loss)
            _divide_and_conquer(best, least, reach * scale, increments, loss)
        finally:
            state.save({"losses": known})
    after, factors = min(improved, key=lambda each: each[0])
    lowest, before = min(tried.values()), improved[0][0]
    return FrequencySearch(scheme(factors), factors, length, scale, before, after, losses, lowest, len(tried))


def _read_rotation(
    model: BaseModel, layer_type: str | None, length: int
) -> tuple[tuple[float, ...], Factors, int, Callable[[Factors], Rope]]:
    """Read the rotation of a base.

    Returns:
        The frequencies without scaling, (F,); the factors of the base's scaling at this length; the length at which the
        base was trained; and a function from factors to the scheme with them.

    Raises:
        UnsupportedModelError: if the base rotates nothing.
        ValueError: if there is no such layer type, or the length is not above the trained one.
    """
    rotation = model.rotation
    if not (parameters := rotation.own()):
        raise UnsupportedModelError(f"{model.name} rotates nothing, so it has no frequencies to search")
    found = {kind: each for kind, each in rotation.at_length(Rope(), length).items() if each[0]}
    if layer_type not in found:
        reason = "all its layers rotate alike" if None in found else f"it has {', '.join(map(str, found))}"
        raise ValueError(f"layer_type must be a type of layers of {model.name}, not {layer_type!r}: {reason}")
    own = by_layer_type(parameters)[layer_type]
    trained = own.get(ORIGINAL_LENGTH) or model.length
    if trained is None or length <= trained:
        name = model.family.names.config_length
        raise ValueError(f"length must be above {trained}, the trained length that config.{name} says, not {length}")
    scaled, attention_factor = found[layer_type]

    def of_type(value: Any) -> Any:
        return value if layer_type is None else {layer_type: value}

    all_unscaled, _ = rotation.at_length(Rope(scaling=of_type("none")), length)[layer_type]
    unscaled = tuple(w for w in all_unscaled if w)  # the pairs that `proportional` leaves out have the frequency 0
    kept = model.family.rotation.kept(own)

    def scheme(factors: Factors) -> Rope:
        frequencies = tuple(min(math.pi, w / factor) for w, factor in zip(unscaled, factors, strict=True))
        if attention_factor == 1 and not kept:
            return Rope(frequencies=of_type(frequencies), scaling=of_type("none"))
        scaling: RopeParameters = {"rope_type": "longrope", "attention_factor": attention_factor}
        return Rope(scaling=of_type(scaling | kept | longrope_factors(frequencies, own["rope_theta"])))

    base = tuple(w / own_w for w, own_w in zip(unscaled, (w for w in scaled if w), strict=True))
    return unscaled, base, trained, scheme


def start_factors(frequencies: Sequence[float], length: int, scale: float) -> dict[str, Factors]:
    """Return the factors of named methods that extend a context.

    `pi`: position interpolation, Chen et al. 2023, arXiv:2306.15595. `ntk` and `yarn`: Peng et al. 2023,
    arXiv:2309.00071, sections 3.1 and 3.2, with YaRN's ramp between 32 turns and 1 turn of the trained length. These
    two are given for the scale and for its halves above 1, as in `yarn 4`, because small models do best with less.

    Args:
        frequencies: frequencies of the base without scaling, a falling geometric series, in radians per token, (F,).
        length: length in tokens at which the base was trained.
        scale: the wanted length relative to this length, above 1.
    """
    count = len(frequencies)
    found = {"pi": (scale,) * count}
    while scale > 1 and count > 1:
        found[f"ntk {scale:g}"] = tuple(scale ** (u / (count - 1)) for u in range(count))
        found[f"yarn {scale:g}"] = _yarn(frequencies, length, scale)
        scale /= 2
    return found


def _yarn(frequencies: Sequence[float], length: int, scale: float) -> Factors:
    """Return the factors of YaRN."""
    ratio = math.log(frequencies[0] / frequencies[1])

    def pair_with(turns: float) -> float:
        """Return the index, between pairs, of a frequency that completes these turns within the length."""
        return math.log(frequencies[0] * length / (2 * math.pi * turns)) / ratio

    # transformers and the authors also cap `high` at the head size minus 1. No usual theta and length reach this cap.
    low, high = max(math.floor(pair_with(32)), 0), math.ceil(pair_with(1))
    ramp = [min(1.0, max(0.0, (u - low) / ((high - low) or 1e-3))) for u in range(len(frequencies))]
    return tuple(1 / (r / scale + 1 - r) for r in ramp)


def _divide_and_conquer(
    best: Factors, least: Factors, reach: float, increments: int, loss: Callable[[Factors], float]
) -> None:
    """Call `loss` with factors, in the order of the search, see `search_frequencies`.

    Args:
        best: factors to begin with.
        least: smallest factor of each pair.
        reach: largest increment.
        increments: number of increments that each segment tries.
        loss: function that computes the loss of factors.
    """

    def move(segment: range, bounds: tuple[float, float]) -> tuple[float, float]:
        """Move the factors of a segment by the best increment, and return the bounds of the increments around it."""
        nonlocal best
        step = (bounds[1] - bounds[0]) / (increments - 1)
        moved = {0.0: best}  # first, so that of equal losses the factors stay
        for increment in (bounds[0] + step * i for i in range(increments)):
            raised = tuple(max(least[u], best[u] + increment) for u in segment)
            moved.setdefault(increment, best[: segment.start] + raised + best[segment.stop :])
        losses = {increment: loss(each) for increment, each in moved.items()}
        near = sorted((each for each in losses if math.isfinite(losses[each])), key=losses.__getitem__)[:KEPT]
        best = moved[near[0]]
        return min(near) - step - near[0], max(near) + step - near[0]

    segments = [(each, (-reach, reach)) for each in _halves(range(len(best))) or [range(len(best))]]
    while segments:
        halves: list[tuple[range, tuple[float, float]]] = []
        for segment, bounds in reversed(segments):
            found = move(segment, bounds)
            halves[:0] = [(half, found) for half in _halves(segment)]
        segments = halves


def _halves(segment: range) -> list[range]:
    """Return the two halves of a segment of pairs; none for a single pair."""
    middle = len(segment) // 2
    return [segment[:middle], segment[middle:]] if middle else []
