"""`search_frequencies`: find the frequencies of RoPE that predict best beyond the trained length."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..api import patched
from ..checkpoints import files
from ..errors import CheckpointError, UnsupportedModelError
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.logits import LogitsOf, logits_function, token_losses
from ..patching.check import to_be_patched
from ..placement import RopeParameters
from ..schemes.base import PROPORTIONAL, by_layer_type
from ..schemes.rope import Rope, longrope_factors
from ..upstream.rotary import ORIGINAL_LENGTH
from .checks import check_head, check_tokens
from .factor_search import Evolution, Factors, Strategy, start_factors
from .matching import check_counts
from .state import digest_of, digest_of_tokens

ENTRY = "hf_posenc_frequency_search"
"""Key of the state file's JSON that holds the identity of the model, the tokens and the length."""

BATCH_TOKENS = 1024
"""Number of tokens in a batch, about; at least one window."""

SAVE_SECONDS = 30.0
"""Seconds between two writes of the state file."""


@dataclass(frozen=True)
class Improvement:
    """A new lowest loss during a search.

    Attributes:
        trials: number of factors that had been tried, these ones included.
        loss: mean loss of the next token on the searched windows, in nats.
        held_out: the same on the held-out windows.
        factors: the numbers that the frequencies of the unscaled base were divided by, (F,).
    """

    trials: int
    loss: float
    held_out: float
    factors: Factors


@dataclass(frozen=True)
class FrequencySearch:
    """The findings of `search_frequencies`. It prints as a table.

    Attributes:
        scheme: the scheme with the frequencies found, for `patch_model(model, result.scheme)`. It keeps the factor that
            the base's scaling has on cosines and sines (YaRN).
        frequencies: the frequencies alone, in radians per token, as `frequencies=` of `rope` takes them: a tuple (F,),
            or a dict by layer type. Give `scaling="none"` beside them if the base has a scaling. They do not hold
            YaRN's factor.
        factors: the numbers that the frequencies of the unscaled base were divided by, (F,).
        length: length of the windows in tokens.
        scale: this length relative to the length at which the base was trained.
        before: loss of the base on the held-out windows, in nats per token.
        after: loss with the returned frequencies on the same windows. These windows chose among the tables of
            `history`, so the loss is slightly optimistic.
        starts: name of the factors that the search began with (`base`, `pi`, `ntk 4`, `yarn 4`, ...) -> loss on the
            searched windows.
        history: each new lowest loss on the searched windows, in order. The first entry is the base.
        trials: number of tables that were tried.
        strategy: the strategy, as text.
    """

    scheme: Rope
    frequencies: tuple[float, ...] | dict[str, tuple[float, ...]]
    factors: Factors
    length: int
    scale: float
    before: float
    after: float
    starts: Mapping[str, float]
    history: tuple[Improvement, ...]
    trials: int
    strategy: str

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        return asdict(self) | {"starts": dict(self.starts), "scheme": self.scheme.hyperparameters()}

    def __str__(self) -> str:
        """Return the losses and the factors."""
        starts = ", ".join(f"{name} {loss:.4f}" for name, loss in self.starts.items())
        lines = [
            f"{self.strategy}: {self.trials} tables of frequencies tried",
            f"  length: {self.length:,} tokens, {self.scale:g} times the trained length",
            f"  loss of the searched windows (nats): {starts}; lowest {self.history[-1].loss:.4f}",
            f"  loss of the held-out windows (nats): before {self.before:.4f}, after {self.after:.4f}",
            f"  factors: {', '.join(f'{each:.4g}' for each in self.factors)}",
        ]
        if self.after == self.before:
            lines.append("  No table that lowered the searched loss predicts held-out windows better than the base's.")
        return "\n".join(lines)


def search_frequencies(
    model: PreTrainedModel,
    tokens: Tensor,
    length: int,
    *,
    strategy: Strategy = Evolution(),  # noqa: B008 - it is frozen
    layer_type: str | None = None,
    held_out: int = 1,
    state_file: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> FrequencySearch:
    """Search the frequencies of a rotating model with which it predicts text best at a longer length.

    Nothing is trained, and the model stays as it is. Each trial patches the model with `rope` and divides the base's
    unscaled frequencies by a factor for each pair. So its loss is the one that `patch_model(model, result.scheme)`
    gives. The search begins with the base's factors at this length, scaling included, and with those of PI, NTK and
    YaRN. NTK and YaRN are also tried for half of the extension, a quarter, and so on; YaRN without its factor on
    cosines and sines. The search lowers the loss of all windows but the last `held_out`. Of the tables that lowered it,
    the one with the lowest loss on the held-out windows is returned; the base's own is among them.

    Args:
        model: an unpatched model that rotates queries and keys, with a language-model head, on one device and not
            wrapped (DDP, FSDP, DeepSpeed).
        tokens: (N, T) int64 or int32: windows of text without padding, at least `held_out + 1`. T is at least `length`,
            and only the first `length` tokens of each are read.
        length: length in tokens, above the length at which the base was trained.
        strategy: `Evolution` (LongRoPE) or `DivideAndConquer` (DCIS), with their numbers.
        layer_type: type of the layers whose frequencies are searched, for a base whose layer types rotate differently
            (Gemma 3). The other types keep theirs.
        held_out: number of windows at the end that are not searched. They choose among the tables that lowered the
            loss.
        state_file: path of a JSON file with the losses of all trials. It is written every 30 seconds, at the end, and
            if the search is interrupted. Trials of an existing file are not computed again. So an interrupted search
            goes on with the same result, and another strategy can use them too.
        progress: show a progress bar of trials.

    Returns:
        The frequencies, and the losses before and after.

    Raises:
        AlreadyPatchedError: if the model is patched.
        UnsupportedModelError: if the model rotates nothing, predicts no tokens, or is wrapped, sharded or offloaded.
        TypeError: if `strategy` is neither an `Evolution` nor a `DivideAndConquer`.
        ValueError: for an argument out of range, or tokens that do not fit the model.
        CheckpointError: if the state file belongs to another search, or holds no state.
        OSError: if the state file cannot be read or written.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be an Evolution(...) or a DivideAndConquer(...), not {strategy!r}")
    check_counts(length=length, held_out=held_out)
    with to_be_patched(model):
        check_head(model)
        check_tokens(tokens, model, held_out)
        if tokens.shape[1] < length:
            raise ValueError(f"tokens have {tokens.shape[1]} per window, fewer than length={length}")
        space = _Space.of(BaseModel.of(model), layer_type, length)
    windows = tokens[:, :length].to(next(model.parameters()).device).long()
    identity = {"layer_type": layer_type, "length": length, "held_out": held_out}
    if state_file is not None:
        identity |= {"digest of the model": digest_of(model), "tokens": digest_of_tokens(windows)}
    trials = _Trials(
        model, space, windows[:-held_out], windows[-held_out:], _State(state_file, identity, len(space.unscaled))
    )
    starts = {"base": space.base} | start_factors(space.unscaled, space.trained, space.scale)
    least = tuple(w / math.pi for w in space.unscaled)
    with (
        evaluation(model),
        tqdm(
            total=strategy.trials(len(least), len(starts)), desc="frequencies", unit="trial", disable=not progress
        ) as trials.bar,
    ):
        try:
            losses = {name: trials.loss(each) for name, each in starts.items()}
            strategy.search(list(dict.fromkeys(starts.values())), space.scale, least, trials.loss)
        finally:
            trials.state.save()
    found = min(trials.history, key=lambda each: each.held_out)
    return FrequencySearch(
        space.scheme(found.factors),
        space.by_type(space.frequencies(found.factors)),
        found.factors,
        length,
        space.scale,
        trials.history[0].held_out,
        found.held_out,
        losses,
        tuple(trials.history),
        len(trials.tried),
        str(strategy),
    )


@dataclass(frozen=True)
class _Space:
    """The tables of frequencies that a search can try.

    Attributes:
        layer_type: type of the layers that are searched; None where all layers rotate alike.
        unscaled: frequencies of the base without scaling, (F,).
        base: the factors of the base at the length of the search, with its scaling.
        attention_factor: the base's factor on cosines and sines at this length.
        theta: the base's `rope_theta`.
        trained: length at which the base was trained, in tokens.
        scale: the length of the search relative to this length.
    """

    layer_type: str | None
    unscaled: tuple[float, ...]
    base: Factors
    attention_factor: float
    theta: float
    trained: int
    scale: float

    @classmethod
    def of(cls, model: BaseModel, layer_type: str | None, length: int) -> _Space:
        """Read the rotation of a base.

        Raises:
            UnsupportedModelError: if the base rotates nothing.
            ValueError: if there is no such layer type, or the length is not above the trained one.
        """
        rotation = model.rotation
        if not (parameters := rotation.own()):
            raise UnsupportedModelError(f"{model.name} rotates nothing, so it has no frequencies to search")
        found = {kind: each for kind, each in rotation.at_length(Rope(), length).items() if each[0]}
        if layer_type not in found:
            types = ", ".join(map(str, found))
            reason = "all its layers rotate alike" if None in found else f"it has {types}"
            raise ValueError(f"layer_type must be a type of layers of {model.name}, not {layer_type!r}: {reason}")
        own = by_layer_type(parameters)[layer_type]
        trained = own.get(ORIGINAL_LENGTH) or model.length
        if trained is None:
            name = model.family.names.config_length
            raise ValueError(f"the config of {model.name} does not say the trained length: set config.{name}")
        if length <= trained:
            raise ValueError(f"length must be above {trained}, the length that the base was trained at, not {length}")
        frequencies, attention_factor = found[layer_type]
        if own["rope_type"] == PROPORTIONAL:  # the pairs that it leaves out have the frequency 0
            unscaled = frequencies = tuple(w for w in frequencies if w)
        else:
            none = Rope(scaling="none" if layer_type is None else {layer_type: "none"})
            unscaled, _ = rotation.at_length(none, length)[layer_type]
        base = tuple(w / own_w for w, own_w in zip(unscaled, frequencies, strict=True))
        theta = own["rope_theta"]
        return cls(layer_type, unscaled, base, attention_factor, theta, trained, length / trained)

    def frequencies(self, factors: Factors) -> tuple[float, ...]:
        """Return the frequencies with these factors, in radians per token; rounding cannot take them above pi."""
        return tuple(min(math.pi, w / factor) for w, factor in zip(self.unscaled, factors, strict=True))

    def by_type(self, value: Any) -> Any:
        """Return a value of a hyper-parameter of `rope`, for the layers that are searched."""
        return value if self.layer_type is None else {self.layer_type: value}

    def scheme(self, factors: Factors) -> Rope:
        """Return the scheme with these factors."""
        frequencies = self.frequencies(factors)
        if self.attention_factor == 1:
            return Rope(frequencies=self.by_type(frequencies), scaling=self.by_type("none"))
        scaling: RopeParameters = {"rope_type": "longrope", "attention_factor": self.attention_factor}
        return Rope(scaling=self.by_type(scaling | longrope_factors(frequencies, self.theta)))


@dataclass
class _Trials:
    """The trials of a search: each table of frequencies is measured once.

    Attributes:
        model: the model, unpatched.
        space: the tables that can be tried.
        searched: the windows whose loss is lowered, (N, T).
        held: the windows that only judge.
        state: the losses that are known.
        history: the new lowest losses.
        tried: the factors that this search has tried.
        bar: the progress bar.
        logits_of: function that returns the logits of windows.
    """

    model: PreTrainedModel
    space: _Space
    searched: Tensor
    held: Tensor
    state: _State
    history: list[Improvement] = field(default_factory=list)
    tried: set[Factors] = field(default_factory=set)
    bar: Any = None
    logits_of: LogitsOf | None = None

    def loss(self, factors: Factors) -> float:
        """Return the loss on the searched windows, and record it. NaN becomes infinity.

        Raises:
            ValueError: if the base's loss is not finite.
        """
        if factors not in self.state.losses:
            self.state.add(factors, self.measure(factors, self.searched))
        loss = self.state.losses[factors]
        if factors not in self.tried:
            self.tried.add(factors)
            if not self.history and not math.isfinite(loss):
                raise ValueError("the base's loss is not finite: look for weights that are not finite")
            if not self.history or loss < self.history[-1].loss:
                self.history.append(Improvement(len(self.tried), loss, self.measure(factors, self.held), factors))
            self.bar.set_postfix(loss=f"{self.history[-1].loss:.4f}", refresh=False)
            self.bar.update()
        return loss

    @torch.no_grad()
    def measure(self, factors: Factors, windows: Tensor) -> float:
        """Return the mean loss of the next token of windows (N, T), in nats."""
        total, last = 0.0, windows.shape[1] - 1
        with patched(self.model, self.space.scheme(factors)):
            # `logits_function` runs a few tokens. In the unpatched model they would reset its dynamic scaling.
            self.logits_of = self.logits_of or logits_function(self.model, windows[0])
            for batch in windows.split(max(1, BATCH_TOKENS // (last + 1))):
                pieces, targets = self.logits_of(batch, slice(last)), batch[:, 1:].reshape(-1)
                total += sum(part.sum(dtype=torch.float64).item() for part in token_losses(pieces, targets))
        mean = total / (len(windows) * last)
        return mean if math.isfinite(mean) else math.inf


class _State:
    """The losses of trials, in a JSON file that is written whole or not at all; without a path only in memory.

    Attributes:
        losses: factors -> loss on the searched windows.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, object], pairs: int) -> None:
        """Read the file if it exists.

        Args:
            path: path of the file, which need not exist; None means no file.
            identity: values for JSON that identify what is measured. A file with another identity is refused.
            pairs: number of factors of a trial.

        Raises:
            CheckpointError: if the file is no state, or another search's.
            OSError: if the folder of the file does not exist.
        """
        self.path, self.identity = None if path is None else Path(path), dict(identity)
        self.losses: dict[Factors, float] = {}
        self.saved = time.monotonic()
        if self.path is None:
            return
        if self.path.exists():
            self._read(self.path, pairs)
        elif not (folder := self.path.absolute().parent).is_dir():
            raise FileNotFoundError(f"{self.path}: there is no folder {folder}")

    def _read(self, path: Path, pairs: int) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            identity, trials = content[ENTRY], content["trials"]
            losses = {tuple(factors): loss for factors, loss in trials}
            whole = all(
                len(each) == pairs and all(isinstance(x, float) and not math.isnan(x) for x in (*each, losses[each]))
                for each in losses
            )
            changed = {name: now for name, now in self.identity.items() if identity.get(name) != now}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not the state of a search for frequencies") from error
        if changed:
            different = "; ".join(f"{name} was {identity.get(name)} and is {now}" for name, now in changed.items())
            raise CheckpointError(f"{path} is the state of another search: {different}")
        if not whole:
            raise CheckpointError(f"{path} is not the whole state of a search for frequencies of {pairs} pairs")
        self.losses = losses

    def add(self, factors: Factors, loss: float) -> None:
        """Record a loss, and write the file if the last time is long ago."""
        self.losses[factors] = loss
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file."""
        if self.path is None:
            return
        trials = [[list(factors), loss] for factors, loss in self.losses.items()]
        with files.replaced(self.path) as partial:
            partial.write_text(json.dumps({ENTRY: self.identity, "trials": trials}), encoding="utf-8")
        self.saved = time.monotonic()
