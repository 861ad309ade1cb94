"""What a patch keeps on the modules of a model: one attribute on each attention, each layer and the decoder.

Parameters and buffers are in modules of their own (`posenc`). These objects are frozen, so that a change puts another
one in their place, which an undo can take back. They are read with getattr, because torch.compile guards that an
attribute is missing then, and does not guard a `__dict__` that lacks it.
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
    """What our attention function, or the class in front of a stock attention, has to know of one layer.

    Attributes:
        engine: `auto` or an engine's name.
        window: sliding window in tokens, beside what the mask says.
        heads: number of query heads that must arrive; None: the config's.
        family: model type of the family whose methods attend in place of the stock forward.
        rotation: the module of the cosines and sines by which that turns queries and keys.
        pairs: dimensions that it turns together, `half` or `interleaved`.
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
    """What the pre-hook of a decoder layer has to know.

    Attributes:
        rotation: the module whose cosines and sines the layer gets in place of the base's.
        rotation_arguments: what that module is called with beside positions: the layer's type, where there are several.
        coordinates: number of coordinates that a position has there; 0 where it is one number.
        family: model type, where the layer can only read its positions from the mask.
        arguments: names of the parameters of the layer's forward, in that case.
    """

    rotation: Reference | None = None
    rotation_arguments: tuple[str, ...] = ()
    coordinates: int = 0
    family: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnDecoder:
    """What the pre-hooks of a decoder have to know.

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
    """Return what is kept on an attention; the defaults for a stock one."""
    return getattr(attention, STATE, None) or OnAttention()


def on_layer(layer: nn.Module) -> OnLayer:
    """Return what is kept on a decoder layer; the defaults for a stock one."""
    return getattr(layer, STATE, None) or OnLayer()


def on_decoder(decoder: nn.Module) -> OnDecoder:
    """Return what is kept on a decoder; the defaults for a stock one."""
    return getattr(decoder, STATE, None) or OnDecoder()


def use_engine(attention: nn.Module, engine: str) -> None:
    """Have a patched attention compute by an engine, `auto` or an engine's name."""
    setattr(attention, STATE, replace(on_attention(attention), engine=engine))
