"""A model that is checked: what its family says, and which rotation its config promises, in a fingerprint's terms."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..core.errors import UnsupportedModelError
from ..families.base import RotationFacts
from ..model.base_model import BaseModel
from ..model.patch_record import patch_of
from ..schemes.base import RopeParameters, by_layer_type
from ..transformers_glue.rotary import ORIGINAL_LENGTH, read_frequencies
from .runner import Runner


@dataclass(frozen=True)
class Promise:
    """The rotation that a config asks for in one layer.

    Attributes:
        parameters: transformers' `rope_parameters` of the layer.
        size: D, the size of the head, or of its part that is set apart for the rotation.
        length: length in tokens at which the model was trained, `max_position_embeddings` of the config.
        dtype: dtype of the model, to which `model.to` rounds frequencies.
        layout: `half` or `interleaved`; None if nobody says it.
        backwards: whether pairs turn by minus their angles; None if nobody says it.
        rescaled: whether weights multiply the dimensions after the turn; None if nobody says it.
        rotary: a new rotary module of the model type's own class, which says what a scaling does; None for no class.
        layer_type: the type of the layer, where the module has frequencies for several types.
        coordinates: number of coordinates of a position; 0 where it is one number.
    """

    parameters: RopeParameters
    size: int
    length: int
    dtype: torch.dtype
    layout: str | None = None
    backwards: bool | None = None
    rescaled: bool | None = None
    rotary: nn.Module | None = None
    layer_type: str | None = None
    coordinates: int = 0

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
        return not torch.equal(self.frequencies(), self.frequencies(2 * self.original_length))

    @property
    def first_pair(self) -> tuple[int, int]:
        """The dimensions of a head that turn fastest."""
        return 0, 1 if self.layout == "interleaved" else len(self._rotation(self.original_length)[0])

    @property
    def factor(self) -> float:
        """The factor on cosines and sines, of YaRN and LongRoPE; 1 if nobody says it."""
        return self._rotation(self.original_length)[1]

    def frequencies(self, length: int | None = None) -> Tensor:
        """Return the frequencies of the pairs that turn, (F,) float64, in a sequence of a length, or within it."""
        frequencies, _ = self._rotation(self.original_length if length is None else length)
        return frequencies[frequencies != 0]  # some scalings list the pairs that stand

    def unscaled(self) -> Tensor:
        """Return the frequencies without the scaling, (F,) float64."""
        turned = int(self.size * self.parameters.get("partial_rotary_factor", 1.0))
        return self.theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)

    def _rotation(self, length: int) -> tuple[Tensor, float]:
        """Return frequencies and the factor on cosines and sines in a sequence of a length."""
        parameters = {**self.parameters, "rope_type": self.scaling}
        if self.scaling == "default":
            return self.unscaled(), 1.0
        if self.rotary is not None:
            positions = torch.full((self.coordinates, 1, 1) if self.coordinates else (1, 1), length - 1)
            by_type: Any = parameters if self.layer_type is None else {self.layer_type: parameters}
            rotary = copy.deepcopy(self.rotary)
            read = read_frequencies(rotary, by_type, RotationFacts(), positions)[self.layer_type]
            return torch.tensor(read.frequencies, dtype=torch.float64), read.factor
        sizes = {"hidden_size": self.size, "num_attention_heads": 1, "head_dim": self.size}
        config = LlamaConfig(**sizes, max_position_embeddings=self.length)
        config.rope_parameters = {**parameters, ORIGINAL_LENGTH: self.original_length}
        # `dynamic` counts from the trained length, whatever else the config says.
        inverse, _ = ROPE_INIT_FUNCTIONS[self.scaling](config, torch.device("cpu"), seq_len=length)
        return inverse.double(), 1.0


class Subject(Runner):
    """Runs a model that is checked.

    Attributes:
        base: the model as its family describes it; None if no family serves it.
        patch: the record of its patch; None for a stock model.
        config: its config.
        length: trained length in tokens; None if the config does not say it.
        layers: its decoder layers.
        answers: question -> whether nothing is wrong, once that is known; None if it could not be measured.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """Read the model."""
        self.config: Any = model.config
        self.base: BaseModel | None = None
        self.length: int | None = getattr(self.config, "max_position_embeddings", None)
        try:
            self.base = BaseModel.of(model)
            self.length, self.layers = self.base.length, self.base.modules.layers
        except UnsupportedModelError:  # so take the list of as many modules as the config says, or the longest one
            lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
            count = getattr(self.config, "num_hidden_layers", None)
            self.layers = next((each for each in lists if len(each) == count), max(lists, key=len, default=[]))
        facts = None if self.base is None else self.base.family.rotation
        super().__init__(model, seed, coordinates=facts is not None and facts.parameter_coordinates is not None)
        self.patch = patch_of(model)
        self.answers: dict[str, bool | None] = {}

    @cached_property
    def stock_rotary(self) -> nn.Module | None:
        """A new rotary module of the model type's own class in transformers, or None if it has no such class."""
        base = self.base
        if base is None or base.family.attention is not None or base.family.rotation.config_thetas is not None:
            return None
        for stock in type(base.modules.rotary).__mro__:
            if stock.__module__.startswith("transformers.models."):
                with torch.device("cpu"):
                    module: nn.Module = stock(copy.deepcopy(base.config))
                return module
        return None

    def promised(self, layer: int, size: int) -> Promise | None:
        """Return the rotation that the config of a stock model asks for in a layer, or None for no rotation.

        Args:
            layer: index of the layer.
            size: size of its heads as they were seen.
        """
        base, config, dtype = self.base, self.config, self.model.dtype
        raw: RopeParameters = getattr(config, "rope_parameters", None) or {}
        if base is None:
            parameters = _of_layer(config, raw, layer)
            size = getattr(config, "qk_rope_head_dim", None) or size
            return Promise(parameters, size, self.length or 0, dtype) if "rope_theta" in parameters else None
        facts, attention = base.family.rotation, base.family.attention
        rotates = base.rotated[layer]
        if attention is not None:
            raw = attention.rope_parameters(config)
            rotates = bool(raw)
        if facts.config_switches is not None:
            rotates = bool(getattr(config, facts.config_switches)[layer])
        if not rotates:
            return None
        parameters = _of_layer(config, raw, layer)
        if facts.config_thetas is not None:
            parameters["rope_theta"] = getattr(config, facts.config_thetas)[layer]
        layout: str | None = base.rotation.pairs
        size = base.rotation.dims_of(layer).head_dim
        if facts.attention_part is not None:
            parameters.pop("partial_rotary_factor", None)  # the part that is set apart turns as a whole
            layout = None  # attentions reorder it before it turns, so queries and keys do not show the layout
        elif len({dims.head_dim for dims in base.sizes.values()}) == 1:
            size = getattr(config, "head_dim", None) or size
        return Promise(
            parameters,
            size,
            self.length or 0,
            dtype,
            layout,
            facts.backwards,
            rescaled=facts.norms_after is not None,
            rotary=self.stock_rotary,
            layer_type=None if None in by_layer_type(raw) else config.layer_types[layer],
            coordinates=base.rotation.coordinates,
        )

    @cached_property
    def changing(self) -> Promise | None:
        """A rotation of the model, stock or of a scheme, that changes beyond its original length, or None."""
        base, promises = self.base, []
        if base is not None and self.patch is None:
            promises = [promise for layer in base.sizes if (promise := self.promised(layer, 0)) is not None]
        elif base is not None and self.patch is not None:
            size, length, dtype = base.rotation.dims.head_dim, self.length or 0, self.model.dtype
            by_scheme = (scheme.rotations() for scheme in self.patch.schemes)
            rotations = (rotation for rotations in by_scheme for rotation in rotations if rotation)
            promises = [Promise(each, size, length, dtype) for one in rotations for each in by_layer_type(one).values()]
        return next((promise for promise in promises if promise.depends_on_length), None)


def _of_layer(config: Any, parameters: RopeParameters, layer: int) -> RopeParameters:
    """Return a copy of the `rope_parameters` of one layer."""
    by_type = by_layer_type(parameters)
    return copy.deepcopy(dict(by_type[None] if None in by_type else by_type.get(config.layer_types[layer], {})))
