"""What puts the planned schemes into a live model, as a list of changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..dims import Dims
from ..errors import UnsupportedModelError
from ..layer_state import STATE, on_attention, on_decoder, on_layer
from ..live.attend import AttendThroughUs
from ..live.layer_config import LayerConfig
from ..live.undo import AddBuffer, AddPreHook, Change, Keep, SetAttribute, SetClass, SetModule
from ..modules import PositionEmbedding, PositionModule, Reference, Shared
from ..placement import RopeParameters
from ..schemes.base import RotaryScheme, Scheme
from ..upstream.replaced_attention import replaced_class
from ..upstream.rotary import (
    ORIGINAL_LENGTH,
    IdentityRotary,
    PartialRotary,
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


@dataclass
class Changes:
    """Everything that a plan changes in a model. Nothing of it is made yet.

    Attributes:
        plan: of the whole model; its schemes are resolved.
        made: the changes, in order.
        owners: the new modules that own position parameters, each with the module of the model that it goes into.
    """

    plan: Plan
    made: list[Change] = field(default_factory=list)
    owners: dict[PositionModule, nn.Module] = field(default_factory=dict)

    def add(self, *changes: Change) -> None:
        """Change something more."""
        self.made += changes

    def put(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Set or replace a sub-module, and list what in it has position parameters."""
        self.add(SetModule(owner, name, module))
        for each in module.modules():
            if isinstance(each, PositionModule):
                self.owners.setdefault(each, owner)

    def own(self, name: str, module: nn.Module) -> Reference:
        """Let the decoder own a module under a name, or where that is taken, under the next one."""
        decoder, free, number = self.plan.base.found.decoder, name, 2
        while self.takes(free):
            free, number = f"{name}_{number}", number + 1
        self.put(decoder, free, module)
        return Reference(decoder, free)

    def takes(self, name: str) -> bool:
        """Return whether the decoder has a module of this name, or will have one."""
        decoder = self.plan.base.found.decoder
        coming = (each for each in self.made if isinstance(each, SetModule) and each.owner is decoder)
        return name in decoder._modules or any(each.name == name for each in coming)


class ModelSite:
    """A model that is to be changed, and the layers of it that one scheme is for, see `placement.Site`."""

    def __init__(self, changes: Changes, scheme: Scheme, marker: str) -> None:
        """Look at the layers of one scheme.

        Args:
            changes: of the whole model; those of the scheme are added.
            scheme: one of the plan's.
            marker: name of the buffer of its layers.
        """
        self.changes = changes
        self.plan = changes.plan
        self.base = changes.plan.base
        self.layers = changes.plan.layers_of(scheme)
        self.scheme = scheme
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
                    self.changes.add(SetAttribute(found.attention_of[layer], name, value))
        if rotation.parameter_temperature:
            self._silence_temperature(rotation.parameter_temperature[0])
        if found.rotary is None:
            return
        identity = IdentityRotary(found.rotary, rotation.angles)
        if self.plan.rotated_by_base:
            known = self.changes.takes(STILL)
            still = Reference(found.decoder, STILL) if known else self.changes.own(STILL, identity)
            give_rotation(self, still, takes_layer_type=len(identity.pairs) > 1)
        else:
            self.changes.put(found.decoder, str(rotation.rotary), identity)
            if rotation.config_thetas is not None:
                give_rotation(self, Reference(found.decoder, str(rotation.rotary)), takes_layer_type=False)

    def _silence_temperature(self, strength: str) -> None:
        """Switch off a factor of queries by its key of `rope_parameters`; by layer where other layers rotate."""
        if not self.plan.rotated_by_base and not any(self.plan.rotating):
            for config in self.base.configs:
                off = {**config.rope_parameters, strength: 0.0}
                self.changes.add(SetAttribute(config, "rope_parameters", off))
            return
        for layer in self.layers:
            attention: Any = self.base.found.attention_of[layer]
            self.changes.add(SetAttribute(attention, "config", LayerConfig(attention.config, **{strength: 0.0})))

    def share(self, module: nn.Module) -> Reference:
        """Let the decoder own a module that the layers share."""
        return self.changes.own("posenc", module)

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer, which then attends through it."""
        attention = self.base.found.attention_of[layer]
        self.changes.put(attention, "posenc", module)
        self.changes.add(Keep(attention, on_attention, {"engine": self.plan.attention}))
        self.on_attentions = "posenc"

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Add the vectors that a module makes to the hidden states that enter a layer."""
        target = self.base.found.layers[layer]
        self.adds_vectors = True
        self.changes.put(target, "posenc", Shared(module) if isinstance(module, Reference) else module)
        if self.base.family.positions_in_mask:
            names = tuple(signature(target.forward).parameters)
            self.changes.add(Keep(target, on_layer, {"family": self.base.family.model_types[0], "arguments": names}))
        self.on_layers = True

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
        self.changes.put(found.decoder, names.position_table, module)

    def turn(self, scheme: RotaryScheme) -> None:
        """Turn the queries and keys of the layers as the scheme says."""
        base, found, facts = self.base, self.base.found, self.base.family.rotation
        if base.rotation.is_own(scheme) and all(found.rotated[layer] for layer in self.layers):
            self._take_all_turned(found.rotary)
            return  # the base's own rotation is right as it is: nothing to do, and so nothing to get wrong
        if scheme.layers is not None and facts.attention_switch is not None:
            for layer in self.layers:  # named, so turned, though the base may leave it out
                self.changes.add(SetAttribute(found.attention_of[layer], facts.attention_switch, 1))
        if base.rotation.is_own(scheme):
            return
        parameters = base.rotation.parameters(scheme)
        rotary = self._rotary(scheme, parameters)
        if found.rotary is None:
            rotation = self.changes.own("rotary_emb", rotary)
            for layer in self.layers:
                state = {"rotation": rotation, "pairs": scheme.pairs or facts.pairs}
                self.changes.add(Keep(found.attention_of[layer], on_attention, state))
            self.on_attentions = STATE
        elif len(self.layers) == len(self.base.sizes):
            assert facts.rotary is not None
            self.changes.put(found.decoder, facts.rotary, rotary)
            if facts.config_thetas is not None:
                give_rotation(self, Reference(found.decoder, facts.rotary), takes_layer_type=False)
            if parameters is not None:
                own: Any = base.config.rope_parameters
                beside = {key: own[key] for key in facts.parameter_temperature if key in own and key not in parameters}
                for config in base.configs:
                    self.changes.add(SetAttribute(config, "rope_parameters", {**parameters, **beside}))
        else:
            give_rotation(
                self, self.changes.own("posenc_rotary", rotary), takes_layer_type=_is_by_layer_type(parameters)
            )
        if facts.rescales and parameters is not None:
            for layer in self.layers:
                scaling = base.rotation.scaling_with(layer, parameters)
                self.changes.add(SetAttribute(found.attention_of[layer], "scaling", scaling))
        self._take_all_turned(rotary)

    def _take_all_turned(self, rotary: nn.Module | None) -> None:
        """Tell attention that slices by a number of its own how many dimensions there are cosines for."""
        if (name := self.base.family.rotation.attention_size) is not None and rotary is not None:
            size = turned_dimensions(rotary)
            for layer in self.layers:
                self.changes.add(SetAttribute(self.base.found.attention_of[layer], name, size))

    def _rotary(self, scheme: RotaryScheme, parameters: RopeParameters | None) -> nn.Module:
        """Return the module that makes the angles."""
        found, facts = self.base.found, self.base.family.rotation
        rotary: nn.Module
        if parameters is not None:
            rotary = self.base.rotation.make(parameters)
        else:
            dims = self.base.rotation.dims_of(self.layers[0])
            rotary = scheme.build(dims)
            if found.rotary is not None and not facts.slices_rotary:  # which turns whole heads
                rotary = PartialRotary(rotary, dims.head_dim, gives=facts.angles)
        if (types := getattr(found.rotary, "layer_types", None)) is not None:
            rotary.layer_types = types  # decoders ask their rotary module for which types it has angles
        parameter = next(found.decoder.parameters())
        if not parameter.is_meta:
            rotary.to(parameter.device)
        return rotary

    @property
    def carried(self) -> Carried:
        """The share of the scheme that each of the layers carries now."""
        return Carried(self.marker, self.on_attentions, self.on_layers)


def _is_by_layer_type(parameters: RopeParameters | None) -> bool:
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
        if site.base.family.rotation.config_thetas is not None and not site.base.rotated[index]:
            continue  # it gets no cosines, and stays unrotated
        state = {
            "rotation": rotation,
            "rotation_arguments": (types[index],) if takes_layer_type else (),
            "arguments": tuple(signature(layer.forward).parameters),
            "coordinates": site.base.family.rotation.parameter_coordinates is not None,
        }
        site.changes.add(Keep(layer, on_layer, state))


def place(plan: Plan) -> Changes:
    """Return what puts the schemes of a plan into its model. Changes nothing, and leaves new parameters uninitialised.

    Args:
        plan: the checked plan; its schemes are resolved.
    """
    changes = Changes(plan)
    names = [scheme.name for scheme in plan.schemes]
    sites = []
    for number, scheme in enumerate(plan.schemes):
        again = names[:number].count(scheme.name)
        marker = MARKER + scheme.name + (f"_{again + 1}" if again else "")
        sites.append(ModelSite(changes, scheme, marker))
    _silence_base(changes, sites)
    for layer in plan.replaced:
        _replace_attention(changes, plan.base.found.attention_of[layer])
    for site in sites:
        site.scheme.acts_on.put(site.scheme, site)
        if site.scheme.window is not None:
            for layer in site.layers:
                if (attention := plan.base.found.attention_of.get(layer)) is not None:
                    changes.add(Keep(attention, on_attention, {"window": site.scheme.window}))
    if (own := plan.own) is not None:
        sites.append(ModelSite(changes, own, KEPT))
        own.acts_on.put(own, sites[-1])
    if plan.attends:
        changes.add(AttendThroughUs(plan.base, plan.attention), AddPreHook(plan.base.found.decoder, require_attention))
    _mark_layers(changes, sites)
    _set_lengths(changes)
    return changes


def place_started(plan: Plan, seed: int | None) -> Changes:
    """Return what puts the schemes of a plan into a live model, its new parameters started and where their layer is.

    Args:
        plan: the checked plan; its schemes are resolved here, by the base's weights.
        seed: of parameters that start at random; None draws from torch's generators.
    """
    model, native = plan.base.model, plan.base.native()
    plan = replace(plan, schemes=tuple(scheme.resolve(native, plan.base.dims) for scheme in plan.schemes))
    device = next(model.parameters()).device
    # Whatever the caller's default device is; new rotations of a model on the meta device have values all the same.
    with torch.device("cpu" if device.type == "meta" else device), torch.no_grad():
        changes = place(plan)
        with seeded(seed):
            for owner, neighbour in changes.owners.items():
                beside = _floating_parameter(neighbour, model)  # FSDP wants one dtype per layer
                owner.to(device=beside.device, dtype=beside.dtype)
                if isinstance(owner, PositionEmbedding):
                    owner.initialize(native)
                else:
                    owner.reset_parameters()
                owner.train(model.training)
    return changes


def _floating_parameter(*modules: nn.Module) -> nn.Parameter:
    """Return the first floating-point parameter of the first module that has one."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter
    raise UnsupportedModelError(f"{type(modules[-1]).__name__} has no floating-point parameters")


def _silence_base(changes: Changes, sites: list[ModelSite]) -> None:
    """Switch off the base's own positions in the layers that have schemes, leaving nothing of them there."""
    base = changes.plan.base
    found, family = base.found, base.family
    for site in sites:
        site.scheme.acts_on.silence(site)
    if found.position_table is not None and not changes.plan.kept:
        assert family.names.position_table is not None
        silent = NoEmbedding(base.dims.hidden_size)
        silent.like = Reference(found.decoder, family.names.token_embedding)
        changes.add(SetModule(found.decoder, family.names.position_table, silent))
    attributes = dict(family.decoder_attributes)
    if (own := family.attention) is not None:
        attributes |= own.decoder_attributes
        if own.idle_rotary is not None:
            native = found.decoder.get_submodule(own.idle_rotary)
            changes.add(SetModule(found.decoder, own.idle_rotary, IdentityRotary(native)))
    changes.add(*(SetAttribute(found.decoder, name, value) for name, value in attributes.items()))


def _replace_attention(changes: Changes, attention: nn.Module) -> None:
    """Put our class in front of the class of an attention."""
    base = changes.plan.base
    own = base.family.own_attention()
    state = {"family": base.family.model_types[0], "window": own.window(attention)}
    changes.add(Keep(attention, on_attention, state), SetAttribute(attention, "scaling", own.scaling(attention)))
    if "config" not in attention.__dict__:
        changes.add(SetAttribute(attention, "config", base.config))
    changes.add(SetClass(attention, replaced_class(type(attention))))


def _mark_layers(changes: Changes, sites: list[ModelSite]) -> None:
    """Register the buffer that names the scheme on every layer, and have the decoder check them."""
    plan = changes.plan
    found, family = plan.base.found, plan.base.family
    carried = {layer: site.carried for site in sites for layer in site.layers}
    each = [carried.get(layer, Carried(KEPT)) for layer in range(len(found.layers))]
    each = [
        mine if layer in found.attention_of else replace(mine, on_attention=None) for layer, mine in enumerate(each)
    ]
    for layer, carries in zip(found.layers, each, strict=True):
        marker = torch.zeros(1, dtype=torch.uint8, device=next(layer.parameters()).device)
        changes.add(AddBuffer(layer, carries.marker, marker), AddPreHook(layer, enter_layer))
    alike = len(sites) == 1 and len(sites[0].layers) == len(each) == len(found.attention_of)
    if family.drops_position_ids or plan.needs_one_coordinate:
        one = plan.needs_one_coordinate
        changes.add(AddPreHook(found.decoder, require_one_coordinate if one else hand_down_position_ids))
    if any(site.adds_vectors for site in sites):
        changes.add(AddPreHook(found.decoder, require_counts))
    layers = PatchedLayers(
        family.names.layers,
        family.names.attention,
        tuple(each[:1] if alike else each),
        at_first=any(site.at_first for site in sites),
    )
    names = tuple(signature(type(found.decoder).forward).parameters)[1:]
    changes.add(
        Keep(found.decoder, on_decoder, {"layers": layers, "arguments": names}),
        AddPreHook(found.decoder, require_patched_layers),
    )


def _rotary_lengths(plan: Plan) -> list[int] | None:
    """Return the lengths at which new rotations change their frequencies; None if the base's own goes on turning."""
    if plan.rotated_by_base:
        return None
    rotating: list[Any] = [scheme for scheme, rotates in zip(plan.schemes, plan.rotating, strict=True) if rotates]
    rotations = [plan.base.rotation.parameters(scheme) or {} for scheme in rotating]
    return [parameters[ORIGINAL_LENGTH] for parameters in rotations if ORIGINAL_LENGTH in parameters]


def _set_lengths(changes: Changes) -> None:
    """Tell the config how long the model may run; `generate` reads it."""
    plan = changes.plan
    config, family = plan.base.config, plan.base.family
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if plan.limit is not None:
        changes.add(SetAttribute(config, name, plan.limit))
    elif hasattr(config, name) and not family.sized_by_length and not plan.kept and not any(plan.rotating):
        changes.add(SetAttribute(config, name, max(UNLIMITED, config.max_position_embeddings)))
    if ORIGINAL_LENGTH in config.__dict__ and (lengths := _rotary_lengths(plan)) is not None:
        # Phi-3's generate drops the cache when it crosses this length, to switch between its two sets of frequencies;
        # and transformers prefers it to what rope_parameters say.
        changes.add(SetAttribute(config, ORIGINAL_LENGTH, min(lengths, default=UNLIMITED)))
