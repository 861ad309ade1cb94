"""The state of a patch: one object on each attention, one on each layer, and one on the decoder.

Parameters and buffers are in modules of their own (`posenc`). The objects are frozen. A change puts another one in
their place, which an undo can take back. They are read with getattr, because torch.compile then guards that an
attribute is missing. It does not guard a `__dict__` that lacks one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .modules import Reference

STATE = "posenc_state"
"""Name of the attribute."""


@dataclass(frozen=True)
class OnAttention:
    """The state of one attention. Our attention function reads it, and so does the class in front of a stock one.

    Attributes:
        engine: `auto` or an engine's name.
        window: sliding window in tokens, beside what the mask says.
        heads: number of query heads that must arrive; None means the config's.
        family: model type of the family whose methods attend in place of the stock forward.
        rotation: the module of the cosines and sines by which they rotate queries and keys.
        pairs: dimensions that they rotate together, `half` or `interleaved`.
        exchange: fetches the keys of other processes, inside `context_parallel`.
    """

    engine: str = "auto"
    window: int | None = None
    heads: int | None = None
    family: str = ""
    rotation: Reference | None = None
    pairs: str = "half"
    exchange: Any = None


@dataclass(frozen=True)
class OnLayer:
    """The state of a decoder layer, for its pre-hook.

    Attributes:
        rotation: the module whose cosines and sines the layer gets in place of the base's.
        rotation_arguments: further arguments of that module: the layer's type, where there are several.
        coordinates: number of coordinates that a position has there; 0 where it is one number.
        family: model type, where the layer can only read its positions from the mask.
        arguments: names of the parameters of the layer's forward, in both cases.
    """

    rotation: Reference | None = None
    rotation_arguments: tuple[str, ...] = ()
    coordinates: int = 0
    family: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnDecoder:
    """The state of a decoder, for its pre-hooks.

    Attributes:
        layers: what its layers must carry, a `hf_posenc.patching.layers.PatchedLayers`.
        arguments: names of the parameters of its forward, without `self`.
        rows: number of rows in which it takes positions of several coordinates, one for the text included.
        exchange: as on the attentions, inside `context_parallel`.
    """

    layers: Any = None
    arguments: tuple[str, ...] = ()
    rows: int = 0
    exchange: Any = None


def on_attention(attention: nn.Module) -> OnAttention:
    """Return the state of an attention; the defaults for a stock one."""
    return getattr(attention, STATE, None) or OnAttention()


def on_layer(layer: nn.Module) -> OnLayer:
    """Return the state of a decoder layer; the defaults for a stock one."""
    return getattr(layer, STATE, None) or OnLayer()


def on_decoder(decoder: nn.Module) -> OnDecoder:
    """Return the state of a decoder; the defaults for a stock one."""
    return getattr(decoder, STATE, None) or OnDecoder()


def use_engine(attention: nn.Module, engine: str) -> None:
    """Have a patched attention compute by an engine, `auto` or an engine's name."""
    setattr(attention, STATE, replace(on_attention(attention), engine=engine))
