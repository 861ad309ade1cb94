"""Putting the planned schemes into a live model. Each change is recorded with its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..families.own_attention import OwnAttention
from ..layer_state import STATE, on_attention, on_decoder, on_layer
from ..live.attend import attend_through_us
from ..live.base_model import BaseModel
from ..live.layer_config import LayerConfig
from ..live.undo import Undo, add_pre_hook, keep, register_buffer, set_attribute, set_class, set_module
from ..modules import PositionEmbedding, PositionModule, Reference, Shared
from ..schemes.base import Dims, RotaryScheme, Scheme
from ..upstream.replaced import replaced_class
from ..upstream.rotary import (
    ORIGINAL_LENGTH,
    IdentityRotary,
    PartialRotary,
    answer_like,
    turned_dimensions,
)
from .hooks import (
    enter_layer,
    hand_down_position_ids,
    require_attention,
    require_counts,
    require_one_coordinate,
)
from .layers import KEPT, MARKER, Carried, PatchedLayers, require_patched_layers
from .plan import Plan

STILL = "posenc_still"
"""Module of the decoder that turns nothing, for layers with schemes where others go on rotating."""

UNLIMITED = 2**17
"""`max_position_embeddings` of a patched model whose scheme has no limit; `generate` caps its default length by it."""


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
    """A model that is being changed, and the layers of it that one scheme is for, see `placement.Site`."""

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
        if rotation.parameter_temperature:
            self._silence_temperature(rotation.parameter_temperature[0])
        if found.rotary is None:
            return
        identity = IdentityRotary(found.rotary, rotation.angles)
        if self.plan.rotated_by_base():
            known = STILL in found.decoder._modules
            still = Reference(found.decoder, STILL) if known else self._own(STILL, identity)
            give_rotation(self, still, takes_layer_type=len(identity.pairs) > 1)
        elif not isinstance(found.decoder.get_submodule(str(rotation.rotary)), IdentityRotary):
            set_module(self.undo, found.decoder, str(rotation.rotary), identity)

    def _silence_temperature(self, strength: str) -> None:
        """Switch off a factor of queries by its key of `rope_parameters`; by layer where other layers rotate."""
        if not self.plan.rotated_by_base() and not any(self.plan.rotating):
            for config in self.base.configs:
                off = {**config.rope_parameters, strength: 0.0}
                set_attribute(self.undo, config, "rope_parameters", off)
            return
        for layer in self.layers:
            attention: Any = self.base.found.attention_of[layer]
            set_attribute(self.undo, attention, "config", LayerConfig(attention.config, **{strength: 0.0}))

    def share(self, module: nn.Module) -> Reference:
        """Let the decoder own a module that the layers share."""
        return self._own("posenc", module)

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer, which then attends through it."""
        attention = self.base.found.attention_of[layer]
        set_module(self.undo, attention, "posenc", module)
        keep(self.undo, attention, on_attention(attention), engine=self.plan.attention)
        self.on_attentions = "posenc"
        self._list(module)

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add the vectors that a module makes to the hidden states that enter a layer."""
        target = self.base.found.layers[layer]
        self.adds_vectors = True
        set_module(self.undo, target, "posenc", Shared(module) if isinstance(module, Reference) else module)
        if self.base.family.positions_in_mask:
            names = tuple(signature(target.forward).parameters)
            keep(self.undo, target, on_layer(target), family=self.base.family.model_types[0], arguments=names)
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
                pairs = scheme.pairs or facts.pairs
                keep(self.undo, attention, on_attention(attention), rotation=rotation, pairs=pairs)
            self.on_attentions = STATE
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
            if found.rotary is not None and not (facts.slices_rotary and facts.angles == "list twice"):
                size = turned_dimensions(rotary) if facts.slices_rotary else dims.head_dim
                rotary = PartialRotary(rotary, size, gives=facts.angles)
        answer_like(rotary, found.rotary)
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
        """The share of the scheme that each of the layers carries now."""
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
        keep(
            site.undo,
            layer,
            on_layer(layer),
            rotation=rotation,
            rotation_arguments=(types[index],) if takes_layer_type else (),
            coordinates=site.base.rotation.coordinates,
        )


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
                attention = plan.base.found.attention_of[layer]
                keep(undo, attention, on_attention(attention), window=site.scheme.window)
    if plan.attends:
        attend_through_us(undo, plan.base, plan.attention)
        add_pre_hook(undo, plan.base.found.decoder, require_attention)
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
    own = family.attention or OwnAttention()
    window = own.window(attention)
    keep(undo, attention, on_attention(attention), family=family.model_types[0], window=window)
    set_attribute(undo, attention, "scaling", own.scaling(attention))
    if "config" not in attention.__dict__:
        set_attribute(undo, attention, "config", base.config)
    set_class(undo, attention, replaced_class(type(attention)))


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
        one = plan.needs_one_coordinate
        add_pre_hook(undo, found.decoder, require_one_coordinate if one else hand_down_position_ids)
    if any(site.adds_vectors for site in sites):
        add_pre_hook(undo, found.decoder, require_counts)
    layers = PatchedLayers(
        plan.base.family.names.layers,
        plan.base.family.names.attention,
        tuple(each[:1] if alike else each),
        at_first=any(site.at_first for site in sites),
    )
    names = tuple(signature(type(found.decoder).forward).parameters)[1:]
    rows = plan.base.rotation.coordinates + (not plan.base.family.drops_position_ids)
    keep(undo, found.decoder, on_decoder(found.decoder), layers=layers, arguments=names, rows=rows)
    add_pre_hook(undo, found.decoder, require_patched_layers)


def _rotary_lengths(plan: Plan) -> list[int] | None:
    """Return the lengths at which new rotations change their frequencies; None if the base's own goes on turning."""
    if plan.rotated_by_base():
        return None
    rotating: list[Any] = [scheme for scheme, rotates in zip(plan.schemes, plan.rotating, strict=True) if rotates]
    rotations = [plan.base.rotation.parameters(scheme) or {} for scheme in rotating]
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
