"""The base classes of schemes: hyper-parameters (a frozen dataclass), where a scheme acts, and the modules it builds.

Notation everywhere in this package: `B` batch, `H` query heads, `K` key-value heads. `Q` and `L` are the lengths of
queries and keys, `D` the head size, `E` the hidden size, `N` the number of layers. `d = i - j >= 0` is the distance of
query `i` from key `j`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import initialization

from ..core.did_you_mean import did_you_mean
from ..core.dims import Dims, Layers
from ..core.errors import UnsupportedModelError
from ..core.modules import Native, PositionModule, ScoreModule, Shared, parameter

if TYPE_CHECKING:
    from ..families.base import Family
    from ..model.base_model import BaseModel
    from ..patching.changes import ModelSite

RopeParameters = dict[str, Any]
"""transformers' `rope_parameters`."""

init = initialization
"""transformers' initialization of parameters, which leaves those that a checkpoint has as they are."""

EVERY_SCHEME = ("layers", "window", "sinks")
"""The hyper-parameters that every scheme has."""


@dataclass(frozen=True)
class StockForm:
    """The positions that a stock checkpoint of a patched model would have to hold.

    Attributes:
        turned: whether each layer is rotated; a stock checkpoint has only one rotation.
        table: whether the vectors at the input become the base's own table.
        waves: whether waves of the distance become more dimensions of heads, see `checkpoints.wide_heads`.
        within_length: whether the waves are what the scheme adds only within a length.
        windows: the sliding window of each layer that a scheme has given one, in tokens.
        biases: layer -> a map of hidden states and profiles, which the base's own bias by distance shall have.
    """

    turned: tuple[bool, ...]
    table: bool = False
    waves: bool = False
    within_length: bool = False
    windows: dict[int, int] = field(default_factory=dict)
    biases: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def unturned(self, layers: Sequence[int], **changes: Any) -> StockForm:
        """Return the form with these layers unrotated, and with other changes."""
        return replace(self, turned=tuple(is_so and i not in layers for i, is_so in enumerate(self.turned)), **changes)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Hyper-parameters of a position encoding. Every field is a hyper-parameter, and is written to the checkpoint.

    The class also puts the scheme into a model, and makes every decision that follows from where it acts: whether its
    layers must attend through this package, which layers must respond to positions, what a stock checkpoint can hold.
    So no other code tests the class of a scheme.

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

    place: ClassVar[str]
    """Where it acts, for messages and tables."""
    joins: ClassVar[bool] = False
    """Whether it adds to the positions of its layers, and does not replace them."""
    put_order: ClassVar[int] = 0
    """Its place among the schemes that join a layer: smaller numbers act first."""
    scales_queries: ClassVar[bool] = False
    """Whether it multiplies queries by a factor."""
    uses_tokens: ClassVar[bool] = False
    """Whether it computes numbers from the hidden states of each token."""
    uses_queries: ClassVar[bool] = False
    """Whether it computes numbers from the hidden state of each query, which no cache keeps."""
    computes_scores: ClassVar[bool] = False
    """Whether its module computes the scores of an attention, which only one can."""
    needs_queries: ClassVar[bool] = False
    """Whether it needs access to the family's queries and keys."""
    keeps_frequencies: ClassVar[bool] = False
    """Whether it rotates by the frequencies that the base's config gives, in place of the base."""

    layers: Layers = None
    window: int | None = None
    sinks: int | None = None

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

    @property
    def share_layers(self) -> bool:
        """Whether one module serves all layers of the scheme. In most schemes a field overrides this."""
        return False

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the hyper-parameters do not fit these sizes."""

    def build(self, dims: Dims) -> Any:
        """Return the module of one layer. `reset_parameters` initialises its parameters."""
        raise NotImplementedError(type(self).__name__)

    def resolve(self, native: Native, dims: Dims) -> Scheme:
        """Return the scheme with every choice made that depends on the base model; ValueError if one cannot be made."""
        return self

    def without_scaling(self) -> Self:
        """Return the scheme without what stretches it to longer contexts, as the base was trained with it."""
        return self

    def possible_layers(self, base: BaseModel) -> tuple[int, ...]:
        """Return the indices of the layers in which the scheme can act: those with attention."""
        return tuple(base.sizes)

    def fit(self, base: BaseModel) -> Scheme:
        """Return the scheme with missing hyper-parameters from the base's config; do not change the model.

        Raises:
            UnsupportedModelError: if the base cannot carry the scheme.
            ValueError: if its hyper-parameters do not fit the base.
        """
        return self

    def check_sizes(self, base: BaseModel) -> None:
        """Raise ValueError or UnsupportedModelError if the scheme does not fit the sizes of its layers in a base."""
        if self.uses_queries:
            base.require_query_numbers(self.name, base.layers_of(self))
        shapes = set()
        for dims in dict.fromkeys(base.sizes[layer] for layer in base.layers_of(self)):
            self.check(dims)
            if self.share_layers:
                with torch.device("meta"):
                    shapes.add(tuple(parameter.shape for parameter in self.build(dims).parameters()))
        if len(shapes) > 1:
            raise UnsupportedModelError(
                f"{self.name}: the layers of {base.name} have heads of different numbers or sizes, so they cannot "
                "share parameters: take share_layers=False, or name layers of one size"
            )

    def silence(self, site: ModelSite) -> None:
        """Switch off the base's own positions in the layers of a site, if the scheme replaces them."""
        site.silence_rotation()

    def put(self, site: ModelSite) -> None:
        """Put the scheme into the layers of a site, after `silence`."""
        raise NotImplementedError(type(self).__name__)

    def layer_modules(self, site: ModelSite) -> Iterator[tuple[int, nn.Module]]:
        """Yield the layers of a site, each with its module, or with a stand-in for the one that they share."""
        owner = site.changes.add_to_decoder("posenc", self.build(site.base.dims)) if self.share_layers else None
        for layer in site.layers:
            yield layer, self.build(site.dims_of(layer)) if owner is None else Shared(owner)

    def keeps_positions(self, base: BaseModel) -> bool:
        """Return whether the layers of the fitted scheme keep the base's positions, at most stretched or added to."""
        return self.joins

    def dropped_by_stock_attention(self) -> str | None:
        """Name what stock attention functions would drop of the scheme; return None if they drop nothing."""
        return None if self.window is None else f"the window of {self.name}"

    def needs_our_attention(self, carrier: Family | BaseModel) -> bool:
        """Return whether the scheme's layers must attend through the attention function of this package."""
        return self.dropped_by_stock_attention() is not None

    def keeps_kernel(self) -> bool:
        """Return whether any kernel can compute the attention: the scheme changes, or widens, queries and keys only."""
        return False

    def rotations(self) -> tuple[RopeParameters | None, ...]:
        """Return the rotation that the fitted scheme puts into its layers, if it has one.

        Returns:
            An empty tuple without a rotation. Otherwise one entry: its `rope_parameters`, or None if transformers
            cannot compute its angles.
        """
        return ()

    def leaves_rotation(self, base: BaseModel) -> bool:
        """Return whether the base's own rotary module still rotates the layers of the fitted scheme."""
        return False

    def needs_one_coordinate(self, base: BaseModel) -> bool:
        """Return whether the scheme needs positions with one coordinate; those of some models have several."""
        return True

    def answers(self, layer: int, base: BaseModel) -> bool:
        """Return whether this layer of the scheme must respond when its positions change."""
        return True

    def answers_at_input(self, base: BaseModel) -> bool:
        """Return whether the hidden states that enter the first layer must respond to positions."""
        return False

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm | None:
        """Add the scheme to what a stock checkpoint would have to hold; return None if it cannot hold it.

        Args:
            base: the patched model, to which the scheme is fitted.
            form: what the checkpoint would have to hold without the scheme.
        """
        return None

    def one_of(self, field: str, choices: tuple[str, ...]) -> None:
        """Raise ValueError unless the field's value is one of the choices."""
        if (value := getattr(self, field)) not in choices:
            raise ValueError(
                f"{self.name}: {field} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}"
            )

    def number(
        self, field: str, holds: Callable[[Any], bool], wanted: str, kind: Any = (int, float), *, listed: bool = False
    ) -> None:
        """Raise TypeError unless the field is a number of this type, or a list of them; ValueError unless all hold."""
        value = _plain(getattr(self, field))
        numbers = tuple(value) if listed and isinstance(value, (list, tuple)) else (value,)
        if (listed and not isinstance(value, (list, tuple))) or any(
            isinstance(each, bool) or not isinstance(each, kind) for each in numbers
        ):
            type_wanted = "an integer" if kind is int else "a list of numbers" if listed else "a number"
            raise TypeError(f"{self.name}: {field} must be {type_wanted}, not {value!r}")
        if not all(map(holds, numbers)):
            raise ValueError(f"{self.name}: {field} must be {wanted}, not {value!r}")
        object.__setattr__(self, field, numbers if listed else value)

    def positive(self, field: str, kind: Any = (int, float)) -> None:
        """Raise TypeError or ValueError unless the field is a positive number of this type."""
        self.number(field, lambda value: 0 < value < float("inf"), "positive and finite", kind)

    def flags(self, *names: str) -> None:
        """Raise TypeError unless all these fields are bools."""
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{self.name}: {name} must be True or False, not {getattr(self, name)!r}")

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
        plain = {key: _plain(value) for key, value in hyperparameters.items()}
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()}
        return cls(**values)


def _plain(value: Any) -> Any:
    """Return a value with Python's numbers, which JSON can hold, in place of others, as numpy has them."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return index(value) if isinstance(value, Integral) else float(value)


def _with_lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, as JSON has them."""
    return [_with_lists(each) for each in value] if isinstance(value, tuple) else value


class ScoreScheme(Scheme):
    """A scheme that changes attention scores, by a `ScoreModule`. It needs the attention function of this package.

    With `joins = True` it changes scores beside the base's own rotation or table of positions. Queries and keys then
    arrive rotated.
    """

    place = "on attention scores"
    computes_scores = True
    two_sided: ClassVar[bool] = False
    """Whether scores are a product of two sides (`Form.sides`): any kernel computes them, over wider heads."""

    def fit(self, base: BaseModel) -> Scheme:
        self.check_sizes(base)
        base.require_our_attention(self.name, keeps_kernel=self.keeps_kernel())
        return self

    def keeps_kernel(self) -> bool:
        return self.two_sided and self.window is None

    def silence(self, site: ModelSite) -> None:
        if not self.joins:
            super().silence(site)

    def put(self, site: ModelSite) -> None:
        """Put one module on each attention."""
        for layer, module in self.layer_modules(site):
            site.on_attention(layer, module)

    def dropped_by_stock_attention(self) -> str | None:
        return self.name


class RotatedScheme(ScoreScheme):
    """A scheme that rotates queries and keys at each call, by the base's own frequencies. Keys are cached unrotated."""

    place = "on queries and keys, as scores are computed"
    keeps_frequencies = True

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

    def fit(self, base: BaseModel) -> Scheme:
        return ScoreScheme.fit(self.with_base(base.length, base.own_angles(self), base.sizes), base)

    def put(self, site: ModelSite) -> None:
        """Put a module with the base's rotation on each attention."""
        for number, (layer, angles) in enumerate(site.base.own_angles(self).items()):
            site.on_attention(layer, self.build_at(number, site.dims_of(layer), angles))

    def answers(self, layer: int, base: BaseModel) -> bool:
        """Return whether the layer is rotated: some bases leave layers unrotated, and some schemes do."""
        return _is_rotated(layer, base) and self.turns(base.layers_of(self).index(layer))

    def keeps_positions(self, base: BaseModel) -> bool:
        """Return whether the scheme changes only far keys of a base that rotates."""
        return any(base.rotated) and self.acts_from > 0


def _is_rotated(layer: int, base: BaseModel) -> bool:
    """Return whether a rotation acts in a layer: a base that rotates leaves some layers out."""
    return not any(base.rotated) or base.rotated[layer]


class QueryScheme(Scheme):
    """A scheme that changes queries by a `QueryModule`, and joins the scheme or the base's positions of its layers."""

    place = "on queries"
    joins = True
    put_order = 1
    scales_queries = True

    def with_length(self, length: int | None) -> QueryScheme:
        """Return the scheme with what depends on the length in tokens at which the base was trained."""
        return self

    def fit(self, base: BaseModel) -> Scheme:
        fitted = self.with_length(base.length)
        fitted.check_sizes(base)
        return fitted

    def silence(self, site: ModelSite) -> None:
        """Do nothing: the layer keeps its positions."""

    def put(self, site: ModelSite) -> None:
        """Put one module on the queries of each attention."""
        for layer, module in self.layer_modules(site):
            site.on_queries(layer, self.name, module)

    def dropped_by_stock_attention(self) -> str | None:
        return self.name

    def keeps_kernel(self) -> bool:
        return self.window is None


class TokenScheme(QueryScheme):
    """A scheme that makes numbers of hidden states, and joins the scheme or the base's positions that its layers have.

    `build` returns a `TokenModule`. Its numbers stay beside the keys in the cache, and are added to scores. A scheme
    that makes numbers of the queries alone says so by `uses_tokens = False` and `uses_queries = True`.
    """

    place = "on attention scores, by numbers of each token"
    scales_queries = False
    uses_tokens = True

    def fit(self, base: BaseModel) -> Scheme:
        if self.uses_tokens:
            base.require_token_numbers(self.name, base.layers_of(self))
        return super().fit(base)

    def answers(self, layer: int, base: BaseModel) -> bool:
        return False


class WeightScheme(QueryScheme):
    """A scheme that changes what an attention makes of its scores, beside the positions that its layers have.

    `build` returns a `QueryModule` whose `forward` gives the call a function: one of `Call.score_changes`, its
    `normaliser`, or one of `Call.weight_changes`.
    """

    place = "on attention weights"
    scales_queries = False

    def keeps_kernel(self) -> bool:
        return False

    def answers(self, layer: int, base: BaseModel) -> bool:
        return False


class HiddenNumbers(PositionModule):
    """Maps hidden states to numbers for each head and token, by the parameters `weight` (H N, E) and `bias` (H N,)."""

    def __init__(self, dims: Dims, width: int = 1, *, bias: float | None = None) -> None:
        """Make the parameters.

        Args:
            dims: sizes of the layer's attention.
            width: N, how many numbers a head has.
            bias: start of `bias`; None means that there is none.
        """
        super().__init__()
        self.heads, self.start = dims.num_heads, bias
        self.weight = parameter(dims.num_heads * width, dims.hidden_size)
        self.bias = None if bias is None else parameter(dims.num_heads * width)

    def reset_parameters(self) -> None:
        """Start with the same numbers for all tokens."""
        init.zeros_(self.weight)
        if self.bias is not None:
            init.constant_(self.bias, self.start)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return numbers (B, H, T, N) of hidden states (B, T, E), in float32, or float64 beside float64."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            numbers = nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), bias)
            return numbers.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class EmbeddingScheme(Scheme):
    """A scheme that adds the vectors of a `PositionEmbedding` to hidden states, at the input or before each layer."""

    @property
    def every_layer(self) -> bool:
        """Whether the vectors are added before every layer of the scheme, instead of once at the input."""
        return False

    @property
    def share_layers(self) -> bool:
        """Whether one module makes the vectors of all layers. It matters with `every_layer`."""
        return True

    @property
    def place(self) -> str:  # type: ignore[override]  # depends on the instance here
        """Where it acts, see `Scheme.place`."""
        return "on the hidden states, " + ("every layer" if self.every_layer else "input")

    def possible_layers(self, base: BaseModel) -> tuple[int, ...]:
        """Return all layers: layers without attention have hidden states, too."""
        return tuple(range(base.num_layers))

    def fit(self, base: BaseModel) -> Scheme:
        if self.layers is not None and not self.every_layer:
            raise ValueError(
                f"{self.name}: layers is for placement='every_layer': vectors that are added at the input reach "
                "every layer"
            )
        return self

    def put(self, site: ModelSite) -> None:
        if not self.every_layer:
            site.at_input(self.build(site.base.dims))
            return
        for layer, module in self.layer_modules(site):
            site.before_layer(layer, module)

    def needs_our_attention(self, carrier: Family | BaseModel) -> bool:
        """Return whether they have a window, or layers add the vectors and read positions from the mask."""
        in_layers = self.every_layer or not carrier.has_table
        return super().needs_our_attention(carrier) or (carrier.positions_in_mask and in_layers)

    def answers(self, layer: int, base: BaseModel) -> bool:
        """Return whether vectors enter this layer. Without a table, layer 0 adds the vectors at the input."""
        return self.every_layer or (layer == 0 and not base.has_table)

    def answers_at_input(self, base: BaseModel) -> bool:
        return base.has_table and not self.every_layer

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm | None:
        """Return a form with a table and without rotation for vectors at the input."""
        return None if self.every_layer else StockForm((False,) * base.num_layers, table=True)


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


class ReadRotation(NamedTuple):
    """What `rope_parameters` make of a model.

    Attributes:
        frequencies: angle per token of each rotated pair, in radians.
        obstacle: why they are not all there is to the rotation, or None.
        kept: the `rope_parameters` of what the model computes beside them, which other frequencies must keep.
        factor: factor on cosines and sines.
    """

    frequencies: tuple[float, ...]
    obstacle: str | None
    kept: RopeParameters
    factor: float = 1.0


ReadFrequencies = Callable[[RopeParameters], Mapping[Any, ReadRotation]]
"""Function of `rope_parameters` that returns what they make of the model, for each layer type. Where all layers share
them, the layer type is None.
"""


class RotaryScheme(Scheme):
    """A scheme that rotates pairs of dimensions of queries and keys by angles that depend on the position.

    Without `rope_parameters`, `build` returns a `Rotation` that makes the angles.
    """

    place = "on queries and keys"
    needs_queries = True

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

    def overridden(self, rotation: RopeParameters) -> str | None:
        """Return a warning if one value takes the place of several that differ by layer type, or None.

        Args:
            rotation: the base's `rope_parameters`, see `with_base`.
        """
        return None

    def rope_parameters(self) -> RopeParameters | None:
        """Return `rope_parameters` if transformers' rotary modules shall make the angles, or None.

        They are one dict for all layers, whatever their types, or layer type -> dict. Without `partial_rotary_factor`
        whole heads are rotated.
        """
        return None

    def fit(self, base: BaseModel) -> Scheme:
        return base.rotation.fit(self, base.layers_of(self))

    def silence(self, site: ModelSite) -> None:
        """Do nothing: `put` replaces the base's rotation if it has to."""

    def put(self, site: ModelSite) -> None:
        site.turn(self)

    def needs_our_attention(self, carrier: Family | BaseModel) -> bool:
        """Return whether they have a window, or layers read their positions from the mask."""
        return super().needs_our_attention(carrier) or carrier.positions_in_mask

    def rotations(self) -> tuple[RopeParameters | None, ...]:
        return (self.rope_parameters(),)

    def leaves_rotation(self, base: BaseModel) -> bool:
        return base.rotation.is_own(self)

    def keeps_positions(self, base: BaseModel) -> bool:
        """Return whether the scheme without its scaling is the base's own rotation."""
        return base.rotation.is_own(self.without_scaling())

    def needs_one_coordinate(self, base: BaseModel) -> bool:
        """Return whether our module computes the angles: only transformers' modules take several coordinates."""
        return self.rope_parameters() is None

    def answers(self, layer: int, base: BaseModel) -> bool:
        return _is_rotated(layer, base)

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm | None:
        """Return the form unchanged if a stock class rotates the layers alike."""
        return form if base.rotation.is_stock(self, base.layers_of(self)) else None
