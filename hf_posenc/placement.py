"""Placements: where a scheme acts, and every decision that follows from it.

A placement puts its schemes into a model. It also decides whether their layers must attend through this package, which
layers must respond to positions, and what a stock checkpoint can hold. So no other code tests the class of a scheme.
`Base` describes a model, `Site` changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from .dims import Dims, Layers
from .errors import UnsupportedModelError
from .modules import PositionEmbedding, Reference, Shared

RopeParameters = dict[str, Any]
"""transformers' `rope_parameters`."""


class Placed(Protocol):
    """The attributes of a scheme that every placement uses."""

    @property
    def name(self) -> str:
        """Registered name."""

    @property
    def acts_on(self) -> Placement:
        """Where the scheme acts."""

    @property
    def layers(self) -> Layers:
        """Layers of the scheme, as indices once it is fitted to a model; None means all."""

    @property
    def window(self) -> int | None:
        """Sliding window of its layers, in tokens."""

    @property
    def sinks(self) -> int | None:
        """Number of first tokens that stay visible outside the window."""


S = TypeVar("S", bound=Placed)


class Carrier(Protocol):
    """The attributes of a model, or of its family, that decide which attention function its layers need."""

    @property
    def has_table(self) -> bool:
        """Whether positions enter at the input, from a table of vectors."""

    @property
    def positions_in_mask(self) -> bool:
        """Whether positions reach the layers only through the mask of our attention function."""


class Base(Carrier, Protocol):
    """A model, as placements see it."""

    @property
    def name(self) -> str:
        """Model type."""

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""

    @property
    def sizes(self) -> Mapping[int, Dims]:
        """Layer index -> sizes of its attention, for the layers that have one."""

    @property
    def num_layers(self) -> int:
        """Number of layers, with and without attention."""

    @property
    def rotated(self) -> Sequence[bool]:
        """Whether the base rotates queries and keys, for each layer."""

    @property
    def normed(self) -> Sequence[int]:
        """Indices of the layers in which the base norms queries and keys, beside their rotation."""

    @property
    def keeps_table(self) -> bool:
        """Whether the base's own table adds positions at the input, and stays in place."""

    @property
    def length(self) -> int | None:
        """The length in tokens that the base was trained at, or None if the config does not say it."""

    def layers_of(self, scheme: Placed) -> tuple[int, ...]:
        """Return the indices of a scheme's layers; all layers in which it can act if it names none."""

    def require_our_attention(self, scheme: str) -> None:
        """Raise UnsupportedModelError if this package's attention function cannot compute the base's attention."""

    def require_token_numbers(self, scheme: str, layers: Sequence[int]) -> None:
        """Raise UnsupportedModelError if a number for each token cannot be cached beside the keys of these layers."""

    def fit_rotation(self, scheme: Any) -> Any:
        """Fill in the missing hyper-parameters of a rotary scheme from the base; raise if the base lacks them."""

    def own_angles(self, scheme: Any) -> Mapping[int, Any]:
        """Return how the base rotates each layer of a scheme that rotates after the cache; raise if it cannot."""

    def has_own_rotation(self, scheme: Any) -> bool:
        """Return whether a fitted rotary scheme equals the base's own rotation."""

    def turns_like_stock(self, scheme: Any) -> bool:
        """Return whether a stock class would rotate the scheme's layers as the patched model does."""


class Site(Protocol):
    """A model that is being changed, and the layers of one scheme in it."""

    layers: tuple[int, ...]

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of one layer's attention."""

    def silence_rotation(self) -> None:
        """Switch off the base's own rotation in the site's layers."""

    def share(self, module: nn.Module) -> Reference:
        """Put a module that the layers share on the model; return a reference to it."""

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer. The attention then computes its scores with it."""

    def on_queries(self, layer: int, name: str, module: nn.Module) -> None:
        """Put a module on the queries of a layer, beside what else the layer has."""

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add the vectors that a module makes to the hidden states that enter a layer."""

    def at_input(self, module: PositionEmbedding) -> None:
        """Add the vectors that a module makes to the hidden states that enter the first layer."""

    def turn(self, scheme: Any) -> None:
        """Rotate the queries and keys of the site's layers with the scheme."""

    def own_angles(self, scheme: Any) -> Mapping[int, Any]:
        """Return how the base rotates each layer of a scheme, see `Base.own_angles`."""


@dataclass(frozen=True)
class StockForm:
    """The positions that a stock checkpoint of a patched model would have to hold.

    Attributes:
        turned: whether each layer is rotated; a stock checkpoint has only one rotation.
        table: whether the vectors at the input become the base's own table.
    """

    turned: tuple[bool, ...]
    table: bool = False


class Placement:
    """Where a scheme acts. The methods describe what its schemes need; by default, nothing special."""

    words: ClassVar[str]
    """Description of the place, for messages and tables."""

    def possible_layers(self, base: Base) -> tuple[int, ...]:
        """Return the indices of the layers in which the schemes can act: those with attention."""
        return tuple(base.sizes)

    def joins(self) -> bool:
        """Return whether the schemes add to the positions of their layers, and do not replace them."""
        return False

    def order(self) -> int:
        """Return the place of the schemes among those that join a layer: smaller numbers act first."""
        return 0

    def scales_queries(self) -> bool:
        """Return whether the schemes multiply queries by a factor."""
        return False

    def uses_tokens(self) -> bool:
        """Return whether the schemes compute numbers from the hidden states of each token."""
        return False

    def fit(self, scheme: S, base: Base) -> S:
        """Return the scheme with missing hyper-parameters from the base's config; do not change the model.

        Raises:
            UnsupportedModelError: if the base cannot carry the scheme.
            ValueError: if its hyper-parameters do not fit the base.
        """
        return scheme

    def silence(self, site: Site) -> None:
        """Switch off the base's own positions in the layers of a site, if the schemes replace them."""
        site.silence_rotation()

    def put(self, scheme: Placed, site: Site) -> None:
        """Put the scheme into the layers of a site, after `silence`."""
        raise NotImplementedError(type(self).__name__)

    def dropped_by_stock_attention(self, scheme: Placed) -> str | None:
        """Name what stock attention functions would drop of a scheme; return None if they drop nothing."""
        return None if scheme.window is None else f"the window of {scheme.name}"

    def needs_our_attention(self, scheme: Placed, carrier: Carrier) -> bool:
        """Return whether the scheme's layers must attend through the attention function of this package."""
        return self.dropped_by_stock_attention(scheme) is not None

    def keeps_kernel(self, scheme: Placed) -> bool:
        """Return whether any kernel can compute the attention, since the scheme changes queries and keys only."""
        return False

    def needs_queries(self) -> bool:
        """Return whether the schemes need access to the family's queries and keys."""
        return False

    def rotations(self, scheme: Placed) -> tuple[RopeParameters | None, ...]:
        """Return the rotation that a fitted scheme puts into its layers, if it has one.

        Returns:
            An empty tuple without a rotation. Otherwise one entry: its `rope_parameters`, or None if transformers
            cannot compute its angles.
        """
        return ()

    def keeps_frequencies(self) -> bool:
        """Return whether the schemes rotate by the frequencies that the base's config gives, in place of the base."""
        return False

    def leaves_rotation(self, scheme: Placed, base: Base) -> bool:
        """Return whether the base's own rotary module still rotates the layers of a fitted scheme."""
        return False

    def needs_one_coordinate(self, scheme: Placed, base: Base) -> bool:
        """Return whether the scheme needs positions with one coordinate; those of some models have several."""
        return True

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether this layer of the scheme must respond when its positions change."""
        return True

    def answers_at_input(self, base: Base) -> bool:
        """Return whether the hidden states that enter the first layer must respond to positions."""
        return False

    def stock_form(self, scheme: Placed, base: Base, form: StockForm) -> StockForm | None:
        """Add the scheme to what a stock checkpoint would have to hold; return None if it cannot hold it.

        Args:
            scheme: a scheme that is fitted to the base and in the model.
            base: the patched model.
            form: what the checkpoint would have to hold without the scheme.
        """
        return None


class Nowhere(Placement):
    """No positions; the causal mask alone tells the order of tokens."""

    words = "nowhere (the causal mask is the only order)"

    def fit(self, scheme: S, base: Base) -> S:
        """Refuse layers without positions, where the scheme would change nothing, see `Placement.fit`."""
        if scheme.layers is None or scheme.window is not None:
            return scheme
        if any(base.rotated) and not any(base.rotated[layer] for layer in base.layers_of(scheme)):
            raise UnsupportedModelError(
                f"{scheme.name} would change nothing here: {base.name} leaves layer "
                f"{', '.join(map(str, scheme.layers))} unrotated by itself. It rotates layers "
                f"{', '.join(str(layer) for layer, rotated in enumerate(base.rotated) if rotated)}"
            )
        if base.keeps_table:
            raise UnsupportedModelError(
                f"{scheme.name} in some layers would change nothing here: the positions of {base.name} enter at the "
                "input and reach every layer while some layers have no scheme. Give every layer a scheme"
            )
        return scheme

    def put(self, scheme: Placed, site: Site) -> None:
        """Do nothing: `silence` has switched off the base's positions."""

    def needs_one_coordinate(self, scheme: Placed, base: Base) -> bool:
        """Return False: the scheme uses no positions."""
        return False

    def answers(self, layer: int, base: Base) -> bool:
        """Return False: no layer uses positions."""
        return False

    def stock_form(self, scheme: Placed, base: Base, form: StockForm) -> StockForm | None:
        """Return the form with the scheme's layers unrotated, see `Placement.stock_form`."""
        silenced = base.layers_of(scheme)
        return replace(form, turned=tuple(turned and i not in silenced for i, turned in enumerate(form.turned)))


def _shared_shapes(scheme: Any, dims: Dims) -> tuple[torch.Size, ...]:
    """Return the shapes of the scheme's shared parameters, for layers of these sizes."""
    with torch.device("meta"):
        shared = scheme.build_shared(dims)
    return () if shared is None else tuple(parameter.shape for parameter in shared.parameters())


class OnScores(Placement):
    """A module on each attention computes its scores."""

    words = "on attention scores"

    def fit(self, scheme: Any, base: Base) -> Any:
        """Check that the scheme fits the sizes and this package the attention, see `Placement.fit`."""
        sizes = [base.sizes[layer] for layer in base.layers_of(scheme)]
        for dims in dict.fromkeys(sizes):
            scheme.check(dims)
        if len({_shared_shapes(scheme, dims) for dims in set(sizes)}) > 1:
            raise UnsupportedModelError(
                f"{scheme.name}: the layers of {base.name} have heads of different numbers or sizes, so they cannot "
                "share parameters: give each layer its own parameters, or name layers of one size"
            )
        base.require_our_attention(scheme.name)
        return scheme

    def put(self, scheme: Any, site: Site) -> None:
        """Put one module on each attention, and the module that they share on the model."""
        shared = scheme.build_shared(site.dims)
        owner = None if shared is None else site.share(shared)
        for layer in site.layers:
            module = scheme.build(site.dims_of(layer))
            site.on_attention(layer, module if owner is None else scheme.attach_shared(module, owner))

    def dropped_by_stock_attention(self, scheme: Placed) -> str | None:
        """Return the scheme's name: stock attention would drop the whole scheme."""
        return scheme.name


class OnRotatedScores(OnScores):
    """A module on each attention rotates queries and keys by the base's frequencies, after the cache."""

    words = "on queries and keys, as scores are computed"

    def __init__(self, scheme: Any) -> None:
        """Place a scheme.

        Args:
            scheme: the scheme, which says in which of its layers it rotates anything.
        """
        self.scheme = scheme

    def fit(self, scheme: Any, base: Base) -> Any:
        """Fill in the base's length, and check that it can be rotated after the cache, see `Placement.fit`."""
        return super().fit(scheme.with_base(base.length, base.own_angles(scheme), base.sizes), base)

    def put(self, scheme: Any, site: Site) -> None:
        """Put a module with the base's rotation on each attention."""
        for number, (layer, angles) in enumerate(site.own_angles(scheme).items()):
            site.on_attention(layer, scheme.build_at(number, site.dims_of(layer), angles))

    def keeps_frequencies(self) -> bool:
        """Return True: all schemes of this place do."""
        return True

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether the layer is rotated: some bases leave layers unrotated, and some schemes do."""
        rotated = not any(base.rotated) or base.rotated[layer]
        return rotated and self.scheme.turns(base.layers_of(self.scheme).index(layer))


class OnHidden(Placement):
    """Vectors are added to the hidden states."""

    def __init__(self, *, every_layer: bool, share_layers: bool) -> None:
        """Choose the layers.

        Args:
            every_layer: add vectors before each of the scheme's layers; otherwise once, at the input.
            share_layers: let one module compute the vectors of all layers.
        """
        self.every_layer = every_layer
        self.share_layers = share_layers

    @property
    def words(self) -> str:  # type: ignore[override]  # depends on the instance here
        """Description of the place, see `Placement.words`."""
        return "on the hidden states, " + ("every layer" if self.every_layer else "input")

    def possible_layers(self, base: Base) -> tuple[int, ...]:
        """Return all layers: layers without attention have hidden states, too."""
        return tuple(range(base.num_layers))

    def fit(self, scheme: S, base: Base) -> S:
        """Refuse a choice of layers for vectors at the input, see `Placement.fit`."""
        if scheme.layers is not None and not self.every_layer:
            raise ValueError(
                f"{scheme.name}: layers is for placement='every_layer': vectors that are added at the input reach "
                "every layer"
            )
        return scheme

    def put(self, scheme: Any, site: Site) -> None:
        """Add the vectors at the input, or before each layer."""
        if not self.every_layer:
            site.at_input(scheme.build(site.dims))
            return
        owner = site.share(scheme.build(site.dims)) if self.share_layers else None
        for layer in site.layers:
            site.before_layer(layer, scheme.build(site.dims) if owner is None else owner)

    def needs_our_attention(self, scheme: Placed, carrier: Carrier) -> bool:
        """Return whether they have a window, or layers add the vectors and read positions from the mask."""
        in_layers = self.every_layer or not carrier.has_table
        return super().needs_our_attention(scheme, carrier) or (carrier.positions_in_mask and in_layers)

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether vectors enter this layer. Without a table, layer 0 adds the vectors at the input."""
        return self.every_layer or (layer == 0 and not base.has_table)

    def answers_at_input(self, base: Base) -> bool:
        """Return whether the vectors come from the table at the input."""
        return base.has_table and not self.every_layer

    def stock_form(self, scheme: Placed, base: Base, form: StockForm) -> StockForm | None:
        """Return a form with a table and without rotation for vectors at the input, see `Placement.stock_form`."""
        return None if self.every_layer else StockForm((False,) * base.num_layers, table=True)


class OnQueries(Placement):
    """A module on each attention changes the queries. Other schemes, or the base, give the layer its positions."""

    words = "on queries"

    def __init__(self, *, by_position: bool) -> None:
        """Say what the change depends on.

        Args:
            by_position: whether the change depends on the position of the query.
        """
        self.by_position = by_position

    def joins(self) -> bool:
        """Return True: the layer keeps its positions."""
        return True

    def order(self) -> int:
        """Return 1: a factor acts after `OnSizes`, whose norm would divide it out."""
        return 1

    def scales_queries(self) -> bool:
        """Return True: all schemes of this place do."""
        return True

    def fit(self, scheme: Any, base: Base) -> Any:
        """Fill in the length of the base, and check that the scheme fits the sizes, see `Placement.fit`."""
        sizes = [base.sizes[layer] for layer in base.layers_of(scheme)]
        for dims in dict.fromkeys(sizes):
            scheme.check(dims)
        if scheme.share_layers and len({dims.num_heads for dims in sizes}) > 1:
            raise UnsupportedModelError(
                f"{scheme.name}: the layers of {base.name} have different numbers of heads, so they cannot share "
                "parameters: take share_layers=False, or name layers of one size"
            )
        return scheme.with_length(base.length)

    def silence(self, site: Site) -> None:
        """Do nothing: the layer keeps its positions."""

    def put(self, scheme: Any, site: Site) -> None:
        """Put a module on each attention, or one module that the layers share."""
        owner = site.share(scheme.build(site.dims)) if scheme.share_layers else None
        for layer in site.layers:
            module = scheme.build(site.dims_of(layer)) if owner is None else Shared(owner)
            site.on_queries(layer, scheme.name, module)

    def dropped_by_stock_attention(self, scheme: Placed) -> str | None:
        """Return the scheme's name: stock attention would drop the whole scheme."""
        return scheme.name

    def keeps_kernel(self, scheme: Placed) -> bool:
        """Return whether the scheme has no window."""
        return scheme.window is None

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether the change depends on the position."""
        return self.by_position


class OnSizes(OnQueries):
    """A module on each attention changes the sizes of queries and keys, before other changes of the queries."""

    words = "on the sizes of queries and keys"

    def __init__(self) -> None:
        """Place a change that does not depend on positions."""
        super().__init__(by_position=False)

    def order(self) -> int:
        """Return 0: a norm would divide out a factor that comes before it."""
        return 0

    def fit(self, scheme: S, base: Base) -> S:
        """Refuse layers in which the base itself norms queries and keys, see `OnQueries.fit`."""
        if both := sorted(set(base.normed).intersection(base.layers_of(scheme))):
            raise UnsupportedModelError(
                f"{scheme.name}: {base.name} itself norms the queries and keys of layer {', '.join(map(str, both))}, "
                "and a second norm of the same vectors would change next to nothing: name other layers"
            )
        fitted: S = super().fit(scheme, base)
        return fitted


class OnTokens(OnQueries):
    """A module on each attention changes scores by numbers that it computes from the hidden states."""

    words = "on attention scores, by numbers of each token"

    def __init__(self) -> None:
        """Say that the change does not depend on positions."""
        super().__init__(by_position=False)

    def scales_queries(self) -> bool:
        """Return False: queries stay as they are."""
        return False

    def keeps_kernel(self, scheme: Placed) -> bool:
        """Return False: the numbers are added to scores."""
        return False

    def uses_tokens(self) -> bool:
        """Return True: all schemes of this place do."""
        return True

    def fit(self, scheme: S, base: Base) -> S:
        """Check that the numbers can be cached beside the keys, see `Placement.fit`."""
        base.require_token_numbers(scheme.name, base.layers_of(scheme))
        fitted: S = super().fit(scheme, base)
        return fitted


class OnRotary(Placement):
    """Queries and keys are rotated before their product is taken."""

    words = "on queries and keys"

    def fit(self, scheme: Any, base: Base) -> Any:
        """Fill in the base's own rotation, see `Placement.fit`."""
        return base.fit_rotation(scheme)

    def silence(self, site: Site) -> None:
        """Do nothing: `put` replaces the base's rotation if it has to."""

    def put(self, scheme: Any, site: Site) -> None:
        """Rotate the queries and keys of the site's layers."""
        site.turn(scheme)

    def needs_our_attention(self, scheme: Placed, carrier: Carrier) -> bool:
        """Return whether they have a window, or layers read their positions from the mask."""
        return super().needs_our_attention(scheme, carrier) or carrier.positions_in_mask

    def needs_queries(self) -> bool:
        """Return True: the scheme rotates them."""
        return True

    def rotations(self, scheme: Any) -> tuple[RopeParameters | None, ...]:
        """Return the scheme's rotation, see `Placement.rotations`."""
        return (scheme.rope_parameters(),)

    def leaves_rotation(self, scheme: Any, base: Base) -> bool:
        """Return whether the scheme is the base's own rotation."""
        return base.has_own_rotation(scheme)

    def needs_one_coordinate(self, scheme: Any, base: Base) -> bool:
        """Return whether our module computes the angles: only transformers' modules take several coordinates."""
        return scheme.rope_parameters() is None

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether the layer is rotated: some bases leave layers unrotated."""
        return not any(base.rotated) or base.rotated[layer]

    def stock_form(self, scheme: Any, base: Base, form: StockForm) -> StockForm | None:
        """Return the form unchanged if a stock class rotates the layers alike, see `Placement.stock_form`."""
        return form if base.turns_like_stock(scheme) else None


__all__ = [
    "Base",
    "Carrier",
    "Layers",
    "Nowhere",
    "OnHidden",
    "OnQueries",
    "OnRotary",
    "OnRotatedScores",
    "OnScores",
    "OnSizes",
    "OnTokens",
    "Placement",
    "Site",
    "StockForm",
]
