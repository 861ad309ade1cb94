"""The base classes of schemes: hyper-parameters (a frozen dataclass), where a scheme acts, and the modules it builds.

Notation everywhere in this package: `B` batch, `H` query heads, `K` key-value heads. `Q` and `L` are the lengths of
queries and keys, `D` the head size, `E` the hidden size, `N` the number of layers. `d = i - j >= 0` is the distance of
query `i` from key `j`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from torch import nn
from transformers import initialization as init

from ..did_you_mean import did_you_mean
from ..dims import Dims, Layers
from ..modules import (
    Native,
    PositionEmbedding,
    PositionModule,
    QueryModule,
    Reference,
    Rotation,
    ScoreModule,
    Shared,
    TokenModule,
)
from ..placement import OnHidden, OnQueries, OnRotary, OnRotatedScores, OnScores, OnTokens, Placement, RopeParameters

EVERY_SCHEME = ("layers", "window", "sinks")
"""The hyper-parameters that every scheme has."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Hyper-parameters of a position encoding. Every field is a hyper-parameter, and is written to the checkpoint.

    Attributes:
        layers: the decoder layers of the scheme: a list of indices, a slice as text (`"3::4"`: every fourth layer,
            beginning with the fourth), a layer type of the config (`"full_attention"`), `"rest"` for the layers that no
            other scheme names, or None for every layer. All other layers keep the base's positions.
        window: sliding window of its layers in tokens: a query sees its own token and the `window - 1` tokens before.
            None leaves the base's window.
        sinks: number of tokens at the start of each sequence, or of each packed document, that every query sees, also
            when the window has passed them (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453). Padding does not count.
            Distances to them do not grow with the text: they end at `window + sinks - 1`, as in StreamingLLM, which
            counts inside its cache. A rotation keeps the keys' own positions instead, so there they do grow, except in
            the kinds of `far_rope` that bound them. None means 0. The learned sink logits of some bases are something
            else: no tokens.
    """

    name: ClassVar[str]
    """Registered name."""
    known_as: ClassVar[Mapping[str, str]] = {}
    """Other name of the scheme -> how to ask for the scheme. The error about an unknown scheme suggests it."""

    added: ClassVar[tuple[str, ...]] = ("sinks",)
    """Hyper-parameters that the first checkpoints of the scheme lack. None means what those checkpoints compute."""

    layers: Layers = None
    window: int | None = None
    sinks: int | None = None

    @property
    def acts_on(self) -> Placement:
        """Where the scheme acts."""
        raise NotImplementedError(type(self).__name__)

    def hyperparameters(self) -> dict[str, Any]:
        """Return name -> JSON value of every hyper-parameter, those that every scheme has last."""
        values = {key: _with_lists(value) for key, value in asdict(self).items()}
        return {**{key: value for key, value in values.items() if key not in EVERY_SCHEME}, **values}

    def __str__(self) -> str:
        """Return the scheme's name with its hyper-parameters, those that every scheme has only where they are set."""
        values = self.hyperparameters()
        shown = {key: value for key, value in values.items() if key not in EVERY_SCHEME or value is not None}
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    @property
    def limit(self) -> int | None:
        """Number of positions that exist, or None if there is no limit."""
        return None

    @property
    def acts_from(self) -> int:
        """Number of tokens in the shortest context that the fitted scheme changes."""
        return 0

    def resolve(self, native: Native, dims: Dims) -> Scheme:
        """Return the scheme with every choice made that depends on the base model; ValueError if one cannot be made."""
        return self

    def without_scaling(self) -> Scheme:
        """Return the scheme without what stretches it to longer contexts, as the base was trained with it."""
        return self

    def one_of(self, field: str, choices: tuple[str, ...]) -> None:
        """Raise ValueError unless the field's value is one of the choices."""
        if getattr(self, field) not in choices:
            value = getattr(self, field)
            raise ValueError(
                f"{self.name}: {field} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}"
            )

    def positive(self, field: str, kind: Any = (int, float)) -> None:
        """Raise TypeError or ValueError unless the field is a positive number of this type."""
        value: Any = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "an integer" if kind is int else "a number"
            raise TypeError(f"{self.name}: {field} must be {wanted}, not {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{self.name}: {field} must be positive and finite, not {value!r}")

    def whole_number(self, field: str) -> None:
        """Raise TypeError or ValueError unless the field is a whole number, 0 or more."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{self.name}: {field} must be an integer, not {value!r}")
        if value < 0:
            raise ValueError(f"{self.name}: {field} must be 0 or more, not {value!r}")

    def flags(self, *names: str) -> None:
        """Raise TypeError unless all these fields are bools."""
        for field in names:
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{self.name}: {field} must be True or False, not {getattr(self, field)!r}")

    @classmethod
    def parse(cls, hyperparameters: dict[str, object]) -> Scheme:
        """Build the scheme from keyword arguments or a checkpoint's entry; TypeError names unknown hyper-parameters."""
        known = sorted((field.name for field in fields(cls)), key=lambda name: name in EVERY_SCHEME)
        unknown = sorted(set(hyperparameters) - set(known))
        if unknown:
            raise TypeError(
                f"{cls.name} has no hyper-parameter {', '.join(unknown)}; it has {', '.join(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in hyperparameters.items()}
        return cls(**values)


def _with_lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, as JSON has them."""
    return [_with_lists(each) for each in value] if isinstance(value, tuple) else value


class ScoreScheme(Scheme):
    """A scheme that changes attention scores. It needs the attention function of this package."""

    @property
    def acts_on(self) -> Placement:
        return OnScores()

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the hyper-parameters do not fit these sizes."""

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of one attention layer. `reset_parameters` initialises its parameters."""
        raise NotImplementedError(type(self).__name__)

    @property
    def share_layers(self) -> bool:
        """Whether one module serves all layers of the scheme. In most schemes a field overrides this."""
        return False

    def build_shared(self, dims: Dims) -> PositionModule | None:
        """Return the module that the scheme's layers share, which the model owns, or None."""
        return self.build(dims) if self.share_layers else None

    def attach_shared(self, module: ScoreModule, shared: Reference) -> nn.Module:
        """Return the module to put on an attention, from the layer's module and a reference to the shared module."""
        return Shared(shared)


class RotatedScheme(ScoreScheme):
    """A scheme that rotates queries and keys at each call, by the base's own frequencies. Keys are cached unrotated."""

    @property
    def acts_on(self) -> Placement:
        return OnRotatedScores(self)

    def turns(self, number: int) -> bool:
        """Return whether the fitted scheme rotates anything in a layer that the base rotates.

        Args:
            number: place of the layer among the scheme's layers, from 0.
        """
        return True

    def with_base(self, length: int | None, angles: Mapping[int, Any], sizes: Mapping[int, Dims]) -> ScoreScheme:
        """Return the scheme with everything that was None taken from the base.

        Args:
            length: length in tokens at which the base was trained, or None if its config does not say it.
            angles: layer index -> how the base rotates this layer of the scheme, or None where it does not.
            sizes: layer index -> sizes of the layer's attention.

        Raises:
            ValueError: if the scheme does not fit the base.
        """
        raise NotImplementedError(type(self).__name__)

    def build_at(self, number: int, dims: Dims, angles: Any) -> ScoreModule:
        """Return the module of one layer with the base's rotation; `build` gives it that of `rope`.

        Args:
            number: place of the layer among the scheme's layers, from 0.
            dims: sizes of its attention.
            angles: how the base rotates the layer, or None where it does not.
        """
        raise NotImplementedError(type(self).__name__)


class QueryScheme(Scheme):
    """A scheme that changes queries, and joins the scheme or the base's positions that its layers have."""

    @property
    def acts_on(self) -> Placement:
        return OnQueries(by_position=True)

    @property
    def share_layers(self) -> bool:
        """Whether one module serves all layers of the scheme. In most schemes a field overrides this."""
        return False

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the hyper-parameters do not fit these sizes."""

    def with_length(self, length: int | None) -> QueryScheme:
        """Return the scheme with what depends on the length in tokens at which the base was trained."""
        return self

    def build(self, dims: Dims) -> QueryModule | TokenModule:
        """Return the module of one attention layer. `reset_parameters` initialises its parameters."""
        raise NotImplementedError(type(self).__name__)


class TokenScheme(QueryScheme):
    """A scheme that makes numbers of hidden states, and joins the scheme or the base's positions that its layers have.

    `build` returns a `TokenModule`. Its numbers stay beside the keys in the cache.
    """

    @property
    def acts_on(self) -> Placement:
        return OnTokens()


class EmbeddingScheme(Scheme):
    """A scheme that adds vectors to the hidden states, before the first layer or before every layer of the scheme."""

    @property
    def acts_on(self) -> Placement:
        return OnHidden(every_layer=self.every_layer, share_layers=self.share_layers)

    @property
    def every_layer(self) -> bool:
        """Whether the vectors are added before every layer of the scheme, instead of once at the input."""
        return False

    @property
    def share_layers(self) -> bool:
        """Whether one module makes the vectors of all layers. It matters with `every_layer`."""
        return True

    def build(self, dims: Dims) -> PositionEmbedding:
        """Return the module that makes the vectors."""
        raise NotImplementedError(type(self).__name__)


PROPORTIONAL = "proportional"
"""The `rope_type` that rotates a share of a head, with cosines for the whole head: the other pairs have angle 0."""


def by_layer_type(parameters: RopeParameters) -> dict[Any, RopeParameters]:
    """Return layer type -> `rope_parameters` of transformers; the key is None where all layers share them."""
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return {**parameters}
    return {None: parameters}


def depends_on_length(parameters: RopeParameters) -> bool:
    """Return whether transformers computes other frequencies from `rope_parameters` in a longer context."""
    kind = parameters.get("rope_type")
    return kind == "dynamic" or (kind == "longrope" and parameters["short_factor"] != parameters["long_factor"])


ReadFrequencies = Callable[[RopeParameters], Mapping[Any, tuple[tuple[float, ...], str | None]]]
"""Function of `rope_parameters` that returns, for each layer type, the frequencies of the rotated pairs in radians per
token, and why they are not all there is to the rotation, or None. Where all layers share them, the layer type is None.
"""


class RotaryScheme(Scheme):
    """A scheme that rotates pairs of dimensions of queries and keys by angles that depend on the position."""

    @property
    def acts_on(self) -> Placement:
        return OnRotary()

    @property
    def pairs(self) -> str | None:
        """Which dimensions are a pair: `half`, `(u, u + R/2)`; `interleaved`, `(2u, 2u + 1)`; None for the base's."""
        return None

    @property
    def leaves_dimensions(self) -> bool:
        """Whether its `rope_parameters` leave dimensions of a head out; `proportional` rotates them by 0 instead."""
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
            rotation: the base's `rope_parameters`, by layer type where they differ; empty if it rotates nothing.
            length: length in tokens at which the base was trained.
            types: the `rope_type` values that the installed transformers can compute.
            pairs: which dimensions the base rotates together; `half` if it rotates nothing.

        Raises:
            ValueError: if the scheme is impossible on this base.
        """
        return self

    def with_frequencies(self, read: ReadFrequencies, length: int | None) -> RotaryScheme:
        """Return the scheme, after `with_base`, with everything that is computed from frequencies.

        Args:
            read: see `ReadFrequencies`.
            length: length in tokens at which the base was trained.

        Raises:
            ValueError: if the scheme is impossible on this base.
        """
        return self

    def rope_parameters(self) -> RopeParameters | None:
        """Return `rope_parameters` if transformers' rotary modules shall make the angles, or None.

        They are one dict for all layers, whatever their types, or layer type -> dict. Without `partial_rotary_factor`
        whole heads are rotated.
        """
        return None

    def build(self, dims: Dims) -> Rotation:
        """Return the module that makes the angles; not called where there are `rope_parameters`."""
        raise NotImplementedError(type(self).__name__)


__all__ = [
    "EVERY_SCHEME",
    "PROPORTIONAL",
    "EmbeddingScheme",
    "QueryScheme",
    "ReadFrequencies",
    "RotaryScheme",
    "RotatedScheme",
    "Scheme",
    "ScoreScheme",
    "TokenScheme",
    "by_layer_type",
    "depends_on_length",
    "init",
]
