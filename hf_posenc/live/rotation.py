"""How a live model turns queries and keys, and which other rotations its attention can carry."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from ..dims import Dims
from ..errors import UnsupportedModelError
from ..families.base import Family, Resolved, base_model_type
from ..layer_state import on_layer
from ..placement import RopeParameters
from ..schemes.base import RotaryScheme, by_layer_type
from ..schemes.rope import Rope
from ..upstream.rotary import (
    COORDINATES,
    ORIGINAL_LENGTH,
    PartialRotary,
    make_rotary,
    own_rotation,
    scaling_types,
    turned_dimensions,
)


@dataclass(frozen=True)
class BaseRotation:
    """The rotation of a live model.

    Attributes:
        family: what is known of its architecture.
        found: its modules.
        config: the model's.
        sizes: of the attention of each layer that has one, by the layer's index.
    """

    family: Family
    found: Resolved
    config: PreTrainedConfig
    sizes: Mapping[int, Dims]

    @property
    def dims(self) -> Dims:
        """Sizes of what is rotated, in the first layer that has attention."""
        return self.dims_of(next(iter(self.sizes)))

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of what is rotated: heads, or the part of each head that is set apart for rotation."""
        part = self.family.rotation.attention_part
        if part is None:
            return self.sizes[layer]
        return replace(self.sizes[layer], head_dim=getattr(self.found.attention_of[layer], part))

    @property
    def pairs(self) -> str:
        """Which dimensions the base turns together, `half` or `interleaved`."""
        flag = self.family.rotation.config_interleaved
        return "interleaved" if flag is not None and getattr(self.config, flag) else self.family.rotation.pairs

    @property
    def length(self) -> int | None:
        """The length the base was made for, in tokens, or None if its config does not say."""
        return getattr(self.config, self.family.names.config_length, None)

    @property
    def coordinates(self) -> int:
        """Number of coordinates among which a position's pairs are divided; 0 where a position is one number."""
        key = self.family.rotation.parameter_coordinates
        return 0 if key is None else len(self.config.rope_parameters.get(key) or range(COORDINATES))

    def own(self) -> RopeParameters:
        """Return the base's own `rope_parameters`, as far as transformers reads them."""
        facts = self.family.rotation
        own = own_rotation(self._config(), self.dims, self.found.rotary, facts.slices_rotary, self._sizes_by_type())
        if facts.parameter_coordinates is not None:  # no choice of a scheme's
            own.pop(facts.parameter_coordinates, None)
        return own

    def is_own(self, scheme: RotaryScheme) -> bool:
        """Return whether a fitted scheme is what the base does by itself where it rotates, in every respect."""
        if self.found.rotary is None or (parameters := self.parameters(scheme)) is None:
            return False
        part = self.family.rotation.attention_part
        if part is not None and turned_dimensions(self.found.rotary) != self.dims.head_dim:
            return False  # Mistral 4's, which without a scaling has angles for whole heads
        return parameters == self.parameters(self._complete(Rope()))

    def fit(self, scheme: RotaryScheme, layers: tuple[int, ...]) -> RotaryScheme:
        """Return a scheme with everything that was not given taken from the base.

        Args:
            scheme: as the caller gave it.
            layers: indices of its layers.

        Raises:
            UnsupportedModelError: if the base's attention cannot carry the rotation.
            ValueError: if the angles cannot be computed.
        """
        self._check_attention(scheme, layers)
        dims = self.dims_of(layers[0])
        if dims.head_dim % 2:
            raise ValueError(f"{scheme.name}: heads of size {dims.head_dim} cannot be split into pairs")
        scheme.check(dims)
        scheme = self._complete(scheme)
        facts = self.family.rotation
        if facts.parameter_coordinates is not None and not facts.slices_rotary and scheme.leaves_dimensions:
            raise UnsupportedModelError(
                f"{scheme.name}: {self._name} divides all pairs of a head among time, height and width, so that "
                "partial_rotary_factor cannot leave some out"
            )
        parameters = self.parameters(scheme)
        if parameters is None:
            if len({self.sizes[layer].head_dim for layer in layers}) > 1:
                raise UnsupportedModelError(
                    f"{scheme.name}: the layers of {self._name} have heads of different sizes, and its frequencies are "
                    "made for one: name layers that are alike"
                )
            pairs = len(scheme.build(dims).frequencies(torch.device("cpu")))
            if not 0 < pairs <= dims.head_dim // 2:
                raise ValueError(f"{scheme.name}: {pairs} frequencies do not fit heads of {dims.head_dim}")
        elif not self.is_own(scheme):
            kinds = by_layer_type(parameters).values()
            starts = [kind.get(ORIGINAL_LENGTH) for kind in kinds if kind.get("rope_type") != "default"]
            if self.length is None and None in starts:
                raise ValueError(
                    f"{scheme.name}: a scaling starts from the length that the base was made for, which the config of "
                    f"{self._name} does not say: set config.{self.family.names.config_length}"
                )
            self._check_coordinates(scheme, self.make(parameters))  # which raises if it cannot
        return scheme

    def is_stock(self, scheme: RotaryScheme, layers: tuple[int, ...]) -> bool:
        """Return whether a stock class would turn these layers of a patched model as it does with a fitted scheme."""
        parameters = scheme.rope_parameters()
        if self.found.rotary is None or parameters is None:
            return False
        if any(on_layer(self.found.layers[layer]).rotation is not None for layer in layers):
            return False
        if scheme.leaves_dimensions and not self.family.rotation.slices_rotary:
            return False
        if (size := self.family.rotation.attention_size) is None:
            return True
        turned = int(self.dims.head_dim * parameters.get("partial_rotary_factor", 1.0))
        return all(getattr(self.found.attention_of[layer], size) == turned for layer in layers)

    def parameters(self, scheme: RotaryScheme) -> RopeParameters | None:
        """Return a fitted scheme's `rope_parameters` as this base writes them: whole heads need no saying.

        Raises:
            ValueError: if they name layer types that the base does not have.
        """
        parameters = scheme.rope_parameters()
        if parameters is None:
            return None
        written = by_layer_type(self.own())
        wanted = {kind: dict(rotation) for kind, rotation in by_layer_type(parameters).items()}
        if None in wanted and None not in written:
            wanted = {kind: dict(wanted[None]) for kind in written}
        if set(wanted) != set(written):
            has = ", ".join(str(kind) for kind in written if kind is not None)
            raise ValueError(
                f"{scheme.name}: rope_parameters name the layer types {', '.join(map(str, wanted))}, this base has "
                f"{has or 'none'}"
            )
        for kind, rotation in wanted.items():
            if rotation.setdefault("partial_rotary_factor", 1.0) == 1.0:
                if "partial_rotary_factor" not in written[kind]:
                    del rotation["partial_rotary_factor"]
        if (key := self.family.rotation.parameter_coordinates) is not None and key in self.config.rope_parameters:
            wanted[None][key] = self.config.rope_parameters[key]
        return wanted[None] if None in wanted else wanted

    def make(self, parameters: RopeParameters) -> nn.Module:
        """Return a rotary module of transformers with these `rope_parameters`."""
        facts = self.family.rotation
        rotary = make_rotary(
            parameters, self._config(), self.dims, self.found.rotary, facts.slices_rotary, self._sizes_by_type()
        )
        for each in rotary.modules():
            if isinstance(each, PartialRotary):
                each.takes = each.gives = facts.angles
        return rotary

    def scaling_with(self, layer: int, parameters: RopeParameters) -> float:
        """Return the factor of the scores that a layer's attention would have, made with these `rope_parameters`."""
        attention: Any = self.found.attention_of[layer]
        config = copy.deepcopy(self.config)
        config.rope_parameters = parameters
        index = getattr(attention, str(self.family.names.attention_layer_index))
        with torch.device("meta"):
            return float(type(attention)(config, index).scaling)

    @property
    def _thetas(self) -> set[float]:
        """The bases of frequencies of the layers that rotate, where each layer has one."""
        name = self.family.rotation.config_thetas
        return set() if name is None else {theta for theta in getattr(self.config, name) if theta}

    @property
    def _name(self) -> str:
        return base_model_type(self.config)

    def _check_attention(self, scheme: RotaryScheme, layers: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError if the base's attention cannot be made to turn its queries and keys so."""
        if self.found.rotary is None and self.family.attention is None:
            raise UnsupportedModelError(
                f"{scheme.name}: this {self._name} rotates nothing, and its attention makes queries and keys where no "
                "rotation can be put"
            )
        if self.family.rotation.config_thetas is not None and len(self._thetas) != 1:
            raise UnsupportedModelError(
                f"{scheme.name}: the layers of this {self._name} have {len(self._thetas)} bases of frequencies, and "
                f"one rotation stands for one: config.{self.family.rotation.config_thetas}"
            )
        if self.found.rotary is not None and scheme.pairs not in (None, self.pairs):
            by = "halves" if self.pairs == "half" else "neighbouring dimensions"
            raise UnsupportedModelError(
                f"{scheme.name}: {self._name} rotates by {by} in its own code, so layout={scheme.pairs!r} cannot be "
                "had: the rows of its query and key projections would have to be reordered"
            )
        if self.family.rotation.rotates is not None and scheme.layers is not None:
            still = [layer for layer in layers if not self.found.rotated[layer]]
            if still:
                raise UnsupportedModelError(
                    f"{scheme.name}: {self._name} leaves layer {', '.join(map(str, still))} unrotated in its own code: "
                    f"name layers among {', '.join(str(i) for i, turned in enumerate(self.found.rotated) if turned)}"
                )

    def _sizes_by_type(self) -> dict[str, int]:
        """Return the size of heads by layer type where they differ."""
        if len({dims.head_dim for dims in self.sizes.values()}) == 1:
            return {}
        return {self.config.layer_types[layer]: dims.head_dim for layer, dims in self.sizes.items()}

    def _check_coordinates(self, scheme: RotaryScheme, rotary: nn.Module) -> None:
        """Raise UnsupportedModelError if a rotary module cannot divide its pairs among the coordinates."""
        if not self.coordinates:
            return
        device = next(rotary.buffers()).device
        try:
            rotary(torch.zeros(1, device=device), torch.zeros(self.coordinates, 1, 1, dtype=torch.long, device=device))
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{scheme.name}: {self._name} divides the pairs that it turns among time, height and width, and a "
                "partial_rotary_factor other than its own would make them more or fewer"
            ) from error

    def _complete(self, scheme: RotaryScheme) -> RotaryScheme:
        return scheme.with_base(self.own(), self.length, scaling_types(), self.pairs)

    def _config(self) -> PreTrainedConfig:
        """Return the config that says how the base rotates, one made for that where its own says it otherwise."""
        if self._thetas:
            config = copy.copy(self.config)
            config.rope_parameters = {**config.rope_parameters, "rope_theta": min(self._thetas)}
            return config
        if self.family.attention is None:
            return self.config
        config = LlamaConfig(**({} if self.length is None else {"max_position_embeddings": self.length}))
        config.rope_parameters = self.family.attention.rope_parameters(self.config)
        return config
