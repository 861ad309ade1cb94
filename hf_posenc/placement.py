"""Where a scheme acts, and in which layers: on attention scores, on hidden states, on queries and keys, or nowhere.

A placement knows how its schemes get into a model, which layers then answer to positions, and what the rest of the
package has to know of that; so nobody asks a scheme what class it is. The model it works on is handed to it: `Base`
says what there is, `Site` changes it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import nn

from .errors import UnsupportedModelError

if TYPE_CHECKING:
    from .schemes.base import Dims, PositionEmbedding, Reference, RotaryScheme, Scheme

Layers = tuple[int, ...] | str | None
"""Which layers a scheme is for: indices, a slice as text (`"3::4"`), a layer type of the config, or None for all."""


class Base(Protocol):
    """What a placement may ask of a model before anything is changed."""

    @property
    def name(self) -> str:
        """Model type."""

    @property
    def dims(self) -> Dims:
        """Sizes of the attention."""

    @property
    def sizes(self) -> Mapping[int, Dims]:
        """Sizes of the attention of each layer that has one, by the layer's index."""

    @property
    def rotated(self) -> Sequence[bool]:
        """For each layer, whether the base turns its queries and keys."""

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of a scheme's layers; without a selection those in which it can act."""

    @property
    def keeps_table(self) -> bool:
        """Whether positions enter at the input from a table of the base's own, and go on doing so."""

    def require_own_attention(self, scheme: str) -> None:
        """Raise UnsupportedModelError if the attention function of this package cannot compute the attention."""

    def fit_rotation(self, scheme: RotaryScheme) -> RotaryScheme:
        """Return the scheme with all that was not given taken from the base; raise if it cannot be had there."""


class Site(Protocol):
    """A model in the course of being changed, and the layers of it that one scheme is for."""

    layers: tuple[int, ...]

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of one layer's attention."""

    def share(self, module: nn.Module) -> Reference:
        """Let the model own a module that the layers share."""

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer, which then attends through it."""

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add the vectors that a module makes to the hidden states that enter a layer."""

    def at_input(self, module: PositionEmbedding) -> None:
        """Add the vectors that a module makes to the hidden states that enter the first layer."""

    def turn(self, scheme: RotaryScheme) -> None:
        """Turn the queries and keys of the layers as the scheme says."""


class Placement:
    """Where a scheme acts."""

    words: ClassVar[str]
    """The same, for readers."""

    measures: ClassVar[str] = "positions"
    """What the scheme's numbers belong to: `positions`, or `distances` between them."""

    attends: ClassVar[bool] = False
    """Whether its layers attend through the attention function of this package."""

    rotates: ClassVar[bool] = False
    """Whether it turns queries and keys itself, so that the base's own rotation is not to be silenced."""

    adds_vectors: ClassVar[bool] = False
    """Whether it adds vectors to the hidden states."""

    enters_at_input: bool = False
    """Whether positions enter before the first layer, and so reach every layer."""

    def fit(self, scheme: Any, base: Base) -> Any:
        """Return the scheme with what the base's config decides filled in; changes nothing.

        Raises:
            UnsupportedModelError: if the base cannot carry it.
            ValueError: if its hyper-parameters do not fit the base.
        """
        return scheme

    def put(self, scheme: Any, site: Site) -> None:
        """Put the scheme into the layers of a site."""
        raise NotImplementedError(type(self).__name__)

    def answers(self, layer: int, rotated: Sequence[bool]) -> bool:
        """Return whether a layer must answer when the positions under it move.

        Args:
            layer: index of one of the scheme's layers.
            rotated: for each layer of the model, whether the base would turn its queries and keys.
        """
        return True


class Nowhere(Placement):
    """Nothing knows positions; the causal mask alone tells order."""

    words = "nowhere (the causal mask is the only order)"

    def fit(self, scheme: Scheme, base: Base) -> Scheme:
        """Refuse to do nothing, see `Placement.fit`."""
        if scheme.layers is not None and scheme.window is None and any(base.rotated):
            if not any(base.rotated[layer] for layer in base.layers_of(scheme)):
                raise UnsupportedModelError(
                    f"{scheme.name} would change nothing here: {base.name} leaves layer "
                    f"{', '.join(map(str, scheme.layers))} unrotated by itself. It rotates layers "
                    f"{', '.join(str(i) for i, turned in enumerate(base.rotated) if turned)}"
                )
        if scheme.layers is not None and scheme.window is None and base.keeps_table:
            raise UnsupportedModelError(
                f"{scheme.name} in some layers would change nothing here: the positions of {base.name} enter at the "
                "input and reach every layer, as long as no scheme is named for some of them. Give every layer a scheme"
            )
        return scheme

    def put(self, scheme: Scheme, site: Site) -> None:
        """Do nothing: what the base had is silenced already."""

    def answers(self, layer: int, rotated: Sequence[bool]) -> bool:
        """Return False."""
        return False


class OnScores(Placement):
    """A module sits on the attention and has the formula of its scores."""

    words = "on attention scores"
    measures = "distances"
    attends = True

    def fit(self, scheme: Any, base: Base) -> Any:
        """Check the sizes, and that attention can be computed by this package, see `Placement.fit`."""
        sizes = [base.sizes[layer] for layer in base.layers_of(scheme)]
        for dims in dict.fromkeys(sizes):
            scheme.check(dims)
        if len(set(sizes)) > 1 and scheme.build_shared(base.dims) is not None:
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


class OnHidden(Placement):
    """Vectors are added to the hidden states."""

    adds_vectors = True

    def __init__(self, *, every_layer: bool, share_layers: bool) -> None:
        """Say before which layers.

        Args:
            every_layer: before each of the scheme's layers; otherwise once, at the input.
            share_layers: whether one module makes the vectors of all layers.
        """
        self.enters_at_input = not every_layer
        self.share_layers = share_layers

    @property
    def words(self) -> str:  # type: ignore[override]  # depends on the instance here
        """Where it acts, for readers."""
        return "on the hidden states, " + ("input" if self.enters_at_input else "every layer")

    def fit(self, scheme: Any, base: Base) -> Any:
        """Refuse layers where there are none to choose, see `Placement.fit`."""
        if scheme.layers is not None and self.enters_at_input:
            raise ValueError(
                f"{scheme.name}: layers is for placement='every_layer': vectors that are added at the input reach "
                "every layer"
            )
        return scheme

    def put(self, scheme: Any, site: Site) -> None:
        """Add the vectors at the input, or before each layer."""
        if self.enters_at_input:
            site.at_input(scheme.build(site.dims))
            return
        owner = site.share(scheme.build(site.dims)) if self.share_layers else None
        for layer in site.layers:
            site.before_layer(layer, scheme.build(site.dims) if owner is None else owner)


class OnRotary(Placement):
    """Queries and keys are turned before their product is taken."""

    words = "on queries and keys"
    rotates = True

    def fit(self, scheme: RotaryScheme, base: Base) -> RotaryScheme:
        """Fill in what the base has, see `Placement.fit`."""
        return base.fit_rotation(scheme)

    def put(self, scheme: RotaryScheme, site: Site) -> None:
        """Turn the layers of the site."""
        site.turn(scheme)

    def answers(self, layer: int, rotated: Sequence[bool]) -> bool:
        """Return whether the layer is turned: some bases leave layers out, and those stay out unless named."""
        return not any(rotated) or rotated[layer]


def select(name: str, layers: Any, count: int, layer_types: Sequence[str] | None) -> tuple[int, ...] | None:
    """Return the indices of the layers that a scheme is for.

    Args:
        name: of the scheme, for messages.
        layers: see `Layers`; any sequence of integers will do. Negative indices count from the last layer.
        count: number of layers of the model.
        layer_types: the config's type of each layer, or None.

    Returns:
        Indices in order; None for every layer.

    Raises:
        TypeError: for something else than indices, text and None.
        ValueError: for layers that there are not, that are named twice, and for none at all.
    """
    if layers is None:
        return None
    if isinstance(layers, str):
        known = sorted(set(layer_types or ()))
        if layers in known:
            chosen = [index for index, kind in enumerate(layer_types or ()) if kind == layers]
        else:
            choices = f"{', '.join(known)}, or " if known else ""
            try:
                bounds = [int(part) if part.strip() else None for part in layers.split(":")]
                chosen = list(range(count))[slice(*bounds)] if 2 <= len(bounds) <= 3 else []
            except ValueError:
                bounds = []
            if not 2 <= len(bounds) <= 3:
                raise ValueError(
                    f"{name}: layers={layers!r} is neither a layer type of this model nor a slice: give {choices}a "
                    "slice like '3::4', or a list of indices"
                )
    else:
        indices = _indices(name, layers)
        if wrong := [index for index in indices if not -count <= index < count]:
            raise ValueError(
                f"{name}: there is no layer {', '.join(map(str, wrong))}: the model has {count}, counted from 0"
            )
        chosen = sorted(index % count for index in indices)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{name}: layers={indices} names a layer twice")
    if not chosen:
        raise ValueError(f"{name}: layers={layers!r} selects none of the {count} layers")
    return None if len(chosen) == count else tuple(chosen)


def _indices(name: str, layers: Any) -> list[int]:
    """Return indices of layers as numbers of Python; TypeError if they are no integers."""
    try:
        given = list(layers)
        if not any(isinstance(index, bool) for index in given):
            return [operator.index(index) for index in given]
    except TypeError:
        pass
    raise TypeError(f"{name}: layers must be a list of indices, a slice as text, a layer type or None: {layers!r}")


__all__ = ["Base", "Layers", "Nowhere", "OnHidden", "OnRotary", "OnScores", "Placement", "Site", "select"]
