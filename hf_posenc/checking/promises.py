"""What a config says about the rotation of a layer, in the terms of a fingerprint."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..live.base_model import BaseModel
from ..placement import RopeParameters
from ..schemes.base import by_layer_type
from ..upstream.rotary import ORIGINAL_LENGTH


@dataclass(frozen=True)
class Promise:
    """The rotation that a config asks for in one layer.

    Attributes:
        parameters: transformers' `rope_parameters` of the layer.
        size: D, the size of the head, or of its part that is set apart for the rotation.
        length: length in tokens at which the model was trained, `max_position_embeddings` of the config.
        layout: `half` or `interleaved`; None if nobody says it.
        backwards: whether pairs turn by minus their angles; None if nobody says it.
    """

    parameters: RopeParameters
    size: int
    length: int
    layout: str | None
    backwards: bool | None

    @property
    def scaling(self) -> str:
        """The type of scaling; `default` for none."""
        return str(self.parameters.get("rope_type") or self.parameters.get("type") or "default")

    @property
    def theta(self) -> float:
        """The base of the frequencies."""
        return float(self.parameters["rope_theta"])

    @property
    def original_length(self) -> int:
        """The length in tokens from which a scaling that depends on the length changes."""
        return int(self.parameters.get(ORIGINAL_LENGTH) or self.length)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change beyond `original_length`."""
        short, long = self.frequencies(self.original_length), self.frequencies(2 * self.original_length)
        return not torch.equal(short, long)

    def frequencies(self, length: int) -> Tensor:
        """Return the frequencies of the pairs that turn, (F,) float64, in a sequence of a length."""
        if self.scaling == "default":
            return self.unscaled()
        config = LlamaConfig(
            hidden_size=self.size, num_attention_heads=1, head_dim=self.size, max_position_embeddings=self.length
        )
        config.rope_parameters = {**self.parameters, "rope_type": self.scaling, ORIGINAL_LENGTH: self.original_length}
        # `dynamic` counts from the trained length, whatever else the config says.
        inverse, _ = ROPE_INIT_FUNCTIONS[self.scaling](config, torch.device("cpu"), seq_len=length)
        return inverse[inverse != 0].double()

    def unscaled(self) -> Tensor:
        """Return the frequencies without the scaling, (F,) float64."""
        turned = int(self.size * self.parameters.get("partial_rotary_factor", 1.0))
        return self.theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)


def promise_of(base: BaseModel, layer: int) -> Promise | None:
    """Return the rotation that the config of a stock model asks for in a layer, or None for no rotation."""
    rotation, family, config = base.rotation, base.family, base.config
    facts = family.rotation
    if not _rotates(base, layer):
        return None
    raw = config.rope_parameters if family.attention is None else family.attention.rope_parameters(config)
    parameters = _of_layer(config, raw, layer)
    if facts.config_thetas is not None:
        parameters["rope_theta"] = getattr(config, facts.config_thetas)[layer]
    layout: str | None = rotation.pairs
    size = rotation.dims_of(layer).head_dim
    if facts.attention_part is not None:
        parameters.pop("partial_rotary_factor", None)  # the part that is set apart turns as a whole
        layout = None  # attentions reorder it before it turns, so queries and keys do not show the layout
    elif len({dims.head_dim for dims in base.sizes.values()}) == 1:
        size = getattr(config, "head_dim", None) or size
    return Promise(parameters, size, base.length or 0, layout, facts.backwards)


def _rotates(base: BaseModel, layer: int) -> bool:
    switches = base.family.rotation.config_switches
    if switches is not None:
        return bool(getattr(base.config, switches)[layer])
    if base.family.attention is not None:
        return bool(base.family.attention.rope_parameters(base.config))
    return base.rotated[layer]


def unknown_promise(config: PreTrainedConfig, layer: int, size: int) -> Promise | None:
    """Return the rotation that the config of a model without a family asks for, or None if it names no rotation.

    Args:
        config: the config.
        layer: index of the layer.
        size: size of the heads as they were seen.
    """
    parameters = _of_layer(config, getattr(config, "rope_parameters", None) or {}, layer)
    if "rope_theta" not in parameters:
        return None
    size = getattr(config, "qk_rope_head_dim", None) or size
    return Promise(parameters, size, getattr(config, "max_position_embeddings", None) or 0, None, None)


def _of_layer(config: Any, parameters: RopeParameters, layer: int) -> RopeParameters:
    """Return a copy of the `rope_parameters` of one layer."""
    by_type = by_layer_type(parameters)
    return copy.deepcopy(dict(by_type[None] if None in by_type else by_type.get(config.layer_types[layer], {})))
