"""The parts of a scheme that every decoder layer must have. Each forward pass and each save checks them.

Users may drop, copy and append layers after a model was patched. A layer without a scheme's parts would silently run
without positions. So a buffer on each layer names the layer's scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from ..layer_state import on_decoder
from ..live.watch import Args, Kwargs

MARKER = "hf_posenc_"
"""Prefix of the name of a buffer on every layer. The scheme's name follows it. Nothing reads the buffer's value.

A model with other positions lacks its key in the state dict. Without that key, the weights of a scheme without
parameters would load into the stock model. And a layer that was added after patching lacks the buffer."""

BASE_MARKER = MARKER + "base"
"""Marker of a layer that keeps the base's positions in a patched model."""

REMEDY = "unpatch the model, change its layers, then patch it again"


@dataclass(frozen=True)
class Carried:
    """The parts of a scheme that one layer must have.

    Attributes:
        markers: names of the layer's marker buffers.
        on_attention: names of attributes that the layer's attention must have.
        on_layer: whether the layer must own a module of position vectors.
    """

    markers: tuple[str, ...]
    on_attention: tuple[str, ...] = ()
    on_layer: bool = False

    def with_parts(self, other: Carried) -> Carried:
        """Return the parts of both."""
        return Carried(
            self.markers + other.markers, self.on_attention + other.on_attention, self.on_layer or other.on_layer
        )


@dataclass(frozen=True)
class PatchedLayers:
    """The parts of schemes that the layers of a decoder must have.

    A layer may be wrapped by FSDP, activation checkpointing or regional compilation. These wrappers look up unknown
    attributes in the layer.

    Attributes:
        layers: path from the decoder to its list of layers.
        attention: path from a layer to its attention.
        carried: the parts of each layer; a single entry if all layers must have the same.
        at_first: whether the first layer, and no other, must own a module of position vectors.
    """

    layers: str
    attention: str
    carried: tuple[Carried, ...]
    at_first: bool = False

    def problem(self, decoder: nn.Module) -> str | None:
        """Return what is wrong with a decoder's layers and what to do, or None if nothing is wrong."""
        layers: Any = decoder.get_submodule(self.layers)
        name, are_alike = type(decoder).__name__, len(self.carried) == 1
        if not are_alike and len(layers) != len(self.carried):
            return f"{name} has {len(layers)} layers now, and had {len(self.carried)} when it was patched: {REMEDY}"
        for index, layer in enumerate(layers):
            carried = self.carried[0 if are_alike else index]
            marked = all(hasattr(layer, marker) for marker in carried.markers)
            if not marked or not self._has_on_attention(layer, carried.on_attention):
                if not are_alike:
                    return f"layer {index} of {name} does not carry what patching put into layer {index}: {REMEDY}"
                return (
                    f"layer {index} of {name} is not patched, though the model is: it was added or changed "
                    f"afterwards. Append copies of patched layers (copy.deepcopy) instead, or {REMEDY}"
                )
            if carried.on_layer and not hasattr(layer, "posenc"):
                return f"layer {index} of {name} lost its position vectors: {REMEDY}"
            if self.at_first and hasattr(layer, "posenc") != (index == 0):
                return (
                    f"layer {index} of {name} is {'no longer' if index == 0 else 'a copy of'} the first layer, which "
                    f"adds the position vectors to the hidden states: {REMEDY}"
                )
        return None

    def _has_on_attention(self, layer: object, attributes: tuple[str, ...]) -> bool:
        """Return whether a layer's attention has all of these attributes."""
        if not attributes:
            return True
        module = layer
        for name in self.attention.split("."):
            module = getattr(module, name, None)
        return all(hasattr(module, attribute) for attribute in attributes)


def require_patched_layers(decoder: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Forward pre-hook of a patched decoder: refuse to run if a layer lacks a part of its scheme."""
    if (problem := on_decoder(decoder).layers.problem(decoder)) is not None:
        raise UnsupportedModelError(problem)
