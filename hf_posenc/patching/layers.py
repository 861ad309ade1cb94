"""The share of a scheme that every decoder layer must carry. It is checked at each forward pass and when saving.

Layers can be dropped, copied and appended after a model was patched, and a layer without its share of a scheme would
run without positions and say nothing. A buffer on each layer names the scheme that the layer has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from ..layer_state import on_decoder
from ..live.watch import Args, Kwargs

MARKER = "hf_posenc_"
"""Start of the name of a buffer on every layer; the scheme's name follows. Nothing reads its value. What counts is the
key in the state dict, which a model with other positions does not know (without it the weights of a model whose scheme
has no parameters would load into the stock model), and that a layer which was added later has none."""

KEPT = MARKER + "base"
"""Marker of a layer that keeps what the base has, in a model whose other layers have schemes."""

AGAIN = "unpatch the model, change its layers, then patch it again"


@dataclass(frozen=True)
class Carried:
    """The share of a scheme that one layer carries.

    Attributes:
        marker: name of its buffer.
        on_attention: attribute that its attention must have, or None.
        on_layer: whether it must own a module of position vectors.
    """

    marker: str
    on_attention: str | None = None
    on_layer: bool = False


@dataclass(frozen=True)
class PatchedLayers:
    """The shares of schemes that the layers of a decoder must carry.

    Attributes are read through whatever wraps a layer (FSDP, activation checkpointing, regional compilation): those
    wrappers hand unknown names on.

    Attributes:
        layers: from the decoder to its list of layers.
        attention: from a layer to its attention.
        carried: one for each layer; a single one where all layers carry the same, however many there are.
        at_first: whether the first layer, and no other, must own a module of position vectors.
    """

    layers: str
    attention: str
    carried: tuple[Carried, ...]
    at_first: bool = False

    def problem(self, decoder: nn.Module) -> str | None:
        """Return what is wrong with the layers that a decoder has now, and what to do, or None."""
        layers: Any = decoder.get_submodule(self.layers)
        name, alike = type(decoder).__name__, len(self.carried) == 1
        if not alike and len(layers) != len(self.carried):
            return (
                f"{name} has {len(layers)} layers now, and {len(self.carried)} when schemes were given to them: {AGAIN}"
            )
        for index, layer in enumerate(layers):
            carried = self.carried[0 if alike else index]
            if not hasattr(layer, carried.marker) or not self._carries(layer, carried.on_attention):
                if not alike:
                    return f"layer {index} of {name} does not carry what was put into the layer there: {AGAIN}"
                return (
                    f"layer {index} of {name} is not patched, though the model is: it was added or changed "
                    f"afterwards. Append copies of patched layers (copy.deepcopy) instead, or {AGAIN}"
                )
            if carried.on_layer and not hasattr(layer, "posenc"):
                return f"layer {index} of {name} lost its position vectors: {AGAIN}"
            if self.at_first and hasattr(layer, "posenc") != (index == 0):
                return (
                    f"layer {index} of {name} is {'no longer' if index == 0 else 'a copy of'} the first layer, which "
                    f"adds the position vectors to the hidden states: {AGAIN}"
                )
        return None

    def _carries(self, layer: Any, on_attention: str | None) -> bool:
        """Return whether a layer's attention has what it must have; some layers have no attention."""
        if on_attention is None:
            return True
        for part in self.attention.split("."):
            layer = getattr(layer, part, None)
        return hasattr(layer, on_attention)


def require_patched_layers(decoder: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Forward pre-hook of a patched decoder: refuses to run with layers that lack their share of a scheme."""
    if (problem := on_decoder(decoder).layers.problem(decoder)) is not None:
        raise UnsupportedModelError(problem)
