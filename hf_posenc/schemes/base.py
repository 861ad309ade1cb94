"""The base classes of schemes: hyper-parameters (a frozen dataclass), where a scheme acts, and the modules it builds.

Notation everywhere in this package: `B` batch, `H` query heads, `K` key-value heads. `Q` and `L` are the lengths of
queries and keys, `D` the head size, `E` the hidden size, `N` the number of layers. `d = i - j >= 0` is the distance of
query `i` from key `j`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from torch import nn
from transformers import initialization as init

from ..did_you_mean import did_you_mean
from ..dims import Dims, Layers
from ..modules import Native, PositionEmbedding, PositionModule, Reference, Rotation, ScoreModule, Shared
from ..placement import OnHidden, OnRotary, OnScores, Placement, RopeParameters

EVERY_SCHEME = ("layers", "window")
"""The hyper-parameters that every scheme has."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Hyper-parameters of a position encoding; each field is one, and is written to the checkpoint.

    Attributes:
        layers: which decoder layers it is for: a list of indices, a slice as text (`"3::4"`: every fourth from the
            fourth on), a layer type of the config (`"full_attention"`), or None for every layer. The others keep what
            the base has.
        window: size of a sliding window in tokens that its layers get: a query sees itself and the `window - 1` tokens
            before it. None leaves the base's own.
    """

    name: ClassVar[str]
    """Registered name."""
    known_as: ClassVar[Mapping[str, str]] = {}
    """Names under which people look for it -> how to ask for that, which the error of an unknown scheme suggests."""

    layers: Layers = None
    window: int | None = None

    @property
    def acts_on(self) -> Placement:
        """Where it acts."""
        raise NotImplementedError(type(self).__name__)

    def hyperparameters(self) -> dict[str, Any]:
        """Return every hyper-parameter by name, as values that JSON can hold: the scheme's own, then every scheme's."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {**{key: value for key, value in values.items() if key not in EVERY_SCHEME}, **values}

    def __str__(self) -> str:
        """Return the name with every hyper-parameter; those of every scheme only where they are given."""
        values = self.hyperparameters()
        shown = {key: value for key, value in values.items() if key not in EVERY_SCHEME or value is not None}
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    @property
    def limit(self) -> int | None:
        """Number of positions that exist, or None if there is no limit."""
        return None

    def resolve(self, native: Native, dims: Dims) -> Scheme:
        """Return the scheme with every choice that depends on the base model made; ValueError if it cannot be."""
        return self

    def without_scaling(self) -> Scheme:
        """Return the scheme that a base was trained with, where this one is stretched to longer contexts."""
        return self

    def one_of(self, field: str, choices: tuple[str, ...]) -> None:
        """Raise ValueError, naming the choices, unless the field has one of the given values."""
        if getattr(self, field) not in choices:
            value = getattr(self, field)
            raise ValueError(
                f"{self.name}: {field} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}"
            )

    def positive(self, field: str, kind: Any = (int, float)) -> None:
        """Raise TypeError or ValueError unless the field is a number of this kind above 0."""
        value: Any = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "an integer" if kind is int else "a number"
            raise TypeError(f"{self.name}: {field} must be {wanted}, not {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{self.name}: {field} must be positive and finite, not {value!r}")

    def count(self, field: str) -> None:
        """Raise TypeError or ValueError unless the field is a whole number, 0 or more."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{self.name}: {field} must be an integer, not {value!r}")
        if value < 0:
            raise ValueError(f"{self.name}: {field} must be 0 or more, not {value!r}")

    def flags(self, *names: str) -> None:
        """Raise TypeError unless each of the fields is a bool."""
        for field in names:
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{self.name}: {field} must be True or False, not {getattr(self, field)!r}")

    @classmethod
    def parse(cls, hyperparameters: dict[str, Any]) -> Scheme:
        """Build the scheme from keyword arguments or a checkpoint's entry; TypeError names unknown ones."""
        known = sorted((field.name for field in fields(cls)), key=lambda name: name in EVERY_SCHEME)
        unknown = sorted(set(hyperparameters) - set(known))
        if unknown:
            raise TypeError(
                f"{cls.name} has no hyper-parameter {', '.join(unknown)}; it has {', '.join(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in hyperparameters.items()}
        return cls(**values)


class ScoreScheme(Scheme):
    """A scheme that changes attention scores: needs our attention function."""

    @property
    def acts_on(self) -> Placement:
        return OnScores()

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the hyper-parameters do not fit these sizes."""

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of one attention layer, parameters uninitialised until `reset_parameters`."""
        raise NotImplementedError(type(self).__name__)

    @property
    def share_layers(self) -> bool:
        """Whether one module serves all layers of the scheme, as a rule a hyper-parameter."""
        return False

    def build_shared(self, dims: Dims) -> PositionModule | None:
        """Return what the scheme's layers share (owned once by the model), or None."""
        return self.build(dims) if self.share_layers else None

    def attach_shared(self, module: ScoreModule, shared: Reference) -> nn.Module:
        """Return what goes on the attention, given its own module and a reference to the shared one."""
        return Shared(shared)


class EmbeddingScheme(Scheme):
    """A scheme that adds vectors to the hidden states, before the first layer or before each of its layers."""

    @property
    def acts_on(self) -> Placement:
        return OnHidden(every_layer=self.every_layer, share_layers=self.share_layers)

    @property
    def every_layer(self) -> bool:
        """Whether the vectors are added before each of the scheme's layers, or once at the input."""
        return False

    @property
    def share_layers(self) -> bool:
        """Whether one module makes the vectors of all layers, where they are added before each."""
        return True

    def build(self, dims: Dims) -> PositionEmbedding:
        """Return the module that makes the vectors."""
        raise NotImplementedError(type(self).__name__)


PROPORTIONAL = "proportional"
"""The `rope_type` that turns a share of whole heads itself: its cosines are as many as dimensions."""


def by_layer_type(parameters: RopeParameters) -> dict[Any, RopeParameters]:
    """Return transformers' `rope_parameters` by layer type; where all layers share them, by None."""
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return {**parameters}
    return {None: parameters}


class RotaryScheme(Scheme):
    """A scheme that turns pairs of dimensions of queries and keys by angles that depend on the position."""

    @property
    def acts_on(self) -> Placement:
        return OnRotary()

    @property
    def pairs(self) -> str | None:
        """Which dimensions are a pair: `half`, `(u, u + R/2)`, `interleaved`, `(2u, 2u + 1)`; None: the base's own."""
        return None

    @property
    def leaves_dimensions(self) -> bool:
        """Whether its `rope_parameters` turn a share of each head only; `proportional` turns the rest by 0."""
        kinds = by_layer_type(self.rope_parameters() or {}).values()
        return any(
            each.get("partial_rotary_factor", 1.0) < 1 and each.get("rope_type") != PROPORTIONAL for each in kinds
        )

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the hyper-parameters do not fit these sizes."""

    def with_base(
        self, rotation: RopeParameters, length: int | None, types: tuple[str, ...], pairs: str = "half"
    ) -> RotaryScheme:
        """Return the scheme with everything that was None taken from the base.

        Args:
            rotation: the base's own `rope_parameters`, by layer type where it has several; empty if it rotates nothing.
            length: that the base was made for, in tokens.
            types: the `rope_type` values that the installed transformers can compute.
            pairs: which dimensions the base turns together; `half` if it rotates nothing.

        Raises:
            ValueError: if it cannot be had on this base.
        """
        return self

    def rope_parameters(self) -> RopeParameters | None:
        """Return transformers' `rope_parameters`, if transformers' own rotary modules are to make the angles.

        One dict, or one by layer type. One is for all layers, also of a base that has several types. Without
        `partial_rotary_factor` whole heads are turned.
        """
        return None

    def build(self, dims: Dims) -> Rotation:
        """Return the module that makes the angles; not called where there are `rope_parameters`."""
        raise NotImplementedError(type(self).__name__)


__all__ = [
    "EVERY_SCHEME",
    "PROPORTIONAL",
    "EmbeddingScheme",
    "RotaryScheme",
    "Scheme",
    "ScoreScheme",
    "by_layer_type",
    "init",
]
