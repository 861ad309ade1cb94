"""What is known of a patched model, kept as a plain attribute of its base model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftMixedModel, PeftModel
from torch import nn

from ..schemes.base import Scheme
from .undo import Undo


@dataclass
class Patch:
    """What is known of a patched model.

    Attributes:
        schemes: as fitted to the model, in the order in which they were given.
        attention: `auto` or an engine's name.
        undo: the inverse steps; None for a model that was loaded patched, whose stock positions are gone.
        layers: the decoder layers that were patched, which need not be those that the model has now.
        limit: number of positions that exist, or None if there is no limit.
        attends: whether the model attends through the attention function of this package.
        started: by its name in the base model, how often each position parameter had been written when the model was
            patched, as torch counts it: one that still has that count was never trained. Empty for a model that was
            loaded patched.
        moved: whether a calibration has moved weights that were there before the patch; `undo` leaves them so.
    """

    schemes: tuple[Scheme, ...]
    attention: str
    undo: Undo | None
    layers: list[nn.Module] = field(default_factory=list)
    limit: int | None = None
    attends: bool = False
    moved: bool = False
    started: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The schemes' names."""
        return " + ".join(scheme.name for scheme in self.schemes)


def patch_of(model: nn.Module) -> Patch | None:
    """Return what is known of a patched model, also below an adapter of PEFT, or None for a stock one."""
    model = without_adapter(model)
    return getattr(model, "base_model", model).__dict__.get("_posenc_patch")


def without_adapter(model: Any) -> Any:
    """Return the model that PEFT has wrapped, with the adapter's layers inside; any other model as it is."""
    if isinstance(model, PeftMixedModel):
        return model.base_model.model
    return model.get_base_model() if isinstance(model, PeftModel) else model
