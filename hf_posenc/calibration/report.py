"""The report of a calibration: losses on held-out windows, and how close each layer's attention came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import fill

from torch import Tensor

from ..core.measurement import Result
from .candidates import CANDIDATES
from .checks import NOISE

NOTHING = "nothing"
"""`Calibration.kept` where nothing predicted better than the plain swap."""

REPORT_WIDTH = 88
"""Columns of the printed report."""

LITTLE = 0.1
"""The report gives advice if a calibration wins less than this share of the loss that the swap cost."""


@dataclass(frozen=True)
class HeldOutLoss(Result):
    """Mean loss of the next token on the held-out windows, in nats.

    Attributes:
        base: loss of the base.
        swapped: loss of the patched model before calibration.
        closed_form: loss after the first stage.
        calibrated: loss at the end.
    """

    base: float
    swapped: float
    closed_form: float
    calibrated: float

    def __str__(self) -> str:
        """Return the four numbers with their names."""
        return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in vars(self).items())


@dataclass(frozen=True)
class LayerFit(Result):
    """What a calibration changed in one layer. Divergences are measured on the held-out windows.

    Attributes:
        index: index of the layer.
        before: (H,) mean KL divergence of the scheme's attention from the base's, in nats per query, before
            calibration. Where the swap removes a table of positions, the table's mean is already in the embeddings.
        closed: (H,) the same divergence after the closed forms.
        after: (H,) the same divergence at the end.
        chosen: name of the closed form of each head, see `CANDIDATES`.
    """

    index: int
    before: Tensor
    closed: Tensor
    after: Tensor
    chosen: tuple[str, ...]


@dataclass(frozen=True)
class Calibration(Result):
    """The report of `calibrate`. It prints as a table.

    Attributes:
        scheme: names of the schemes.
        layers: the calibrated layers.
        tokens: number of different tokens that were read, with the held-out tokens.
        held_out_loss: language-model losses of the base, and of the model after each stage.
        kept: stage that the model's weights come from: `closed_form`; `attention`, `outputs` or `logits`, the loss that
            the second stage lowered last; or `nothing`, if the model is the plain swap.
        judge: the measure that decided, `loss` or `attention`, see `calibrate`.
        put_back: name of a stage or trial that the judge took back -> its held-out loss in nats.
        fixed: names of the schemes whose parameters are fixed (`trainable=False`), so that nothing in them is fitted.
    """

    scheme: str
    layers: tuple[LayerFit, ...]
    tokens: int
    held_out_loss: HeldOutLoss
    kept: str
    judge: str = "loss"
    put_back: Mapping[str, float] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def unexpressed(self, least: float = 0.1) -> tuple[int, ...]:
        """Return the layers in which no stage brought the mean divergence below `least`, in nats per query and head.

        If such a model also predicts badly, leave these layers out of the patch (`layers=`).
        """
        return tuple(each.index for each in self.layers if min(each.closed.mean(), each.after.mean()).item() >= least)

    def advice(self) -> str:
        """Return what to try after a calibration that won little held-out loss; an empty string if it won more."""
        losses = self.held_out_loss
        won, lost = losses.swapped - losses.calibrated, losses.swapped - losses.base
        if won >= max(NOISE, LITTLE * lost):
            return ""
        found = (
            f"calibration won {'nothing' if won < NOISE else 'little'}: held-out loss {losses.calibrated:.3f} nats, "
            f"{losses.swapped:.3f} before, {losses.base:.3f} of the base"
        )
        if lost < NOISE:
            return found
        names = " and ".join(self.fixed)
        first = f"with trainable=True, so that {names} can be fitted, or " if names else ""
        stepped = {self.kept, *self.put_back} & {"attention", "outputs", "logits"}
        patch = "Patch" if stepped else "Take the second stage too (matching=), or patch"
        return f"{found}. {patch} again {first}with another scheme, or with fewer layers (layers=)"

    def remarks(self) -> list[str]:
        """Return sentences about trials that were taken back, and about what was matched."""
        sentences = []
        if self.put_back:
            tried = ", ".join(f"{name.replace('_', ' ')} ({loss:.3f} nats)" for name, loss in self.put_back.items())
            why = "it predicted no better" if self.judge == "loss" else "attention came no closer"
            sentences.append(f"Taken back, because {why}: {tried}.")
        if self.kept in ("outputs", "logits") and any(each.after.mean() > each.closed.mean() for each in self.layers):
            sentences.append(
                f"The {self.kept} were matched, not the attention. So the divergence can end above that of the closed "
                "forms."
            )
        return sentences

    def __str__(self) -> str:
        """Return the advice, if there is any, the losses, a table of the layers' mean divergences, and the remarks."""
        advice = self.advice()
        lines = [
            *([fill(f"{self.scheme}: {advice}", REPORT_WIDTH, subsequent_indent="    ")] if advice else []),
            f"{self.scheme}: calibrated with {self.tokens:,} tokens; kept: {self.kept.replace('_', ' ')}",
            f"  held-out loss (nats): {self.held_out_loss}",
            "  divergence of the attention from the base's, in nats per query:",
            "  layer     before  closed form      after  heads by closed form",
        ]
        for each in self.layers:
            forms = ", ".join(f"{each.chosen.count(name)} {name}" for name in CANDIDATES if name in each.chosen)
            numbers = "  ".join(f"{part.mean().item():>9.4f}" for part in (each.before, each.closed, each.after))
            lines.append(f"  {each.index:>5}  {numbers}  {forms}")
        folded = [fill(each, REPORT_WIDTH, initial_indent="  ", subsequent_indent="    ") for each in self.remarks()]
        return "\n".join([*lines, *folded])
