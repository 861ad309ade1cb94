"""The report of a calibration: losses on held-out windows, and how close each layer's attention came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from textwrap import fill
from typing import Any

from torch import Tensor

from .candidates import CANDIDATES

NOTHING = "nothing"
"""`Calibration.kept` where nothing predicted better than the plain swap."""

WIDTH = 88
"""Columns of the printed report."""

CLOSER = 0.9
"""Patching again is worth it where it brings a divergence below this share of what it is."""

TRIED = {
    "heads": "closed forms chosen head by head",
    "closed_form": "the best closed forms",
    "attention": "matching attention",
    "outputs": "matching outputs",
}
"""The keys of `Calibration.put_back`, in words."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean loss of the next token on the held-out windows, in nats.

    Attributes:
        base: loss of the base.
        swapped: loss of the patched model, before anything was calibrated.
        closed_form: loss with what was kept of the closed forms.
        calibrated: loss at the end.
    """

    base: float
    swapped: float
    closed_form: float
    calibrated: float

    def __str__(self) -> str:
        """Return the four numbers with their names."""
        return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class LayerFit:
    """The change of one layer by a calibration; all numbers are measured on held-out windows.

    Attributes:
        index: index of the layer.
        before: (H,) mean KL divergence of the scheme's attention from the base's, in nats per query, before anything
            was calibrated.
        closed: (H,) the same after the closed forms.
        after: (H,) the same at the end.
        chosen: for each head the closed form that was taken, see `CANDIDATES`.
        base_curve: (H, T) what the base's positions add to a score, the mean by distance, with queries and keys as
            they were before the closed forms.
        scheme_curve: (H, T) the scheme's bias or factor by distance at the end, or None if it has none.
        multiplies: whether the scheme's curve is a factor of the score; otherwise it is a bias.
    """

    index: int
    before: Tensor
    closed: Tensor
    after: Tensor
    chosen: tuple[str, ...]
    base_curve: Tensor
    scheme_curve: Tensor | None
    multiplies: bool

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"chosen": list(self.chosen)}
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


@dataclass(frozen=True)
class Calibration:
    """The report of `calibrate`. It prints as a table.

    Attributes:
        scheme: names of the schemes.
        layers: one report for each layer that was calibrated.
        tokens: number of different tokens that were read, held-out ones included.
        held_out_loss: language-model losses along the way.
        kept: where the model's weights are from: `closed_form`; `attention` or `outputs`, the loss that the second
            stage lowered; or `nothing`: the model is the plain swap.
        judge: what decided, as in `calibrate`.
        put_back: what the judge took back, with its held-out loss in nats.
        apart: (closed, apart) if one module of the scheme serves several layers: the mean divergence that closed forms
            reach with it, and with one for each layer (`share_layers=False`); else None.
    """

    scheme: str
    layers: tuple[LayerFit, ...]
    tokens: int
    held_out_loss: HeldOutLoss
    kept: str
    judge: str = "loss"
    put_back: Mapping[str, float] = field(default_factory=dict)
    apart: tuple[float, float] | None = None

    def unexpressed(self, least: float = 0.1) -> tuple[int, ...]:
        """Return the layers that still differ from the base by this much, in nats per query and head on average.

        The base does there what the scheme cannot: leave those layers out of the patch (`layers=`).
        """
        return tuple(each.index for each in self.layers if each.after.mean().item() >= least)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return {
            "scheme": self.scheme,
            "tokens": self.tokens,
            "held_out_loss": asdict(self.held_out_loss),
            "kept": self.kept,
            "judge": self.judge,
            "put_back": dict(self.put_back),
            "apart": None if self.apart is None else list(self.apart),
            "layers": [each.to_dict() for each in self.layers],
        }

    def remarks(self) -> list[str]:
        """Return sentences about what was taken back, and about what would come closer."""
        sentences = []
        if self.put_back:
            tried = ", ".join(f"{TRIED[name]} ({loss:.3f} nats)" for name, loss in self.put_back.items())
            why = "it predicted no better" if self.judge == "loss" else "attention came no closer"
            sentences.append(f"Taken back, because {why}: {tried}.")
        if self.kept == NOTHING:
            sentences.append("Nothing predicted better than the plain swap: the model is as it was.")
        if self.apart is not None and self.apart[1] < CLOSER * self.apart[0]:
            together, apart = self.apart
            sentences.append(
                "All layers share the scheme's parameters. With its own for each layer (share_layers=False) closed "
                f"forms come to a divergence of {apart:.3f} nats in place of {together:.3f}: patch again with that."
            )
        return sentences

    def __str__(self) -> str:
        """Return the losses, then a table: KL divergence from the base's attention, the mean over heads, in nats."""
        lines = [
            f"{self.scheme}: calibrated with {self.tokens:,} tokens; kept: {self.kept.replace('_', ' ')}",
            f"  held-out loss (nats): {self.held_out_loss}",
            "  divergence of the attention from the base's, in nats per query:",
            "  layer     before  closed form      after  heads by closed form",
        ]
        for each in self.layers:
            forms = ", ".join(f"{each.chosen.count(name)} {name}" for name in CANDIDATES if name in each.chosen)
            numbers = "  ".join(f"{part.mean().item():>9.4f}" for part in (each.before, each.closed, each.after))
            lines.append(f"  {each.index:>5}  {numbers}  {forms}")
        folded = [fill(each, WIDTH, initial_indent="  ", subsequent_indent="    ") for each in self.remarks()]
        return "\n".join([*lines, *folded])
