"""Turn a plan into the list of changes that put its schemes into a live model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..dims import Dims
from ..errors import UnsupportedModelError
from ..families.own_attention import Stock
from ..layer_state import STATE, on_attention, on_decoder, on_layer
from ..live.layer_config import LayerConfig
from ..live.our_attention import AttendThroughUs
from ..live.undo import AddBuffer, AddPreHook, Change, Keep, SetAttribute, SetClass, SetModule
from ..modules import Additions, PositionEmbedding, PositionModule, Reference, Shared
from ..placement import RopeParameters
from ..schemes.base import RotaryScheme, Scheme
from ..upstream.replaced_attention import replaced_class
from ..upstream.rotary import (
    ORIGINAL_LENGTH,
    IdentityRotary,
    PartialRotary,
    answer_like,
    turned_dimensions,
)
from ..upstream.token_numbers import cache_argument, require_known_cache, wrap_cache
from .hooks import (
    enter_layer,
    hand_down_position_ids,
    place_held_keys,
    require_attention,
    require_counts,
    require_one_coordinate,
)
from .patched_layers import BASE_MARKER, MARKER, Carried, PatchedLayers, require_patched_layers
from .plan import Plan

UNROTATED = "posenc_still"
"""Name of a rotary module that rotates by zero, for layers with schemes where other layers keep the base's."""

UNLIMITED = 2**17
"""`max_position_embeddings` of a patched model whose scheme has no limit. `generate` caps its default length by it."""


class NoEmbedding(PositionEmbedding):
    """Replaces the base's table of positions by zeros."""

    def __init__(self, size: int) -> None:
        """Set the size of the zero vectors.

        Args:
            size: the hidden size, E.
        """
        super().__init__()
        self.size = size

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return zeros (B|1, T, E), expanded from one number."""
        return torch.zeros(1, device=position_ids.device).expand(*position_ids.shape, self.size)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's generators for a `with` block, and restore them afterwards. With None, leave them alone."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@dataclass
class Changes:
    """The changes that a plan needs. `Undo.apply` makes them later.

    Attributes:
        plan: the plan of the whole model, with resolved schemes.
        pending: the changes, in the order in which they have to be made.
        position_modules: new module with position parameters -> the module of the model that it goes into.
        additions: layer index -> the new modules on the queries of its attention.
    """

    plan: Plan
    pending: list[Change] = field(default_factory=list)
    position_modules: dict[PositionModule, nn.Module] = field(default_factory=dict)
    additions: dict[int, Additions] = field(default_factory=dict)

    def add(self, *changes: Change) -> None:
        """Append changes to the list."""
        self.pending += changes

    def put(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Set or replace a sub-module, and list the position modules inside it."""
        self.add(SetModule(owner, name, module))
        self.list_positions(module, owner)

    def list_positions(self, module: nn.Module, owner: nn.Module) -> None:
        """List the position modules inside a module that goes into `owner`."""
        for inner in module.modules():
            if isinstance(inner, PositionModule):
                self.position_modules.setdefault(inner, owner)

    def add_to_decoder(self, name: str, module: nn.Module) -> Reference:
        """Add a module to the decoder, as `name`, or as `name_2`, `name_3`, ... if that name is taken."""
        decoder, free_name, number = self.plan.base.modules.decoder, name, 2
        while self.has_name(free_name):
            free_name, number = f"{name}_{number}", number + 1
        self.put(decoder, free_name, module)
        return Reference(decoder, free_name)

    def has_name(self, name: str) -> bool:
        """Return whether the decoder has a module of this name, or will have one."""
        decoder = self.plan.base.modules.decoder
        additions = (change for change in self.pending if isinstance(change, SetModule) and change.owner is decoder)
        return name in decoder._modules or any(addition.name == name for addition in additions)


class ModelSite:
    """A model to change, and the layers that one scheme is for. Implements `placement.Site`."""

    def __init__(self, changes: Changes, scheme: Scheme, marker: str) -> None:
        """Look up the layers of a scheme.

        Args:
            changes: the changes of the whole model. Methods append the scheme's changes.
            scheme: one of the plan's schemes.
            marker: name of the buffer that marks the scheme's layers.
        """
        self.changes = changes
        self.plan = changes.plan
        self.base = changes.plan.base
        self.layers = changes.plan.layers_of(scheme)
        self.scheme = scheme
        self.marker = marker
        self.attention_attribute: str | None = None
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
        """Switch off the base's rotation in the layers, and its query factors that grow with the position."""
        found, rotation = self.base.modules, self.base.family.rotation
        for layer in self.layers:
            if layer in found.attention_of:
                for name, value in rotation.attention_temperature.items():
                    self.changes.add(SetAttribute(found.attention_of[layer], name, value))
        if rotation.parameter_temperature:
            self._silence_temperature(rotation.parameter_temperature[0])
        if found.rotary is None:
            return
        identity = IdentityRotary(found.rotary, rotation.angles)
        if self.plan.rotated_by_base:
            if self.changes.has_name(UNROTATED):
                unrotated = Reference(found.decoder, UNROTATED)
            else:
                unrotated = self.changes.add_to_decoder(UNROTATED, identity)
            give_rotation(self, unrotated, takes_layer_type=len(identity.pairs) > 1)
        else:
            self.changes.put(found.decoder, str(rotation.rotary), identity)
            if rotation.config_thetas is not None:
                give_rotation(self, Reference(found.decoder, str(rotation.rotary)), takes_layer_type=False)

    def _silence_temperature(self, strength: str) -> None:
        """Switch off a query factor: in the model's config, or in each layer's if other layers rotate.

        Args:
            strength: key of `rope_parameters` that scales the factor.
        """
        if not self.plan.rotated_by_base and not any(self.plan.rotating):
            for config in self.base.configs:
                off = {**config.rope_parameters, strength: 0.0}
                self.changes.add(SetAttribute(config, "rope_parameters", off))
            return
        for layer in self.layers:
            attention: Stock = self.base.modules.attention_of[layer]
            self.changes.add(SetAttribute(attention, "config", LayerConfig(attention.config, **{strength: 0.0})))

    def share(self, module: nn.Module) -> Reference:
        """Add a module that the layers share to the decoder."""
        return self.changes.add_to_decoder("posenc", module)

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer. The attention then computes its scores with it."""
        attention = self.base.modules.attention_of[layer]
        self.changes.put(attention, "posenc", module)
        self.changes.add(Keep(attention, on_attention, {"engine": self.plan.attention}))
        self.attention_attribute = "posenc"

    def on_queries(self, layer: int, name: str, module: nn.Module) -> None:
        """Put a module on the queries of a layer's attention, beside what else the layer has."""
        attention = self.base.modules.attention_of[layer]
        if layer not in self.changes.additions:
            self.changes.additions[layer] = Additions()
            self.changes.put(attention, "posenc_additions", self.changes.additions[layer])
            self.changes.add(Keep(attention, on_attention, {"engine": self.plan.attention}))
        self.changes.additions[layer].add_module(name, module)
        self.changes.list_positions(module, attention)
        self.attention_attribute = "posenc_additions"

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add a module's vectors to the hidden states that enter a layer."""
        decoder_layer = self.base.modules.layers[layer]
        self.adds_vectors = True
        self.changes.put(decoder_layer, "posenc", Shared(module) if isinstance(module, Reference) else module)
        if self.base.family.positions_in_mask:
            state = {
                "family": self.base.family.model_types[0],
                "arguments": tuple(signature(decoder_layer.forward).parameters),
            }
            self.changes.add(Keep(decoder_layer, on_layer, state))
        self.on_layers = True

    def at_input(self, module: PositionEmbedding) -> None:
        """Add a module's vectors to the hidden states that enter the first layer."""
        found, names = self.base.modules, self.base.family.names
        if found.position_table is None:
            self.before_layer(0, module)
            self.on_layers, self.at_first = False, True
            return
        assert names.position_table is not None
        self.adds_vectors = True
        module.like = Reference(found.decoder, names.token_embedding)
        self.changes.put(found.decoder, names.position_table, module)

    def turn(self, scheme: RotaryScheme) -> None:
        """Rotate the queries and keys of the layers with the scheme."""
        base, found, facts = self.base, self.base.modules, self.base.family.rotation
        if base.rotation.is_own(scheme) and all(found.rotated[layer] for layer in self.layers):
            self._set_attention_size(found.rotary)
            return  # the base already rotates so
        if scheme.layers is not None and facts.attention_switch is not None:
            for layer in self.layers:  # the caller named it, so it rotates even if the base leaves it out
                self.changes.add(SetAttribute(found.attention_of[layer], facts.attention_switch, 1))
        if base.rotation.is_own(scheme):
            return
        parameters = base.rotation.parameters(scheme)
        rotary = self._rotary(scheme, parameters)
        if found.rotary is None:
            rotation = self.changes.add_to_decoder("rotary_emb", rotary)
            for layer in self.layers:
                state = {"rotation": rotation, "pairs": scheme.pairs or facts.pairs}
                self.changes.add(Keep(found.attention_of[layer], on_attention, state))
            self.attention_attribute = STATE
        elif len(self.layers) == len(self.base.sizes):
            assert facts.rotary is not None
            self.changes.put(found.decoder, facts.rotary, rotary)
            if facts.config_thetas is not None:
                give_rotation(self, Reference(found.decoder, facts.rotary), takes_layer_type=False)
            if parameters is not None:
                stock: Any = base.config.rope_parameters
                temperature_keys = [key for key in facts.parameter_temperature if key in stock]
                temperature = {key: stock[key] for key in temperature_keys if key not in parameters}
                for config in base.configs:
                    self.changes.add(SetAttribute(config, "rope_parameters", {**parameters, **temperature}))
        else:
            rotation = self.changes.add_to_decoder("posenc_rotary", rotary)
            give_rotation(self, rotation, takes_layer_type=_is_by_layer_type(parameters))
        if facts.rescales and parameters is not None:
            for layer in self.layers:
                scaling = base.rotation.scaling_with(layer, parameters)
                self.changes.add(SetAttribute(found.attention_of[layer], "scaling", scaling))
        self._set_attention_size(rotary)

    def own_angles(self, scheme: Scheme) -> Mapping[int, Any]:
        """Return how the base rotates each layer of a scheme."""
        return self.base.own_angles(scheme)

    def _set_attention_size(self, rotary: nn.Module | None) -> None:
        """Set the attribute that tells the attentions of some families how many dimensions to rotate."""
        if (name := self.base.family.rotation.attention_size) is not None and rotary is not None:
            size = turned_dimensions(rotary)
            for layer in self.layers:
                self.changes.add(SetAttribute(self.base.modules.attention_of[layer], name, size))

    def _rotary(self, scheme: RotaryScheme, parameters: RopeParameters | None) -> nn.Module:
        """Return a module that computes the cosines and sines of a scheme."""
        found, facts = self.base.modules, self.base.family.rotation
        rotary: nn.Module
        if parameters is not None:
            rotary = self.base.rotation.make(parameters)
        else:
            dims = self.base.rotation.dims_of(self.layers[0])
            rotary = scheme.build(dims)
            if found.rotary is not None and not (facts.slices_rotary and facts.angles == "list twice"):
                size = turned_dimensions(rotary) if facts.slices_rotary else dims.head_dim
                rotary = PartialRotary(rotary, size, gives=facts.angles)
        answer_like(rotary, found.rotary)
        parameter = next(found.decoder.parameters())
        if not parameter.is_meta:
            rotary.to(parameter.device)
        return rotary

    @property
    def carried(self) -> Carried:
        """The attributes that each layer of the site must have from now on."""
        attributes = () if self.attention_attribute is None else (self.attention_attribute,)
        return Carried((self.marker,), attributes, self.on_layers)


def _is_by_layer_type(parameters: RopeParameters | None) -> bool:
    return bool(parameters) and all(isinstance(value, dict) for value in (parameters or {}).values())


def give_rotation(site: ModelSite, rotation: Reference, *, takes_layer_type: bool) -> None:
    """Let a site's layers take their cosines and sines from another module than the base's rotary module.

    Args:
        site: the layers.
        rotation: the module that computes the cosines and sines.
        takes_layer_type: whether the module is called with the layer's type, as Gemma 3's is.
    """
    types: Any = getattr(site.base.config, "layer_types", None)
    for index in site.layers:
        layer = site.base.modules.layers[index]
        if site.base.family.rotation.config_thetas is not None and not site.base.rotated[index]:
            continue  # the base passes it no cosines, and it stays unrotated
        state = {
            "rotation": rotation,
            "rotation_arguments": (types[index],) if takes_layer_type else (),
            "arguments": tuple(signature(layer.forward).parameters),
            "coordinates": site.base.rotation.coordinates,
        }
        site.changes.add(Keep(layer, on_layer, state))


def place(plan: Plan) -> Changes:
    """Return the changes that put the schemes of a plan into its model. Their parameters are not initialised yet.

    Args:
        plan: a checked plan with resolved schemes.
    """
    changes = Changes(plan)
    names = [scheme.name for scheme in plan.schemes]
    sites = []
    for index, scheme in enumerate(plan.schemes):
        namesakes = names[:index].count(scheme.name)
        marker = MARKER + scheme.name + (f"_{namesakes + 1}" if namesakes else "")
        sites.append(ModelSite(changes, scheme, marker))
    _silence_base(changes, sites)
    for layer in plan.replaced_attentions:
        _replace_attention(changes, plan.base.modules.attention_of[layer])
    for site in sorted(sites, key=lambda site: site.scheme.acts_on.order()):
        site.scheme.acts_on.put(site.scheme, site)
        if site.scheme.window is not None:
            for layer in site.layers:
                if (attention := plan.base.modules.attention_of.get(layer)) is not None:
                    state = {"window": site.scheme.window, "kept_first": site.scheme.sinks or 0}
                    changes.add(Keep(attention, on_attention, state))
    if (base_scheme := plan.base_scheme) is not None:
        sites.append(ModelSite(changes, base_scheme, BASE_MARKER))
        base_scheme.acts_on.put(base_scheme, sites[-1])
    if plan.attends:
        decoder = plan.base.modules.decoder
        changes.add(AttendThroughUs(plan.base, plan.attention, plan.backend))
        changes.add(AddPreHook(decoder, require_attention), AddPreHook(decoder, place_held_keys))
    if any(site.scheme.acts_on.uses_tokens() for site in sites):
        _wrap_caches(changes)
    _mark_layers(changes, sites)
    _set_lengths(changes)
    return changes


def place_started(plan: Plan, seed: int | None) -> Changes:
    """Resolve the schemes of a plan, and return the changes with initialised parameters.

    Args:
        plan: a checked plan. Its schemes are resolved from the base's weights.
        seed: seed of parameters that start at random; None draws from torch's generators.
    """
    model, native = plan.base.model, plan.base.native()
    plan = replace(plan, schemes=tuple(scheme.resolve(native, plan.base.dims) for scheme in plan.schemes))
    device = next(model.parameters()).device
    # Not the caller's default device. Rotations have values even if the model is on the meta device.
    with torch.device("cpu" if device.type == "meta" else device), torch.no_grad():
        changes = place(plan)
        with seeded(seed):
            for module, owner in changes.position_modules.items():
                neighbour = _floating_parameter(owner, model)  # FSDP wants one dtype per layer
                module.to(device=neighbour.device, dtype=neighbour.dtype)
                if isinstance(module, PositionEmbedding):
                    module.initialize(native)
                else:
                    module.reset_parameters()
                module.train(model.training)
    return changes


def _floating_parameter(*modules: nn.Module) -> nn.Parameter:
    """Return the first floating-point parameter of the first module that has one."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter
    raise UnsupportedModelError(f"{type(modules[-1]).__name__} has no floating-point parameters")


def _silence_base(changes: Changes, sites: list[ModelSite]) -> None:
    """Switch off the base's positions in the layers that have schemes."""
    base = changes.plan.base
    found, family = base.modules, base.family
    for site in sites:
        site.scheme.acts_on.silence(site)
    if found.position_table is not None and not changes.plan.base_layers:
        assert family.names.position_table is not None
        silent = NoEmbedding(base.dims.hidden_size)
        silent.like = Reference(found.decoder, family.names.token_embedding)
        changes.add(SetModule(found.decoder, family.names.position_table, silent))
    attributes = dict(family.decoder_attributes)
    if (attention := family.attention) is not None:
        attributes |= attention.decoder_attributes
        if attention.idle_rotary is not None:
            rotary = found.decoder.get_submodule(attention.idle_rotary)
            changes.add(SetModule(found.decoder, attention.idle_rotary, IdentityRotary(rotary)))
    changes.add(*(SetAttribute(found.decoder, name, value) for name, value in attributes.items()))


def _replace_attention(changes: Changes, attention: nn.Module) -> None:
    """Give an attention a class of ours that derives from its own."""
    base = changes.plan.base
    pieces = base.family.own_attention()
    state = {"family": base.family.model_types[0], "window": pieces.window(attention)}
    changes.add(Keep(attention, on_attention, state), SetAttribute(attention, "scaling", pieces.scaling(attention)))
    if "config" not in attention.__dict__:
        changes.add(SetAttribute(attention, "config", base.config))
    changes.add(SetClass(attention, replaced_class(type(attention))))


def _wrap_caches(changes: Changes) -> None:
    """Let every attention make the numbers of its additions, and keep them beside its keys in the cache."""
    found = changes.plan.base.modules
    for attention in found.attentions:
        # An attention without a cache argument has no such additions.
        state = {"cache": cache_argument(attention) or on_attention(attention).cache}
        changes.add(Keep(attention, on_attention, state), AddPreHook(attention, wrap_cache))
    changes.add(AddPreHook(found.decoder, require_known_cache))


def _mark_layers(changes: Changes, sites: list[ModelSite]) -> None:
    """Register the buffer that names the scheme on every layer, and hooks that check layers and positions."""
    plan = changes.plan
    found, family = plan.base.modules, plan.base.family
    replaced = {layer for site in sites if not site.scheme.acts_on.joins() for layer in site.layers}
    carried = []
    for index, layer in enumerate(found.layers):
        share = Carried(() if index in replaced else (BASE_MARKER,))
        for site in sites:
            if index in site.layers:
                share = share.with_parts(site.carried)
        if index not in found.attention_of:
            share = replace(share, on_attention=())
        carried.append(share)
        device = next(layer.parameters()).device
        markers = [AddBuffer(layer, name, torch.zeros(1, dtype=torch.uint8, device=device)) for name in share.markers]
        changes.add(*markers, AddPreHook(layer, enter_layer))
    are_alike = set(carried) == {carried[0]} and len(carried) == len(found.attention_of)
    if plan.needs_one_coordinate:
        changes.add(AddPreHook(found.decoder, require_one_coordinate))
    elif family.drops_position_ids:
        changes.add(AddPreHook(found.decoder, hand_down_position_ids))
    if any(site.adds_vectors for site in sites):
        changes.add(AddPreHook(found.decoder, require_counts))
    layers = PatchedLayers(
        family.names.layers,
        family.names.attention,
        tuple(carried[:1] if are_alike else carried),
        at_first=any(site.at_first for site in sites),
    )
    names = tuple(signature(type(found.decoder).forward).parameters)[1:]
    rows = plan.base.rotation.coordinates + (not plan.base.family.drops_position_ids)
    changes.add(
        Keep(found.decoder, on_decoder, {"layers": layers, "arguments": names, "rows": rows}),
        AddPreHook(found.decoder, require_patched_layers),
    )


def _rotary_lengths(plan: Plan) -> list[int] | None:
    """Return the lengths at which new rotations change their frequencies, or None if a layer keeps the base's."""
    if plan.rotated_by_base:
        return None
    rotary_schemes: list[Any] = [scheme for scheme, rotates in zip(plan.schemes, plan.rotating, strict=True) if rotates]
    rotations = [plan.base.rotation.parameters(scheme) or {} for scheme in rotary_schemes]
    return [parameters[ORIGINAL_LENGTH] for parameters in rotations if ORIGINAL_LENGTH in parameters]


def _set_lengths(changes: Changes) -> None:
    """Set the lengths in the config that `generate` reads."""
    plan = changes.plan
    config, family = plan.base.config, plan.base.family
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if plan.limit is not None:
        changes.add(SetAttribute(config, name, plan.limit))
    elif any(scheme.acts_on.keeps_frequencies() for scheme in plan.schemes):
        return  # transformers computes the frequencies of some scalings from the lengths below
    elif hasattr(config, name) and not family.sized_by_length and not plan.base_layers and not any(plan.rotating):
        changes.add(SetAttribute(config, name, max(UNLIMITED, config.max_position_embeddings)))
    if ORIGINAL_LENGTH in config.__dict__ and (lengths := _rotary_lengths(plan)) is not None:
        # Phi-3's generate drops the cache at this length, to switch between its two sets of frequencies. transformers
        # prefers this attribute to the length in rope_parameters.
        changes.add(SetAttribute(config, ORIGINAL_LENGTH, min(lengths, default=UNLIMITED)))
