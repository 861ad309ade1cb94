"""The state of a patch: one object on each attention, one on each layer, and one on the decoder.

Modules (`posenc`) hold the parameters and buffers. The objects here are frozen. A change replaces an object, so that an
undo can restore the old one. Read the objects with getattr: torch.compile then guards that the attribute is missing. It
would not guard a `__dict__` without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from .modules import Reference
from .positions import DensePositions, Positions

STATE = "posenc_state"
"""Name of the attribute that holds the state."""

MARKER = "hf_posenc_"
"""Prefix of the name of a buffer on every layer. The scheme's name follows it. Nothing reads the buffer's value.

A model with other positions lacks its key in the state dict. Without that key, the weights of a scheme without
parameters would load into the stock model."""

BASE_MARKER = MARKER + "base"
"""Marker of a layer that keeps the base's positions in a patched model."""


class _State:
    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the state of a module; the defaults for a stock one."""
        return getattr(module, STATE, None) or cls()


@dataclass(frozen=True)
class OnAttention(_State):
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
        exchange: the function that fetches keys from other processes, inside `context_parallel`; otherwise None.
        ordered: whether position ids that fall inside a document are refused. `verify` reverses positions.
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
    ordered: bool = True

    def within_window(self, positions: Positions | DensePositions) -> Positions | DensePositions:
        """Return positions with the attention's own window, if it has one."""
        return positions if self.window is None else positions.within(self.window, self.kept_first)


@dataclass(frozen=True)
class OnLayer(_State):
    """The state of a decoder layer, for its pre-hook.

    Attributes:
        rotation: reference to the module whose cosines and sines replace the base's in this layer.
        rotation_arguments: further arguments of that module: the layer's type, if the model has several types.
        coordinates: number of coordinates of a position that the module takes; 0 where a position is one number.
        family: model type, if the layer can only read its positions from the mask; otherwise empty.
        arguments: names of the parameters of the layer's forward.
        parts: paths of the buffers and attributes that patching put into the layer and its attention.
    """

    rotation: Reference | None = None
    rotation_arguments: tuple[str, ...] = ()
    coordinates: int = 0
    family: str = ""
    arguments: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnDecoder(_State):
    """The state of a decoder, for its pre-hook.

    Attributes:
        layers: path from the decoder to its list of layers.
        parts: `OnLayer.parts` that its layers must have. The last entry is for all further layers.
        count: number of layers that it must have, if they differ; None for any number.
        at_first: whether the first layer, and no other, adds position vectors.
        arguments: names of the parameters of the decoder's forward, without `self`.
        attends: whether the layers need the attention function of this package.
        adds_vectors: whether vectors are added, which no negative position has.
        holds_numbers: whether schemes keep numbers beside the keys in the cache.
        hands_down: whether layers and attention get the position ids from our hook.
        rows: if a layer takes one number per position where the decoder takes several coordinates, the number of rows
            in which the decoder takes them, one for the text included; otherwise 0.
        exchange: the same function as on the attentions.
        ordered: the same as on the attentions, where the mask carries the position ids.
    """

    layers: str = ""
    parts: tuple[tuple[str, ...], ...] = ((),)
    count: int | None = None
    at_first: bool = False
    arguments: tuple[str, ...] = ()
    attends: bool = False
    adds_vectors: bool = False
    holds_numbers: bool = False
    hands_down: bool = False
    rows: int = 0
    exchange: Any = None
    ordered: bool = True


on_attention, on_layer, on_decoder = OnAttention.of, OnLayer.of, OnDecoder.of
"""Each returns the state of an attention, a layer or a decoder; the defaults for a stock one."""
