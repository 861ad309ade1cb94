"""Placements: where a scheme acts, and every decision that follows from it.

A placement puts its schemes into a model, and answers what the rest of the package has to know of them: whether the
layers must attend through this package, which layers must then answer to positions, what a stock checkpoint can hold.
So nobody asks a scheme what class it is. `Base` says what there is in a model, `Site` changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from .dims import Dims, Layers
from .errors import UnsupportedModelError
from .modules import PositionEmbedding, Reference

RopeParameters = dict[str, Any]
"""transformers' `rope_parameters`."""


class Placed(Protocol):
    """A scheme, as far as every placement knows it."""

    @property
    def name(self) -> str:
        """Registered name."""

    @property
    def layers(self) -> Layers:
        """Layers it is for; indices once it is fitted to a model."""

    @property
    def window(self) -> int | None:
        """Sliding window of its layers, in tokens."""


class Carrier(Protocol):
    """A model or its family, as far as the choice of the attention function goes."""

    @property
    def has_table(self) -> bool:
        """Whether positions enter at the input, from a table."""

    @property
    def positions_in_mask(self) -> bool:
        """Whether layers can only take their positions from the mask of our attention function."""


class Base(Carrier, Protocol):
    """A model before anything is changed: the questions that a placement may ask."""

    @property
    def name(self) -> str:
        """Model type."""

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""

    @property
    def sizes(self) -> Mapping[int, Dims]:
        """Sizes of the attention of each layer that has one, by the layer's index."""

    @property
    def num_layers(self) -> int:
        """Number of layers, with and without attention."""

    @property
    def rotated(self) -> Sequence[bool]:
        """For each layer, whether the base turns its queries and keys."""

    @property
    def keeps_table(self) -> bool:
        """Whether positions enter at the input from a table of the base's own, and go on doing so."""

    def layers_of(self, scheme: Any) -> tuple[int, ...]:
        """Return the indices of a scheme's layers; without a selection those in which it can act."""

    def require_own_attention(self, scheme: str) -> None:
        """Raise UnsupportedModelError if the attention function of this package cannot compute the attention."""

    def fit_rotation(self, scheme: Any) -> Any:
        """Return a rotary scheme with all that was not given taken from the base; raise if it cannot be had there."""

    def has_own_rotation(self, scheme: Any) -> bool:
        """Return whether a fitted rotary scheme is what the base does by itself."""

    def turns_like_stock(self, scheme: Any) -> bool:
        """Return whether a stock class would turn the scheme's layers as the patched model does."""


class Site(Protocol):
    """A model that is being changed, and the layers of it that one scheme is for."""

    layers: tuple[int, ...]

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of one layer's attention."""

    def silence_rotation(self) -> None:
        """Switch off the base's own rotation in the layers."""

    def share(self, module: nn.Module) -> Reference:
        """Let the model own a module that the layers share."""

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer, which then attends through it."""

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add the vectors that a module makes to the hidden states that enter a layer."""

    def at_input(self, module: PositionEmbedding) -> None:
        """Add the vectors that a module makes to the hidden states that enter the first layer."""

    def turn(self, scheme: Any) -> None:
        """Turn the queries and keys of the layers as the scheme says."""


@dataclass(frozen=True)
class StockForm:
    """What a stock checkpoint of a patched model would have to hold.

    Attributes:
        turned: for each layer, whether the one rotation turns it.
        table: whether vectors at the input become the base's own table.
    """

    turned: tuple[bool, ...]
    table: bool = False


class Placement:
    """Where a scheme acts. Each method is the answer for a scheme that is in the model and does nothing."""

    words: ClassVar[str]
    """The place, for readers."""

    def possible_layers(self, base: Base) -> tuple[int, ...]:
        """Return the indices of the layers in which the schemes can act: those with attention."""
        return tuple(base.sizes)

    def fit(self, scheme: Any, base: Base) -> Any:
        """Return the scheme with what the base's config decides filled in; changes nothing.

        Raises:
            UnsupportedModelError: if the base cannot carry it.
            ValueError: if its hyper-parameters do not fit the base.
        """
        return scheme

    def silence(self, site: Site) -> None:
        """Switch off what the base has for positions in the layers of a site, where the schemes replace it."""
        site.silence_rotation()

    def put(self, scheme: Any, site: Site) -> None:
        """Put the scheme into the layers of a site, whose own positions are silenced."""
        raise NotImplementedError(type(self).__name__)

    def dropped_by_stock_attention(self, scheme: Placed) -> str | None:
        """Return, in words, what of a scheme every stock attention function would drop; None if nothing."""
        return None if scheme.window is None else f"the window of {scheme.name}"

    def needs_own_attention(self, scheme: Placed, carrier: Carrier) -> bool:
        """Return whether the scheme's layers must attend through the attention function of this package."""
        return self.dropped_by_stock_attention(scheme) is not None

    def needs_queries(self) -> bool:
        """Return whether the schemes can only act where a family's queries and keys can be reached."""
        return False

    def rotations(self, scheme: Any) -> tuple[RopeParameters | None, ...]:
        """Return the rotation that a fitted scheme puts into its layers, if it has one.

        Returns:
            Nothing, or one entry: its `rope_parameters`, or None where transformers cannot make its angles.
        """
        return ()

    def leaves_rotation(self, scheme: Any, base: Base) -> bool:
        """Return whether the base's own rotary module goes on turning the layers of a fitted scheme."""
        return False

    def needs_one_coordinate(self, scheme: Any, base: Base) -> bool:
        """Return whether the scheme counts positions by one number, in a model whose positions may have several."""
        return True

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether one of the scheme's layers must answer when the positions under it move."""
        return True

    def answers_at_input(self, base: Base) -> bool:
        """Return whether the hidden states that enter the first layer must answer to positions."""
        return False

    def stock_form(self, scheme: Any, base: Base, form: StockForm) -> StockForm | None:
        """Return what a stock checkpoint would have to hold with this scheme too; None if it cannot.

        Args:
            scheme: fitted to the base, and in the model.
            base: the patched model.
            form: what it would hold without the scheme.
        """
        return None


class Nowhere(Placement):
    """Nothing knows positions; the causal mask alone tells order."""

    words = "nowhere (the causal mask is the only order)"

    def fit(self, scheme: Placed, base: Base) -> Placed:
        """Refuse to do nothing, see `Placement.fit`."""
        if scheme.layers is None or scheme.window is not None:
            return scheme
        if any(base.rotated) and not any(base.rotated[layer] for layer in base.layers_of(scheme)):
            raise UnsupportedModelError(
                f"{scheme.name} would change nothing here: {base.name} leaves layer "
                f"{', '.join(map(str, scheme.layers))} unrotated by itself. It rotates layers "
                f"{', '.join(str(layer) for layer, turned in enumerate(base.rotated) if turned)}"
            )
        if base.keeps_table:
            raise UnsupportedModelError(
                f"{scheme.name} in some layers would change nothing here: the positions of {base.name} enter at the "
                "input and reach every layer, as long as no scheme is named for some of them. Give every layer a scheme"
            )
        return scheme

    def put(self, scheme: Placed, site: Site) -> None:
        """Do nothing: what the base had is silenced already."""

    def needs_one_coordinate(self, scheme: Any, base: Base) -> bool:
        """Return False: nothing is counted."""
        return False

    def answers(self, layer: int, base: Base) -> bool:
        """Return False: no layer knows a position."""
        return False

    def stock_form(self, scheme: Any, base: Base, form: StockForm) -> StockForm | None:
        """Return the form with the scheme's layers unrotated, see `Placement.stock_form`."""
        silent = base.layers_of(scheme)
        return replace(form, turned=tuple(turned and i not in silent for i, turned in enumerate(form.turned)))


def _shared_shapes(scheme: Any, dims: Dims) -> tuple[Any, ...]:
    """Return the shapes of the parameters that layers of these sizes would share."""
    with torch.device("meta"):
        shared = scheme.build_shared(dims)
    return () if shared is None else tuple(parameter.shape for parameter in shared.parameters())


class OnScores(Placement):
    """A module sits on the attention and has the formula of its scores."""

    words = "on attention scores"

    def fit(self, scheme: Any, base: Base) -> Any:
        """Check the sizes, and that attention can be computed by this package, see `Placement.fit`."""
        sizes = [base.sizes[layer] for layer in base.layers_of(scheme)]
        for dims in dict.fromkeys(sizes):
            scheme.check(dims)
        if len({_shared_shapes(scheme, dims) for dims in set(sizes)}) > 1:
            raise UnsupportedModelError(
                f"{scheme.name}: the layers of {base.name} have heads of different numbers or sizes, so they cannot "
                "share parameters: give each layer its own, or name layers that are alike"
            )
        base.require_own_attention(scheme.name)
        return scheme

    def put(self, scheme: Any, site: Site) -> None:
        """Put one module on each attention, and on the model what they share."""
        shared = scheme.build_shared(site.dims)
        owner = None if shared is None else site.share(shared)
        for layer in site.layers:
            module = scheme.build(site.dims_of(layer))
            site.on_attention(layer, module if owner is None else scheme.attach_shared(module, owner))

    def dropped_by_stock_attention(self, scheme: Placed) -> str | None:
        """Return the scheme's name: all of it acts on scores."""
        return scheme.name


class OnHidden(Placement):
    """Vectors are added to the hidden states."""

    def __init__(self, *, every_layer: bool, share_layers: bool) -> None:
        """Choose the layers.

        Args:
            every_layer: before each of the scheme's layers; otherwise once, at the input.
            share_layers: whether one module makes the vectors of all layers.
        """
        self.every_layer = every_layer
        self.share_layers = share_layers

    @property
    def words(self) -> str:  # type: ignore[override]  # depends on the instance here
        """The place, for readers."""
        return "on the hidden states, " + ("every layer" if self.every_layer else "input")

    def possible_layers(self, base: Base) -> tuple[int, ...]:
        """Return all layers: hidden states enter also those without attention."""
        return tuple(range(base.num_layers))

    def fit(self, scheme: Any, base: Base) -> Any:
        """Refuse layers where there are none to choose, see `Placement.fit`."""
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

    def needs_own_attention(self, scheme: Placed, carrier: Carrier) -> bool:
        """Return whether layers read their positions from the mask, unless a table at the input has them."""
        in_layers = self.every_layer or not carrier.has_table
        return super().needs_own_attention(scheme, carrier) or (carrier.positions_in_mask and in_layers)

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether vectors enter that layer: without a table, a hook of layer 0 adds those at the input."""
        return self.every_layer or (layer == 0 and not base.has_table)

    def answers_at_input(self, base: Base) -> bool:
        """Return whether the vectors come from the table at the input."""
        return base.has_table and not self.every_layer

    def stock_form(self, scheme: Any, base: Base, form: StockForm) -> StockForm | None:
        """Return a table and no rotation for vectors at the input, see `Placement.stock_form`."""
        return None if self.every_layer else StockForm((False,) * base.num_layers, table=True)


class OnRotary(Placement):
    """Queries and keys are turned before their product is taken."""

    words = "on queries and keys"

    def fit(self, scheme: Any, base: Base) -> Any:
        """Fill in what the base has, see `Placement.fit`."""
        return base.fit_rotation(scheme)

    def silence(self, site: Site) -> None:
        """Do nothing: `put` replaces the base's rotation where it has to."""

    def put(self, scheme: Any, site: Site) -> None:
        """Turn the layers of the site."""
        site.turn(scheme)

    def needs_own_attention(self, scheme: Placed, carrier: Carrier) -> bool:
        """Return whether layers read their positions from the mask."""
        return super().needs_own_attention(scheme, carrier) or carrier.positions_in_mask

    def needs_queries(self) -> bool:
        """Return True."""
        return True

    def rotations(self, scheme: Any) -> tuple[RopeParameters | None, ...]:
        """Return the scheme's rotation, see `Placement.rotations`."""
        return (scheme.rope_parameters(),)

    def leaves_rotation(self, scheme: Any, base: Base) -> bool:
        """Return whether the scheme is the base's own rotation."""
        return base.has_own_rotation(scheme)

    def needs_one_coordinate(self, scheme: Any, base: Base) -> bool:
        """Return whether transformers cannot make the angles: its modules take several coordinates."""
        return scheme.rope_parameters() is None

    def answers(self, layer: int, base: Base) -> bool:
        """Return whether the layer is turned: some bases leave layers out, and those stay out unless named."""
        return not any(base.rotated) or base.rotated[layer]

    def stock_form(self, scheme: Any, base: Base, form: StockForm) -> StockForm | None:
        """Return the form as it is, if a stock class turns the layers alike, see `Placement.stock_form`."""
        return form if base.turns_like_stock(scheme) else None


__all__ = ["Base", "Carrier", "Layers", "Nowhere", "OnHidden", "OnRotary", "OnScores", "Placement", "Site", "StockForm"]
