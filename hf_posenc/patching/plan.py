"""The plan of a patch: which scheme goes into which layer, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from operator import methodcaller
from typing import Any

from transformers import PreTrainedModel

from ..core.dims import REST, Layers
from ..core.errors import UnsupportedModelError
from ..core.positions import NO_WINDOW
from ..engines.dispatch import find_engine
from ..families.base import Family
from ..model.base_model import BaseModel
from ..model.obstacles import TAKE_OFF
from ..model.patch_record import Patch
from ..model.undo import Undo, has_own_forward
from ..schemes.base import Scheme
from ..transformers_glue.flash import is_flash


class Plan:
    """The schemes that go into a model, and what follows from them.

    Attributes:
        base: the model.
        schemes: the schemes, fitted to the base.
        attention: `auto`, or the name of an engine.
        layers: for each scheme, the indices of its layers.
        names: the schemes' names, for messages.
        attends: whether all layers use the attention function of this package. They do if one layer needs it.
        backend: the model's flash attention, if it can compute what the schemes make of queries and keys; empty if not.
        base_layers: indices of the layers with attention whose positions no scheme replaces. They keep the base's
            positions.
        rotated_by_base: indices of the layers that the base's rotary module still rotates.
        rotating: the schemes that rotate queries and keys.
        replaced_attentions: indices of the layers whose attention is replaced by a class that uses transformers'
            attention interface. They are all layers if the family bypasses the interface. If the base has no rotary
            module, they are the layers of rotary schemes.
        limit: the number of positions that the model can tell apart, or None if there is no limit.
    """

    def __init__(self, base: BaseModel, schemes: tuple[Scheme, ...], attention: str) -> None:
        """Derive the attributes from the first three."""
        self.base, self.schemes, self.attention = base, schemes, attention
        family, modules, backend = base.family, base.modules, base.config._attn_implementation
        self.layers = tuple(base.layers_of(scheme) for scheme in schemes)
        placed = list(zip(schemes, self.layers, strict=True))
        self.names = " and ".join(scheme.name for scheme in schemes)
        self.attends = needs_our_attention(family, schemes)
        has_sinks = any(hasattr(module, "sinks") for module in modules.attentions)  # few kernels compute them
        fits = self.attends and attention == "auto" and not has_sinks and is_flash(backend)
        self.backend = backend if fits and keeps_kernel(family, schemes) else ""
        replaced = {layer for scheme, layers in placed if not scheme.joins for layer in layers}
        self.base_layers = tuple(layer for layer in base.sizes if layer not in replaced)
        turned = [layer for layer in self.base_layers if modules.rotated[layer]]
        for scheme, layers in placed:
            if scheme.leaves_rotation(base):
                turned += layers
        self.rotated_by_base = tuple(sorted(turned))
        self.rotating: list[Any] = [scheme for scheme in schemes if scheme.rotations()]
        self.replaced_attentions: tuple[int, ...] = ()
        if family.always_replaced:
            self.replaced_attentions = tuple(base.sizes)
        elif modules.rotary is None:
            rotating = (layers for scheme, layers in placed if scheme in self.rotating)
            self.replaced_attentions = tuple(layer for layers in rotating for layer in layers)
        limits = [scheme.limit for scheme in schemes if scheme.limit is not None]
        if base.has_table and len(replaced) < base.num_layers:  # some layers keep the table
            limits.append(base.config.max_position_embeddings)
        self.limit = min(limits, default=None)

    def record(self, undo: Undo | None) -> Patch:
        """Return the record of the patch, without samples of weights and versions of parameters.

        Args:
            undo: its inverse steps; None if there are none.
        """
        return Patch(
            self.schemes,
            self.attention,
            undo,
            layers=self.base.modules.layers,
            limit=self.limit,
            attends=self.attends,
            backend=self.backend,
            keeps_positions=undo is not None and all(scheme.keeps_positions(self.base) for scheme in self.schemes),
        )


def needs_our_attention(family: Family, schemes: Sequence[Scheme]) -> bool:
    """Return whether a model needs the attention function of this package.

    Args:
        family: the model's family.
        schemes: the model's schemes.
    """
    return family.always_replaced or any(scheme.needs_our_attention(family) for scheme in schemes)


def keeps_kernel(family: Family, schemes: Sequence[Scheme]) -> bool:
    """Return whether any kernel can compute the attention of a model: its schemes change queries and keys only.

    Args:
        family: the model's family.
        schemes: the model's schemes.
    """
    return not family.always_replaced and all(
        scheme.keeps_kernel() or not scheme.needs_our_attention(family) for scheme in schemes
    )


def make_plan(model: PreTrainedModel, schemes: Sequence[Scheme], attention: str, *, resolve: bool = True) -> Plan:
    """Fit schemes to a model, and check that the model can carry them. The model stays unchanged.

    Args:
        model: a stock model, with or without head.
        schemes: the schemes to put in, each into its layers.
        attention: `auto`, or the name of an engine.
        resolve: whether to make every choice that depends on the model's weights. A checkpoint has made them.

    Raises:
        UnsupportedModelError: if the model or one of its settings cannot carry a scheme, or somebody has replaced the
            forward of an attention that has to carry one.
        TypeError: if `layers`, `window` or `sinks` is of a wrong type.
        ValueError: if hyper-parameters do not fit the model, or two schemes name one layer.
    """
    base = BaseModel.of(model)
    chosen, base = _choose_layers(schemes, base)
    if attention != "auto":
        find_engine(attention)
    plan = Plan(base, tuple(scheme.fit(base) for scheme in chosen), attention)
    for scheme in sorted(plan.schemes, key=methodcaller("keeps_kernel")):
        if needs_our_attention(base.family, [scheme]):
            name = scheme.name + ("" if scheme.window is None else " with a window")
            base.require_our_attention(name, keeps_kernel=bool(plan.backend))
    _check_effects(plan)
    if attention != "auto" and not plan.attends:
        raise ValueError(
            f"{plan.names} keeps the model's own attention; attention={attention!r} needs a scheme that "
            "attends through hf_posenc"
        )
    for index, module in base.modules.attention_of.items():
        if has_own_forward(module) or (index not in plan.replaced_attentions and not plan.attends):
            continue
        if index not in plan.replaced_attentions and "_hf_hook" in module.__dict__:
            old_forward = module.__dict__.get("_old_forward")  # accelerate's hook calls it
            if getattr(old_forward, "__func__", None) is type(module).forward:
                continue
        raise UnsupportedModelError(
            f"the attention of layer {index} has a forward of its own ({module.__dict__['forward']!r:.80}), which "
            f"would bypass {plan.names}: take it off ({TAKE_OFF}), patch the model, and put it on again"
        )
    if not resolve:
        return plan
    return Plan(base, tuple(scheme.resolve(base.native, base.dims) for scheme in plan.schemes), attention)


def _check_effects(plan: Plan) -> None:
    """Check that schemes together do what each of them says.

    Raises:
        UnsupportedModelError: if a layer borrows keys that are rotated otherwise than its queries, or a scheme changes
            queries that the base already multiplies by a factor of the position: two factors would multiply, and a norm
            would divide the base's factor out.
        ValueError: if a scheme would only act beyond the last position.
    """
    base = plan.base
    # layer -> the scheme that rotates it, True for the base's rotary module; absent if nothing does
    rotated_by: dict[int, Scheme | bool] = {}
    scaled = set(base.scaled_by_position)
    for scheme, layers in zip(plan.schemes, plan.layers, strict=True):
        if scheme in plan.rotating:
            rotated_by |= dict.fromkeys(layers, scheme)
        elif not scheme.joins:
            scaled -= set(layers)
    rotated_by |= dict.fromkeys(plan.rotated_by_base, True)
    for layer, lender in base.lenders.items():
        if rotated_by.get(layer) is not rotated_by.get(lender):
            raise UnsupportedModelError(
                f"layer {layer} of {base.name} takes its keys from layer {lender}, which would be rotated "
                f"differently from its queries: name layers {lender} and {layer} together"
            )
    own = base.own_scheme(plan.base_layers) if base.family.always_replaced and plan.base_layers else None
    for scheme, layers in zip(plan.schemes, plan.layers, strict=True):
        if scheme.computes_scores and own is not None and own.computes_scores and {*layers} & {*plan.base_layers}:
            raise UnsupportedModelError(
                f"{scheme.name}: the positions of {base.name} are in its scores ({own.name}), which it cannot join: "
                f"take them off, as in [Nope(), {type(scheme).__name__}()]"
            )
        if scheme.scales_queries and (both := sorted(scaled.intersection(layers))):
            raise UnsupportedModelError(
                f"{scheme.name}: {base.name} itself multiplies the queries of layer {', '.join(map(str, both))} "
                "by a factor that grows with the position, which does not go together with it: name other layers"
            )
        if plan.limit is not None and scheme.acts_from > plan.limit:
            raise ValueError(
                f"{scheme.name} would change nothing: it acts from {scheme.acts_from} tokens on, and the model has "
                f"{plan.limit} positions. Set a smaller length for it, or combine it with a scheme that has no limit"
            )


# ------------------------------------------------------------------------------------------------ layers, window, sinks


def _choose_layers(schemes: Sequence[Scheme], base: BaseModel) -> tuple[tuple[Scheme, ...], BaseModel]:
    """Return the schemes with `layers` as indices, `window` and `sinks` as ints, after checking them; and the base.

    The base is told whether its table of positions stays.

    Raises:
        UnsupportedModelError: if a scheme cannot act in a layer.
        TypeError: if `layers`, `window` or `sinks` is of a wrong type.
        ValueError: if a layer does not exist, two schemes name one layer, a window changes nothing, or sinks have none.
    """
    selected = [_select_layers(scheme, base) for scheme in schemes]
    if REST in selected:
        named = {
            layer
            for scheme, layers in zip(schemes, selected, strict=True)
            if layers != REST and not scheme.joins
            for layer in (range(base.num_layers) if layers is None else layers)
        }
        asking = schemes[selected.index(REST)]
        possible = asking.possible_layers(base)
        rest = tuple(layer for layer in possible if layer not in named)
        if not rest:
            raise ValueError(f"{asking.name}: layers='rest' selects no layer: other schemes name them all")
        remaining = None if len(rest) == len(possible) else rest
        selected = [remaining if layers == REST else layers for layers in selected]
    chosen = tuple(replace(scheme, layers=layers) for scheme, layers in zip(schemes, selected, strict=True))
    places: dict[tuple[int, str], Scheme] = {}
    for scheme in chosen:
        for field in ("window", "sinks"):
            if getattr(scheme, field) is not None:
                scheme.number(field, lambda count: 1 <= count < NO_WINDOW, f"at least 1 and below {NO_WINDOW}", int)
        for layer in base.layers_of(scheme):
            _check_layer(scheme, layer, base)
            own = [scheme.name if scheme.joins else "positions", *(["scores"] if scheme.computes_scores else [])]
            for place in own:
                if (other := places.setdefault((layer, place), scheme)) is not scheme:
                    raise ValueError(
                        f"{other.name} and {scheme.name} both name layer {layer}: give each of them layers of its own, "
                        "as in [Alibi(layers='0::2'), Nope(layers='rest')]"
                    )
            if scheme.window is not None and places.setdefault((layer, "window"), scheme) is not scheme:
                raise ValueError(f"layer {layer} gets a window from two schemes: give it to one of them")
    replaced = sum(place == "positions" for _, place in places)
    return chosen, replace(base, keeps_table=base.has_table and replaced < base.num_layers)


def _check_layer(scheme: Scheme, layer: int, base: BaseModel) -> None:
    """Check that a scheme, its window and its sinks act in a layer.

    Raises:
        UnsupportedModelError: if the scheme cannot act there, or the base's own caches would drop the sinks.
        ValueError: if a window would change nothing, or there are sinks without a window.
    """
    possible, window = scheme.possible_layers(base), scheme.window
    if layer not in possible:
        raise UnsupportedModelError(
            f"{scheme.name}: layer {layer} of {base.name} has no attention, so it has no positions: "
            f"name layers among {', '.join(map(str, possible))}"
        )
    if window is None:
        if scheme.sinks is not None:
            raise ValueError(f"{scheme.name}: sinks={scheme.sinks} are first tokens that a window passes: give window=")
        return
    if scheme.layers is not None and layer not in base.sizes:
        raise ValueError(f"{scheme.name}: window={window} cannot act in layer {layer}, which has no attention")
    if (base_window := base.windows.get(layer)) is not None and base_window <= window:
        raise ValueError(
            f"{scheme.name}: window={window} would change nothing in layer {layer}, which has a sliding window of "
            f"{base_window} tokens: give a smaller one, or name other layers"
        )
    if scheme.sinks is not None and layer in base.layers_that_forget:
        raise UnsupportedModelError(
            f"{scheme.name}: sinks={scheme.sinks} cannot act in layer {layer} of {base.name}, which has a sliding "
            "window or chunks of its own: its caches drop the first tokens. Name other layers"
        )


def _select_layers(scheme: Scheme, base: BaseModel) -> Layers:
    """Return the indices of the layers that a scheme is for, in ascending order; None for every layer, or `rest`.

    Raises:
        TypeError: if `layers` is neither indices nor text nor None.
        ValueError: if a layer does not exist, or no layer is selected.
    """
    layers: Any = scheme.layers
    name, count = scheme.name, base.num_layers
    if layers is None or (isinstance(layers, str) and layers == REST):  # arrays do not compare with text
        return layers
    if isinstance(layers, str):
        chosen = _parse_text(scheme, layers, base)
    else:
        indices = layers.tolist() if hasattr(layers, "tolist") else layers  # of an array or a tensor
        indices = list(indices) if isinstance(indices, Iterable) else [indices]
        if any(isinstance(index, bool) or not isinstance(index, Integral) for index in indices):
            raise TypeError(
                f"{name}: layers must be a list of indices, a slice as text, a layer type or None: {layers!r}"
            )
        if wrong := [index for index in indices if not -count <= index < count]:
            raise ValueError(
                f"{name}: there is no layer {', '.join(map(str, wrong))}: the model has {count}, counted from 0"
            )
        chosen = sorted({int(index) % count for index in indices})
    if not chosen:
        raise ValueError(f"{name}: layers={layers!r} selects none of the {count} layers")
    return None if len(chosen) == count else tuple(chosen)


def _parse_text(scheme: Scheme, layers: str, base: BaseModel) -> list[int]:
    """Return the indices that a layer type or a slice such as `3::4` selects."""
    layer_types: Sequence[str] = getattr(base.config, "layer_types", None) or ()
    if layers in layer_types:
        return [index for index, layer_type in enumerate(layer_types) if layer_type == layers]
    try:
        bounds = [int(part) if part.strip() else None for part in layers.split(":")]
        if 2 <= len(bounds) <= 3:
            return list(range(base.num_layers))[slice(*bounds)]
    except ValueError:  # not a number, or a step of 0
        pass
    choices = ", ".join((*sorted(set(layer_types)), "a slice like '3::4', 'rest', or a list of indices"))
    raise ValueError(f"{scheme.name}: layers={layers!r} is neither a layer type of this model nor a slice: {choices}")
