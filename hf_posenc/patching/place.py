"""Puts the planned schemes into a live model, each change recorded with its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..families.own_attention import OwnAttention
from ..live.base_model import BaseModel
from ..live.undo import Undo, add_pre_hook, register_buffer, set_attribute, set_class, set_module
from ..modules import PositionEmbedding, PositionModule, Reference, Shared, WithoutPositions
from ..positions import ROWS, ensure, unpack
from ..registry import family_for
from ..schemes.base import Dims, RotaryScheme, Scheme
from ..upstream import NAME, POSITION_IDS
from ..upstream.channel import as_channel, positions_of
from ..upstream.masks import check_masks
from ..upstream.replaced import replaced_class
from ..upstream.rotary import (
    ORIGINAL_LENGTH,
    IdentityRotary,
    PartialRotary,
    handed_down,
    turn_layer,
    turned_dimensions,
)
from .layers import KEPT, MARKER, Carried, PatchedLayers, require_patched_layers
from .plan import Plan

STILL = "posenc_still"
"""Module of the decoder that turns nothing, for layers with schemes where others go on rotating."""

UNLIMITED = 2**17
"""`max_position_embeddings` of a patched model whose scheme has no limit; `generate` caps its default length by it."""


SEVERAL_COORDINATES = (
    "position_ids give a token several coordinates (time, height and width), and the scheme counts positions by one "
    "number: pass position_ids (B, T), or take a scheme that leaves that to the base (rope or nope in all layers)"
)


NEGATIVE = (
    "position_ids are negative where attention_mask shows a token, and there are no vectors of negative positions: "
    "count from 0"
)


class NoEmbedding(PositionEmbedding):
    """Stands in for a base's own table of positions: adds nothing."""

    def __init__(self, size: int) -> None:
        """Return vectors of this size.

        Args:
            size: E.
        """
        super().__init__()
        self.size = size

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return zeros (B|1, T, E) that take no memory."""
        return torch.zeros(1, device=position_ids.device).expand(*position_ids.shape, self.size)


def enter_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of every decoder layer: turns and adds what the layer's schemes ask for there.

    A layer without either has it too: torch.compile does not guard hooks, so that a graph compiled for a layer with no
    hook would also run for one that has it. What is read with getattr is guarded, present or not.
    """
    turns = getattr(layer, "posenc_rotation", None) is not None
    adds = getattr(layer, "posenc", None) is not None
    if turns:
        args, kwargs = turn_layer(layer, args, kwargs)
    if adds:
        args, kwargs = add_positions(layer, args, kwargs)
    return (args, kwargs) if turns or adds else None


def add_positions(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the vectors of `layer.posenc` to the hidden states with which a decoder layer is called."""
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if "posenc_family" in layer.__dict__:
        as_bool = family_for(layer.posenc_family).mask_as_bool
        mask = {**dict(zip(layer.posenc_arguments, args, strict=False)), **kwargs}.get("attention_mask")
        position_ids = positions_of(as_channel(mask, as_bool=as_bool), hidden_states.shape[1])
    else:
        position_ids = handed_down(kwargs)
    if position_ids is None:
        raise ValueError("position_ids did not arrive at the decoder layer, so no position vectors can be added")
    hidden_states = hidden_states + layer.posenc(position_ids).to(hidden_states)
    return ((hidden_states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden_states})


def hand_down_position_ids(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward pre-hook of a decoder that keeps its position ids to itself: hands them to layers and attention."""
    at: Any = decoder.posenc_position_ids_at
    position_ids = args[at] if len(args) > at else kwargs.get("position_ids")
    if position_ids is None:
        given = next(
            each for each in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None
        )
        cache = kwargs.get("past_key_values")
        before = 0 if cache is None else cache.get_seq_length()
        position_ids = (torch.arange(given.shape[1], device=given.device) + before)[None]
    return args, {**kwargs, POSITION_IDS: position_ids}


def require_one_coordinate(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward pre-hook of a decoder whose positions may have several coordinates: takes them if they are all alike."""
    at: Any = decoder.posenc_position_ids_at
    position_ids = args[at] if len(args) > at else kwargs.get("position_ids")
    if position_ids is None or position_ids.ndim < 3:
        return args, kwargs
    ensure((position_ids == position_ids[:1]).all(), SEVERAL_COORDINATES)
    if len(args) > at:
        return (*args[:at], position_ids[0], *args[at + 1 :]), kwargs
    return args, {**kwargs, "position_ids": position_ids[0]}


def require_counts(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a decoder to which vectors of positions are added: refuses negative position ids.

    Padding may have any: which tokens are padding a 2-D mask says, or the compact position channel.
    """
    names: Any = decoder.posenc_arguments
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    position_ids, mask = given.get("position_ids"), given.get("attention_mask")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        return  # which the decoder refuses
    shown = torch.ones((), dtype=torch.bool, device=tokens.device)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        shown = mask[:, -tokens.shape[1] :] != 0
    elif isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.shape[-2] == ROWS:
        channel = unpack(mask, tokens.shape[1])
        shown = channel.query_valid
        if position_ids is None:
            position_ids = channel.query_positions
    if position_ids is not None:
        ensure(~((position_ids < 0) & shown).any(), NEGATIVE)


def require_attention(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a decoder whose scheme needs our attention function: refuses what would go wrong there."""
    if decoder.config._attn_implementation != NAME:
        raise ValueError(
            f"the config says attention {decoder.config._attn_implementation!r}, which was set behind the patch, so "
            f"the scheme would be ignored: set it back to {NAME!r}, or unpatch the model"
        )
    check_masks((*args, *kwargs.values()))


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw new parameters from this seed, leaving torch's generators as they were; None draws from them as they are."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class ModelSite:
    """A model in the course of being changed, and the layers of it that one scheme is for; see `placement.Site`."""

    def __init__(self, undo: Undo, plan: Plan, scheme: Scheme, owners: list[PositionModule], marker: str) -> None:
        """Look at the layers of one scheme.

        Args:
            undo: where the inverse steps go.
            plan: of the whole model.
            scheme: one of the plan's.
            owners: where new modules that own parameters are listed.
            marker: name of the buffer of its layers.
        """
        self.undo = undo
        self.plan = plan
        self.base = plan.base
        self.layers = plan.layers_of(scheme)
        self.scheme = scheme
        self.owners = owners
        self.marker = marker
        self.on_attentions: str | None = None
        self.on_layers = False
        self.at_first = False
        self.adds_vectors = False

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""
        return self.base.dims

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of one layer's attention."""
        return self.base.sizes.get(layer, self.base.dims)

    def silence_rotation(self) -> None:
        """Switch off the base's own rotation in the layers, and factors of queries that grow with the position."""
        found, rotation = self.base.found, self.base.family.rotation
        for layer in self.layers:
            if layer in found.attention_of:
                for name, value in rotation.attention_temperature.items():
                    set_attribute(self.undo, found.attention_of[layer], name, value)
        for config in self.base.configs if rotation.parameter_temperature else ():
            off = {**config.rope_parameters, rotation.parameter_temperature[0]: 0.0}
            set_attribute(self.undo, config, "rope_parameters", off)
        if found.rotary is None:
            return
        identity = IdentityRotary(found.rotary, rotation.angles)
        if self.plan.rotated_by_base():
            known = STILL in found.decoder._modules
            still = Reference(found.decoder, STILL) if known else self._own(STILL, identity)
            give_rotation(self, still, takes_layer_type=len(identity.pairs) > 1)
        elif not isinstance(found.decoder.get_submodule(str(rotation.rotary)), IdentityRotary):
            set_module(self.undo, found.decoder, str(rotation.rotary), identity)

    def share(self, module: nn.Module) -> Reference:
        """Let the decoder own a module that the layers share."""
        return self._own("posenc", module)

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer, which then attends through it."""
        attention = self.base.found.attention_of[layer]
        set_module(self.undo, attention, "posenc", module)
        set_attribute(self.undo, attention, "posenc_engine", self.plan.attention)
        self.on_attentions = "posenc"
        self._list(module)

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add the vectors that a module makes to the hidden states that enter a layer."""
        target = self.base.found.layers[layer]
        self.adds_vectors = True
        set_module(self.undo, target, "posenc", Shared(module) if isinstance(module, Reference) else module)
        if self.base.family.positions_in_mask:
            set_attribute(self.undo, target, "posenc_family", self.base.family.model_types[0])
            set_attribute(self.undo, target, "posenc_arguments", tuple(signature(target.forward).parameters))
        self.on_layers = True
        if isinstance(module, nn.Module):
            self._list(module)

    def at_input(self, module: PositionEmbedding) -> None:
        """Add the vectors that a module makes to the hidden states that enter the first layer."""
        found, names = self.base.found, self.base.family.names
        if found.position_table is None:
            self.before_layer(0, module)
            self.on_layers, self.at_first = False, True
            return
        assert names.position_table is not None
        self.adds_vectors = True
        module.like = Reference(found.decoder, names.token_embedding)
        set_module(self.undo, found.decoder, names.position_table, module)
        self._list(module)

    def turn(self, scheme: RotaryScheme) -> None:
        """Turn the queries and keys of the layers as the scheme says."""
        base, found, facts = self.base, self.base.found, self.base.family.rotation
        if base.rotation.is_own(scheme) and all(found.rotated[layer] for layer in self.layers):
            self._take_all_turned(found.rotary)
            return  # the base's own rotation is right as it is: nothing to do, and so nothing to get wrong
        if scheme.layers is not None and facts.attention_switch is not None:
            for layer in self.layers:  # named, so turned, though the base may leave it out
                set_attribute(self.undo, found.attention_of[layer], facts.attention_switch, 1)
        if base.rotation.is_own(scheme):
            return
        parameters = base.rotation.parameters(scheme)
        rotary = self._rotary(scheme, parameters)
        if found.rotary is None:
            rotation = self._own("rotary_emb", rotary)
            for layer in self.layers:
                attention = found.attention_of[layer]
                set_attribute(self.undo, attention, "posenc_rotation", rotation)
                set_attribute(self.undo, attention, "posenc_pairs", scheme.pairs or facts.pairs)
            self.on_attentions = "posenc_rotation"
        elif len(self.layers) == len(self.base.sizes):
            assert facts.rotary is not None
            set_module(self.undo, found.decoder, facts.rotary, rotary)
            if parameters is not None:
                own: Any = base.config.rope_parameters
                beside = {key: own[key] for key in facts.parameter_temperature if key in own and key not in parameters}
                for config in base.configs:
                    set_attribute(self.undo, config, "rope_parameters", {**parameters, **beside})
        else:
            give_rotation(self, self._own("posenc_rotary", rotary), takes_layer_type=_is_by_layer_type(parameters))
        if facts.rescales and parameters is not None:
            for layer in self.layers:
                scaling = base.rotation.scaling_with(layer, parameters)
                set_attribute(self.undo, found.attention_of[layer], "scaling", scaling)
        self._take_all_turned(rotary)
        self._list(rotary)

    def _take_all_turned(self, rotary: nn.Module | None) -> None:
        """Tell attention that slices by a number of its own how many dimensions there are cosines for."""
        if (name := self.base.family.rotation.attention_size) is not None and rotary is not None:
            size = turned_dimensions(rotary)
            for layer in self.layers:
                set_attribute(self.undo, self.base.found.attention_of[layer], name, size)

    def _rotary(self, scheme: RotaryScheme, parameters: dict[str, Any] | None) -> nn.Module:
        """Return the module that makes the angles."""
        found, facts = self.base.found, self.base.family.rotation
        rotary: nn.Module
        if parameters is not None:
            rotary = self.base.rotation.make(parameters)
        else:
            dims = self.base.rotation.dims
            rotary = scheme.build(dims)
            if found.rotary is not None and not facts.slices_rotary:  # which turns whole heads
                rotary = PartialRotary(rotary, dims.head_dim, gives=facts.angles)
        if hasattr(found.rotary, "layer_types"):  # decoders ask their rotary module for which types it has angles
            rotary.layer_types = found.rotary.layer_types
        parameter = next(found.decoder.parameters())
        if not parameter.is_meta:
            rotary.to(parameter.device)
        return rotary

    def _own(self, name: str, module: nn.Module) -> Reference:
        """Let the decoder own a module under a name, or where another scheme has that, under the next."""
        decoder, free, number = self.base.found.decoder, name, 2
        while free in decoder._modules:
            free, number = f"{name}_{number}", number + 1
        set_module(self.undo, decoder, free, module)
        self._list(module)
        return Reference(decoder, free)

    def _list(self, module: nn.Module) -> None:
        for each in module.modules():
            if isinstance(each, PositionModule) and not any(each is owner for owner in self.owners):
                self.owners.append(each)

    @property
    def carried(self) -> Carried:
        """What each of the layers carries now."""
        return Carried(self.marker, self.on_attentions, self.on_layers)


def _is_by_layer_type(parameters: dict[str, Any] | None) -> bool:
    return bool(parameters) and all(isinstance(value, dict) for value in (parameters or {}).values())


def give_rotation(site: ModelSite, rotation: Reference, *, takes_layer_type: bool) -> None:
    """Let the layers of a base that rotates take their cosines and sines from a module of their own.

    Args:
        site: the layers.
        rotation: the module.
        takes_layer_type: whether it is called with the layer's type, as Gemma 3's is.
    """
    types: Any = getattr(site.base.config, "layer_types", None)
    for index in site.layers:
        layer = site.base.found.layers[index]
        set_attribute(site.undo, layer, "posenc_rotation", rotation)
        set_attribute(
            site.undo, layer, "posenc_coordinates", site.base.family.rotation.parameter_coordinates is not None
        )
        set_attribute(site.undo, layer, "posenc_rotation_of", (types[index],) if takes_layer_type else ())


def operate(undo: Undo, plan: Plan) -> list[PositionModule]:
    """Change the modules of a model as planned.

    Args:
        undo: where the inverse steps go.
        plan: the checked plan; its schemes are resolved.

    Returns:
        The new modules that own position parameters, uninitialised.
    """
    lengths = _rotary_lengths(plan)  # before the config says something else
    owners: list[PositionModule] = []
    names = [scheme.name for scheme in plan.schemes]
    sites = []
    for number, scheme in enumerate(plan.schemes):
        again = names[:number].count(scheme.name)
        marker = MARKER + scheme.name + (f"_{again + 1}" if again else "")
        sites.append(ModelSite(undo, plan, scheme, owners, marker))
    _silence_base(undo, plan, sites)
    for layer in plan.replaced:
        _replace_attention(undo, plan.base, plan.base.found.attention_of[layer])
    for site in sites:
        site.scheme.acts_on.put(site.scheme, site)
        if site.scheme.window is not None:
            for layer in site.layers:
                set_attribute(undo, plan.base.found.attention_of[layer], "posenc_window", site.scheme.window)
    if plan.attends:
        _attend_through(undo, plan)
    _mark_layers(undo, plan, sites)
    _set_lengths(undo, plan, lengths)
    return owners


def _silence_base(undo: Undo, plan: Plan, sites: list[ModelSite]) -> None:
    """Switch off the base's own positions in the layers that have schemes, leaving nothing of them there."""
    found, family = plan.base.found, plan.base.family
    for site in sites:
        site.scheme.acts_on.silence(site)
    if found.position_table is not None and not plan.kept:
        assert family.names.position_table is not None
        silent = NoEmbedding(plan.base.dims.hidden_size)
        silent.like = Reference(found.decoder, family.names.token_embedding)
        set_module(undo, found.decoder, family.names.position_table, silent)
    own = family.attention or OwnAttention()
    if own.idle_rotary is not None:
        native = found.decoder.get_submodule(own.idle_rotary)
        set_module(undo, found.decoder, own.idle_rotary, IdentityRotary(native))
    for name, value in own.decoder_attributes.items():
        set_attribute(undo, found.decoder, name, value)


def _replace_attention(undo: Undo, base: BaseModel, attention: nn.Module) -> None:
    """Put our class in front of the class of an attention, unless it is there."""
    family = base.family
    set_attribute(undo, attention, "posenc_family", family.model_types[0])
    set_attribute(undo, attention, "scaling", family.attention.scaling(attention))
    if (window := family.attention.window(attention)) is not None:
        set_attribute(undo, attention, "posenc_window", window)
    if "config" not in attention.__dict__:
        set_attribute(undo, attention, "config", base.config)
    set_class(undo, attention, replaced_class(type(attention)))


def _attend_through(undo: Undo, plan: Plan) -> None:
    """Have every layer attend through the attention function of this package, also those without a scheme on it."""
    found = plan.base.found
    for layer, attention in found.attention_of.items():
        if plan.base.family.names.attention_heads is not None:
            set_attribute(undo, attention, "posenc_heads", plan.base.sizes[layer].num_heads)
        if "posenc" not in attention._modules:
            set_module(undo, attention, "posenc", WithoutPositions())
            chosen = "posenc_window" in attention.__dict__ or plan.base.family.always_replaced
            set_attribute(undo, attention, "posenc_engine", plan.attention if chosen else "auto")
    for each in plan.base.configs:
        set_attribute(undo, each, "_attn_implementation_internal", NAME)
    add_pre_hook(undo, found.decoder, require_attention)


def _mark_layers(undo: Undo, plan: Plan, sites: list[ModelSite]) -> None:
    """Register the buffer that names the scheme on every layer, and have the decoder check them."""
    found = plan.base.found
    carried = {layer: site.carried for site in sites for layer in site.layers}
    each = [carried.get(layer, Carried(KEPT)) for layer in range(len(found.layers))]
    each = [
        mine if layer in found.attention_of else replace(mine, on_attention=None) for layer, mine in enumerate(each)
    ]
    for layer, carries in zip(found.layers, each, strict=True):
        device = next(layer.parameters()).device
        register_buffer(undo, layer, carries.marker, torch.zeros(1, dtype=torch.uint8, device=device))
        add_pre_hook(undo, layer, enter_layer)
    alike = len(sites) == 1 and len(sites[0].layers) == len(each) == len(found.attention_of)
    if plan.base.family.drops_position_ids or plan.needs_one_coordinate:
        order = list(signature(type(found.decoder).forward).parameters)
        set_attribute(undo, found.decoder, "posenc_position_ids_at", order.index("position_ids") - 1)
        one = plan.needs_one_coordinate
        add_pre_hook(undo, found.decoder, require_one_coordinate if one else hand_down_position_ids)
    if any(site.adds_vectors for site in sites):
        names = tuple(signature(type(found.decoder).forward).parameters)[1:]
        set_attribute(undo, found.decoder, "posenc_arguments", names)
        add_pre_hook(undo, found.decoder, require_counts)
    layers = PatchedLayers(
        plan.base.family.names.layers,
        plan.base.family.names.attention,
        tuple(each[:1] if alike else each),
        at_first=any(site.at_first for site in sites),
    )
    set_attribute(undo, found.decoder, "posenc_layers", layers)
    add_pre_hook(undo, found.decoder, require_patched_layers)


def _rotary_lengths(plan: Plan) -> list[int] | None:
    """Return the lengths at which new rotations change their frequencies; None if the base's own goes on turning."""
    if plan.rotated_by_base():
        return None
    rotations = [
        parameters or {} for scheme in plan.schemes for parameters in scheme.acts_on.rotations(scheme, plan.base)
    ]
    return [parameters[ORIGINAL_LENGTH] for parameters in rotations if ORIGINAL_LENGTH in parameters]


def _set_lengths(undo: Undo, plan: Plan, rotary_lengths: list[int] | None) -> None:
    """Tell the config how long the model may run; `generate` reads it."""
    config = plan.base.config
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if (limit := plan.limit()) is not None:
        set_attribute(undo, config, name, limit)
    elif hasattr(config, name) and not plan.base.family.sized_by_length and not plan.kept and not any(plan.rotating):
        set_attribute(undo, config, name, max(UNLIMITED, config.max_position_embeddings))
    if ORIGINAL_LENGTH in config.__dict__ and rotary_lengths is not None:
        # Phi-3's generate drops the cache when it crosses this length, to switch between its two sets of frequencies;
        # and transformers prefers it to what rope_parameters say.
        set_attribute(undo, config, ORIGINAL_LENGTH, min(rotary_lengths, default=UNLIMITED))
