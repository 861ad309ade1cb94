"""The state of a patch: one object on each attention, one on each layer, and one on the decoder.

Modules (`posenc`) hold the parameters and buffers. The objects here are frozen. A change replaces an object, so that an
undo can restore the old one. Read the objects with getattr: torch.compile then guards that the attribute is missing. It
would not guard a `__dict__` without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .modules import Reference
from .positions import DensePositions, Positions

STATE = "posenc_state"
"""Name of the attribute that holds the state."""


@dataclass(frozen=True)
class OnAttention:
    """The state of one attention. Our attention function and the class that replaces a stock attention read it.

    Attributes:
        engine: `auto` or an engine's name.
        backend: the flash attention of transformers that computes calls in place of an engine; empty for none.
        window: sliding window in tokens, in addition to the mask.
        kept_first: number of first tokens that stay visible behind that window, the `sinks` of a scheme. The learned
            sink logits of some bases, `Call.sinks`, are something else.
        heads: number of query heads that calls must have; None means the number in the config.
        family: model type of the family whose methods replace the stock forward.
        rotation: reference to the module whose cosines and sines those methods use to rotate queries and keys.
        pairs: which dimensions those methods rotate together, `half` or `interleaved`.
        cache: index and name of the argument of the attention that holds the cache, for schemes that compute a number
            for each token.
        exchange: the `Exchange` that fetches keys from other processes, inside `context_parallel`; otherwise None.
    """

    engine: str = "auto"
    backend: str = ""
    window: int | None = None
    kept_first: int = 0
    heads: int | None = None
    family: str = ""
    rotation: Reference | None = None
    pairs: str = "half"
    cache: tuple[int, str] = (0, "")
    exchange: Any = None

    def within_window(self, positions: Positions | DensePositions) -> Positions | DensePositions:
        """Return positions with the attention's own window, if it has one."""
        return positions if self.window is None else positions.within(self.window, self.kept_first)


@dataclass(frozen=True)
class OnLayer:
    """The state of a decoder layer, for its pre-hook.

    Attributes:
        rotation: reference to the module whose cosines and sines replace the base's in this layer.
        rotation_arguments: further arguments of that module: the layer's type, if the model has several types.
        coordinates: number of coordinates of a position that the module takes; 0 where a position is one number.
        family: model type, if the layer can only read its positions from the mask; otherwise empty.
        arguments: names of the parameters of the layer's forward.
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
        layers: the `hf_posenc.patching.patched_layers.PatchedLayers` with which the pre-hook checks the layers.
        arguments: names of the parameters of the decoder's forward, without `self`.
        rows: number of rows in which the decoder takes positions of several coordinates, one for the text included.
        exchange: the same `Exchange` as on the attentions.
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
    """Set the engine of a patched attention: `auto` or an engine's name."""
    setattr(attention, STATE, replace(on_attention(attention), engine=engine))
