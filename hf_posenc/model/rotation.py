"""How a live model rotates queries and keys, and which other rotations its attention can carry."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..core.dims import Dims
from ..core.errors import UnsupportedModelError
from ..core.layer_state import on_layer
from ..families.base import Family, Resolved
from ..schemes.base import ReadRotation, RopeParameters, RotaryScheme, by_layer_type, depends_on_length
from ..schemes.far_rope import BaseAngles
from ..schemes.rope import Rope
from ..transformers_glue.rotary import (
    COORDINATES,
    ORIGINAL_LENGTH,
    PartialRotary,
    RotarySource,
    frequency_table,
    make_rotary,
    own_rotation,
    read_frequencies,
    turned_dimensions,
)


@dataclass(frozen=True)
class BaseRotation:
    """The rotation of a live model.

    Attributes:
        family: facts about the model's architecture.
        modules: those modules of the model that the family names.
        config: the model's config.
        sizes: layer index -> sizes of the layer's attention, for the layers that have attention.
        length: the length in tokens that the base was trained at, or None if the config does not say it.
        name: the stock model type.
    """

    family: Family
    modules: Resolved
    config: PreTrainedConfig
    sizes: Mapping[int, Dims]
    length: int | None
    name: str

    @property
    def dims(self) -> Dims:
        """`dims_of` the first layer that has attention."""
        return self.dims_of(next(iter(self.sizes)))

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of a layer's attention, with the rotary part of a head as `head_dim` if it is separate."""
        attribute = self.family.rotation.attention_part
        if attribute is None:
            return self.sizes[layer]
        return replace(self.sizes[layer], head_dim=getattr(self.modules.attention_of[layer], attribute))

    @property
    def pairs(self) -> str:
        """Which two dimensions the base rotates as a pair, `half` or `interleaved`."""
        flag = self.family.rotation.config_interleaved
        return "interleaved" if flag is not None and getattr(self.config, flag) else self.family.rotation.pairs

    @property
    def coordinates(self) -> int:
        """Number of coordinates among which a position's pairs are divided; 0 where a position is one number."""
        key = self.family.rotation.parameter_coordinates
        return 0 if key is None else len(self.config.rope_parameters.get(key) or range(COORDINATES))

    def own(self) -> RopeParameters:
        """Return the base's `rope_parameters`, with the keys that somebody reads and schemes can choose."""
        facts = self.family.rotation
        fixed = (facts.parameter_coordinates, *facts.parameter_temperature[:1])
        return {key: value for key, value in own_rotation(self._source()).items() if key not in fixed}

    def is_own(self, scheme: RotaryScheme) -> bool:
        """Return whether a fitted scheme is exactly the base's own rotation."""
        if self.modules.rotary is None or (parameters := self.parameters(scheme)) is None:
            return False
        has_rotary_part = self.family.rotation.attention_part is not None
        if has_rotary_part and turned_dimensions(self.modules.rotary) != self.dims.head_dim:
            return False  # Mistral 4 without a scaling has angles for whole heads
        return parameters == self.parameters(self._complete(Rope()))

    def fit(self, scheme: RotaryScheme, layers: tuple[int, ...]) -> RotaryScheme:
        """Return a scheme, with unset hyper-parameters taken from the base.

        Args:
            scheme: the scheme, with the caller's hyper-parameters.
            layers: indices of the scheme's layers.

        Raises:
            UnsupportedModelError: if the base's attention cannot carry the rotation.
            ValueError: if the angles cannot be computed.
        """
        self._check_attention(scheme, layers)
        dims = self.dims_of(layers[0])
        if dims.head_dim % 2:
            raise ValueError(f"{scheme.name}: heads of size {dims.head_dim} cannot be split into pairs")
        scheme.check(dims)
        given = scheme
        scheme = self._complete(scheme)
        facts = self.family.rotation
        uneven = UnsupportedModelError(
            f"{scheme.name}: {self.name} divides the pairs that it turns among time, height and width, and a "
            "partial_rotary_factor other than its own would make them more or fewer"
        )
        if facts.parameter_coordinates is not None and not facts.slices_rotary and scheme.leaves_dimensions:
            raise uneven
        parameters = self.parameters(scheme)
        if parameters is None:
            if len({self.sizes[layer].head_dim for layer in layers}) > 1:
                raise UnsupportedModelError(
                    f"{scheme.name}: the layers of {self.name} have heads of different sizes, and the scheme's "
                    "frequencies fit one size: name layers with heads of one size"
                )
            pairs = turned_dimensions(scheme.build(dims)) // 2
            if not 0 < pairs <= dims.head_dim // 2:
                raise ValueError(f"{scheme.name}: {pairs} frequencies do not fit heads of {dims.head_dim}")
        elif not self.is_own(scheme):
            rotations = by_layer_type(parameters).values()
            lengths = [each.get(ORIGINAL_LENGTH) for each in rotations if each.get("rope_type") != "default"]
            if self.length is None and None in lengths:
                raise ValueError(
                    f"{scheme.name}: a scaling starts from the length that the base was trained at, which the config "
                    f"of {self.name} does not say: set config.{self.family.names.config_length}"
                )
            with torch.device("cpu"):  # a checkpoint is loaded on the device meta, where there are no numbers
                rotary = self.make(parameters)  # raises ValueError if it cannot
                try:
                    if self.coordinates:
                        rotary(torch.zeros(1), torch.zeros(self.coordinates, 1, 1, dtype=torch.long))
                except RuntimeError as error:
                    raise uneven from error
            if (warning := given.overridden(self.own())) is not None:
                warnings.warn(warning, stacklevel=2)
        return scheme

    def is_stock(self, scheme: RotaryScheme, layers: tuple[int, ...]) -> bool:
        """Return whether a stock class would rotate layers of a patched model as their fitted scheme does."""
        parameters = scheme.rope_parameters()
        if self.modules.rotary is None or parameters is None:
            return False
        if any(on_layer(self.modules.layers[layer]).rotation is not None for layer in layers):
            return False
        if scheme.leaves_dimensions and not self.family.rotation.slices_rotary:
            return False
        if (size_attribute := self.family.rotation.attention_size) is None:
            return True
        rotary_dim = int(self.dims.head_dim * parameters.get("partial_rotary_factor", 1.0))
        return all(getattr(self.modules.attention_of[layer], size_attribute) == rotary_dim for layer in layers)

    def parameters(self, scheme: RotaryScheme) -> RopeParameters | None:
        """Return a fitted scheme's `rope_parameters` with the keys that this base's config has, or None.

        Raises:
            ValueError: if they name other layer types than the base has.
        """
        parameters = scheme.rope_parameters()
        return None if parameters is None else self._fit_parameters(parameters, scheme.name)

    def _fit_parameters(self, parameters: RopeParameters, name: str = Rope.name) -> RopeParameters:
        """Return `rope_parameters` of the scheme `name` with the keys that this base's config has."""
        of_base = by_layer_type(self.own())
        wanted = {layer_type: dict(rotation) for layer_type, rotation in by_layer_type(parameters).items()}
        if None in wanted and None not in of_base:
            wanted = {layer_type: dict(wanted[None]) for layer_type in of_base}
        if set(wanted) != set(of_base):
            base_types = ", ".join(str(layer_type) for layer_type in of_base if layer_type is not None)
            raise ValueError(
                f"{name}: rope_parameters name the layer types {', '.join(map(str, wanted))}, this base has "
                f"{base_types or 'none'}"
            )
        for layer_type, rotation in wanted.items():
            if rotation.get("rope_type") == "longrope" and self.length is not None:
                rotation.setdefault(ORIGINAL_LENGTH, of_base[layer_type].get(ORIGINAL_LENGTH) or self.length)
            if "attention_factor" in rotation:
                for magnitude in self.family.rotation.parameter_magnitudes:
                    rotation.setdefault(magnitude, rotation["attention_factor"])
            if rotation.setdefault("partial_rotary_factor", 1.0) == 1.0:
                if "partial_rotary_factor" not in of_base[layer_type]:
                    del rotation["partial_rotary_factor"]
        if (key := self.family.rotation.parameter_coordinates) is not None and key in self.config.rope_parameters:
            wanted[None][key] = self.config.rope_parameters[key]
        return wanted[None] if None in wanted else wanted

    def angles(self, name: str, layers: tuple[int, ...]) -> dict[int, BaseAngles | None]:
        """Return how the base rotates each of these layers, or None for a layer that it leaves unrotated.

        A base that rotates nothing gets the rotation of `rope` without hyper-parameters.

        Args:
            name: the scheme that rotates in place of the base, for messages.
            layers: indices of layers with attention.

        Raises:
            UnsupportedModelError: if the base's own code works on rotated queries and keys, or its frequencies depend
                on the length of the context.
        """
        facts = self.family.rotation
        if facts.norms_after is not None:
            raise UnsupportedModelError(f"{name}: {self.name} {facts.norms_after}, so keys cannot be cached before it")
        of_types = by_layer_type(self._fit_parameters(self._complete(Rope()).rope_parameters() or {}))
        found: dict[int, BaseAngles | None] = {}
        made: dict[Any, BaseAngles] = {}
        for layer in layers:
            found[layer] = None
            if not any(self.modules.rotated) or self.modules.rotated[layer]:
                theta = None if facts.config_thetas is None else getattr(self.config, facts.config_thetas)[layer]
                layer_type = None if None in of_types else self.config.layer_types[layer]
                if depends_on_length(own := of_types[layer_type]):
                    raise UnsupportedModelError(
                        f"{name}: the frequencies of this {self.name} depend on the length of the context "
                        f"({own['rope_type']}), so they are no table from which distances could be changed"
                    )
                if (key := (layer_type, theta, self.sizes[layer].head_dim)) not in made:
                    parameters = own if theta is None else {**own, "rope_theta": theta}
                    with torch.device("cpu"):  # a checkpoint is loaded on the device meta, where there are no numbers
                        rotary = self.make(parameters if layer_type is None else of_types)
                        frequencies, factor = frequency_table(rotary, layer_type)
                    made[key] = BaseAngles(
                        tuple(-w for w in frequencies) if facts.backwards else frequencies,
                        factor,
                        "half" if facts.lists_halves else self.pairs,
                        self.sizes[layer].head_dim - self.dims_of(layer).head_dim,
                    )
                found[layer] = made[key]
        return found

    def make(self, parameters: RopeParameters) -> nn.Module:
        """Return a rotary module of transformers with these `rope_parameters`."""
        rotary = make_rotary(parameters, self._source())
        if isinstance(rotary, PartialRotary):
            rotary.takes = rotary.gives = self.family.rotation.angles
        return rotary

    def scaling_with(self, layer: int, parameters: RopeParameters) -> float:
        """Return the `scaling` that a layer's attention would have if it were built with these `rope_parameters`."""
        attention: Any = self.modules.attention_of[layer]
        config = copy.deepcopy(self.config)
        config.rope_parameters = parameters
        index = getattr(attention, str(self.family.names.attention_layer_index))
        with torch.device("meta"):
            return float(type(attention)(config, index).scaling)

    @property
    def _thetas(self) -> set[float]:
        """The different `rope_theta` of the layers that rotate, if the config lists them by layer; else empty."""
        name = self.family.rotation.config_thetas
        return set() if name is None else {theta for theta in getattr(self.config, name) if theta}

    def _check_attention(self, scheme: RotaryScheme, layers: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError if the base's attention cannot rotate queries and keys with a scheme."""
        if self.modules.rotary is None and self.family.attention is None:
            raise UnsupportedModelError(
                f"{scheme.name}: this {self.name} rotates nothing, and no rotation can be put between the projections "
                "and the scores of its attention"
            )
        if self.family.rotation.config_thetas is not None and len(self._thetas) != 1:
            raise UnsupportedModelError(
                f"{scheme.name}: the layers of this {self.name} have {len(self._thetas)} bases of frequencies, and "
                f"a rotation has one: config.{self.family.rotation.config_thetas}"
            )
        if self.modules.rotary is not None and scheme.pairs not in (None, self.pairs):
            by = "halves" if self.pairs == "half" else "neighbouring dimensions"
            raise UnsupportedModelError(
                f"{scheme.name}: {self.name} rotates by {by} in its own code, so layout={scheme.pairs!r} is "
                "impossible: the rows of its query and key projections would have to be reordered"
            )
        if self.family.rotation.rotates is not None and scheme.layers is not None:
            rotated = self.modules.rotated
            if unrotated := [layer for layer in layers if not rotated[layer]]:
                raise UnsupportedModelError(
                    f"{scheme.name}: {self.name} leaves layer {', '.join(map(str, unrotated))} unrotated in its own "
                    f"code: name layers among {', '.join(str(i) for i, rotates in enumerate(rotated) if rotates)}"
                )

    def _complete(self, scheme: RotaryScheme) -> RotaryScheme:
        completed = scheme.with_base(self.own(), self.length, tuple(ROPE_INIT_FUNCTIONS), self.pairs)
        return completed.with_frequencies(self._read_frequencies, self.length)

    def _read_frequencies(self, parameters: RopeParameters) -> dict[Any, ReadRotation]:
        """Return the frequencies of `rope_parameters` on this base, see `ReadFrequencies`."""
        fitted = self._fit_parameters(parameters)
        with torch.device("cpu"):  # a checkpoint is loaded on the device meta, where there are no numbers
            return read_frequencies(self.make(fitted), fitted, self.family.rotation)

    def _source(self) -> RotarySource:
        """Return what rotary modules of this base are made from."""
        sizes = {dims.head_dim for dims in self.sizes.values()}
        types = self.config.layer_types if len(sizes) > 1 else ()
        by_type = {types[layer]: dims.head_dim for layer, dims in self.sizes.items() if types}
        return RotarySource(self._config(), self.dims, self.modules.rotary, self.family.rotation, by_type)

    def _config(self) -> PreTrainedConfig:
        """Return a config whose `rope_parameters` describe the base's rotation: the model's, a copy, or LLaMA's."""
        if self._thetas:
            config = copy.copy(self.config)
            config.rope_parameters = {**config.rope_parameters, "rope_theta": min(self._thetas)}
            return config
        if self.family.attention is None:
            return self.config
        config = LlamaConfig(**({} if self.length is None else {"max_position_embeddings": self.length}))
        config.rope_parameters = self.family.attention.rope_parameters(self.config)
        return config
