"""Turn a plan into the list of changes that put its schemes into a live model."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..core.dims import Dims
from ..core.layer_state import BASE_MARKER, MARKER, STATE, on_attention, on_decoder, on_layer
from ..core.modules import Additions, PositionEmbedding, PositionModule, Reference, WithoutPositions
from ..families.own_code import no_bias
from ..model.base_model import BaseModel, LayerConfig
from ..model.undo import AddPreHook, Change, Keep, SetAttribute, SetClass, SetModule, Undo
from ..schemes.base import RopeParameters, RotaryScheme, Scheme, by_layer_type
from ..transformers_glue import NAME
from ..transformers_glue.replaced_attention import replaced_class
from ..transformers_glue.rotary import ORIGINAL_LENGTH, IdentityRotary, PartialRotary, answer_like, turned_dimensions
from ..transformers_glue.token_numbers import cache_argument, wrap_cache
from .hooks import enter_decoder, enter_layer
from .plan import Plan

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


@dataclass(frozen=True)
class AttendThroughUs(Change):
    """Makes every layer use the attention function of this package, with or without a scheme on its scores.

    Attributes:
        base: the patched or stock model.
        engine: engine of the layers that have a scheme, a window or a replaced attention; None leaves all as they are.
        backend: the flash attention that computes the calls in place of an engine; empty for none.
    """

    base: BaseModel
    engine: str | None = None
    backend: str = ""

    def apply(self, undo: Undo) -> None:
        """Set the attention implementation in the configs, and give every attention a position module and its state."""
        base = self.base
        for layer, attention in base.modules.attention_of.items():
            modules, old = attention._modules, on_attention(attention)
            has_scheme = not isinstance(modules.get("posenc"), WithoutPositions | None) or "posenc_additions" in modules
            takes_engine = has_scheme or old.window is not None or base.family.always_replaced
            heads = old.heads if base.family.names.attention_heads is None else base.sizes[layer].num_heads
            if "posenc" not in modules:
                undo.apply(SetModule(attention, "posenc", WithoutPositions()))
            engine = self.engine if takes_engine and self.engine is not None else old.engine
            state = {"engine": engine, "backend": self.backend or old.backend, "heads": heads}
            undo.apply(Keep(attention, on_attention, state))
        for config in base.configs:
            undo.apply(SetAttribute(config, "_attn_implementation_internal", NAME))


@dataclass
class Changes:
    """The changes that a plan needs. `Undo.apply` makes them later.

    Attributes:
        plan: the plan of the whole model, with resolved schemes.
        pending: the changes, in the order in which they have to be made.
        additions: layer index -> the new modules on the queries of its attention.
        unrotated: the module that rotates by zero, for layers with schemes where other layers keep the base's rotation.
    """

    plan: Plan
    pending: list[Change] = field(default_factory=list)
    additions: dict[int, Additions] = field(default_factory=dict)
    unrotated: Reference | None = None

    def add(self, *changes: Change) -> None:
        """Append changes to the list."""
        self.pending += changes

    def position_modules(self) -> dict[PositionModule, nn.Module]:
        """Return new module with position parameters -> the module of the model that it goes into."""
        return {
            inner: change.owner
            for change in self.pending
            if isinstance(change, SetModule)
            for inner in change.module.modules()
            if isinstance(inner, PositionModule)
        }

    def replace_table(self, module: PositionEmbedding) -> None:
        """Replace the base's table of positions."""
        decoder, names = self.plan.base.modules.decoder, self.plan.base.family.names
        module.like = Reference(decoder, names.token_embedding)
        self.add(SetModule(decoder, str(names.position_table), module))

    def add_to_decoder(self, name: str, module: nn.Module) -> Reference:
        """Add a module to the decoder, as `name`, or as `name_2`, `name_3`, ... if that name is taken."""
        decoder, free_name, number = self.plan.base.modules.decoder, name, 2
        added = [each.name for each in self.pending if isinstance(each, SetModule) and each.owner is decoder]
        while free_name in decoder._modules or free_name in added:
            free_name, number = f"{name}_{number}", number + 1
        self.add(SetModule(decoder, free_name, module))
        return Reference(decoder, free_name)


class ModelSite:
    """A model to change, and the layers that one scheme is for."""

    def __init__(self, changes: Changes, scheme: Scheme, layers: tuple[int, ...], marker: str) -> None:
        """Start without changes.

        Args:
            changes: the changes of the whole model. Methods append the scheme's changes.
            scheme: one of the plan's schemes.
            layers: indices of its layers.
            marker: name of the buffer that marks the scheme's layers.
        """
        self.changes = changes
        self.plan = changes.plan
        self.base = changes.plan.base
        self.scheme, self.layers, self.marker = scheme, layers, marker
        self.attention_attribute = ""  # that each attention has from now on
        self.adds_vectors: tuple[int, ...] = ()  # layers before which vectors are added
        self.adds_to_input = False

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of one layer's attention."""
        return self.base.sizes.get(layer, self.base.dims)

    def silence_rotation(self) -> None:
        """Switch off the base's rotation or bias in the layers, and its query factors that grow with the position."""
        found, facts, changes = self.base.modules, self.base.family.rotation, self.changes
        for layer in self.layers:
            if (module := found.attention_of.get(layer)) is None:
                continue
            for name, value in facts.attention_temperature.items():
                changes.add(SetAttribute(module, name, value))
            if facts.attention_bias is not None:
                changes.add(SetAttribute(module.get_submodule(facts.attention_bias), "forward", no_bias))
            if facts.config_temperature:
                own = LayerConfig(module.config, facts.config_temperature)
                changes.add(SetAttribute(module, "config", own))
        for strength in facts.parameter_temperature[:1]:  # the factor's key of `rope_parameters`
            if self.plan.rotated_by_base or self.plan.rotating:  # other layers keep it
                for layer in self.layers:
                    attention: Any = found.attention_of[layer]
                    changes.add(SetAttribute(attention, "config", LayerConfig(attention.config, **{strength: 0.0})))
            else:
                self._write_parameters({**self.base.config.rope_parameters, strength: 0.0})
        if found.rotary is None:
            return
        identity = IdentityRotary(found.rotary, facts.angles)
        if self.plan.rotated_by_base:
            changes.unrotated = changes.unrotated or changes.add_to_decoder("posenc_still", identity)
            self._give_rotation(changes.unrotated, takes_layer_type=len(identity.pairs) > 1)
        else:
            self._replace_rotary(identity)

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Put a module on the attention of a layer. The attention then computes its scores with it."""
        self.changes.add(SetModule(self.base.modules.attention_of[layer], "posenc", module))
        self.attention_attribute = "posenc"

    def on_queries(self, layer: int, name: str, module: nn.Module) -> None:
        """Put a module on the queries of a layer's attention, beside what else the layer has."""
        if layer not in self.changes.additions:
            attention, additions = self.base.modules.attention_of[layer], Additions()
            self.changes.additions[layer] = additions
            self.changes.add(SetModule(attention, "posenc_additions", additions))
        self.changes.additions[layer].add_module(name, module)
        self.attention_attribute = "posenc_additions"

    def before_layer(self, layer: int, module: nn.Module) -> None:
        """Add a module's vectors to the hidden states that enter a layer."""
        decoder_layer, family = self.base.modules.layers[layer], self.base.family
        self.adds_vectors += (layer,)
        self.changes.add(SetModule(decoder_layer, "posenc", module))
        if family.positions_in_mask:
            self.changes.add(Keep(decoder_layer, on_layer, {"family": family.model_types[0]}))

    def at_input(self, module: PositionEmbedding) -> None:
        """Add a module's vectors to the hidden states that enter the first layer."""
        self.adds_to_input = True
        if self.base.modules.position_table is None:
            self.before_layer(0, module)
        else:
            self.changes.replace_table(module)

    def turn(self, scheme: RotaryScheme) -> None:
        """Rotate the queries and keys of the layers with the scheme."""
        base, found, facts = self.base, self.base.modules, self.base.family.rotation
        attentions = [found.attention_of[layer] for layer in self.layers]
        if scheme.layers is not None and facts.attention_switch is not None:
            # The caller named the layers, so they rotate even if the base leaves them out.
            self.changes.add(*(SetAttribute(attention, facts.attention_switch, 1) for attention in attentions))
        if base.rotation.is_own(scheme):
            rotary: Any = found.rotary
        else:
            parameters = base.rotation.parameters(scheme)
            rotary = self._rotary(scheme, parameters)
            if found.rotary is None:
                rotation = self.changes.add_to_decoder("rotary_emb", rotary)
                state = {"rotation": rotation, "pairs": scheme.pairs or facts.pairs}
                self.changes.add(*(Keep(attention, on_attention, state) for attention in attentions))
                self.attention_attribute = STATE
            elif len(self.layers) == len(base.sizes):
                self._replace_rotary(rotary)
                if parameters is not None:
                    self._write_parameters(parameters)
            else:
                by_type = None not in by_layer_type(parameters or {})
                self._give_rotation(self.changes.add_to_decoder("posenc_rotary", rotary), takes_layer_type=by_type)
            if facts.parameter_rescales and parameters is not None:
                for layer, attention in zip(self.layers, attentions, strict=True):
                    scaling = base.rotation.scaling_with(layer, parameters)
                    self.changes.add(SetAttribute(attention, "scaling", scaling))
        if facts.attention_size is not None and rotary is not None:  # this many dimensions the attentions rotate
            size = turned_dimensions(rotary)
            self.changes.add(*(SetAttribute(attention, facts.attention_size, size) for attention in attentions))

    def _replace_rotary(self, rotary: nn.Module) -> None:
        """Replace the base's rotary module."""
        decoder, facts = self.base.modules.decoder, self.base.family.rotation
        self.changes.add(SetModule(decoder, str(facts.rotary), rotary))
        if facts.config_thetas is not None:  # the decoder makes cosines and sines without the module
            self._give_rotation(Reference(decoder, str(facts.rotary)), takes_layer_type=False)

    def _give_rotation(self, rotation: Reference, *, takes_layer_type: bool) -> None:
        """Let the layers take their cosines and sines from another module than the base's rotary module.

        Args:
            rotation: the module that computes the cosines and sines.
            takes_layer_type: whether the module is called with the layer's type, as Gemma 3's is.
        """
        types: Any = getattr(self.base.config, "layer_types", None)
        for index in self.layers:
            layer = self.base.modules.layers[index]
            if self.base.family.rotation.config_thetas is not None and not self.base.rotated[index]:
                continue  # the base passes it no cosines, and it stays unrotated
            state = {
                "rotation": rotation,
                "rotation_arguments": (types[index],) if takes_layer_type else (),
                "coordinates": self.base.rotation.coordinates,
            }
            self.changes.add(Keep(layer, on_layer, state))

    def _write_parameters(self, parameters: RopeParameters) -> None:
        """Write `rope_parameters` of all layers into the configs, with the base's factor on queries."""
        stock: Any = self.base.config.rope_parameters
        keys = set(self.base.family.rotation.parameter_temperature) & stock.keys() - parameters.keys()
        written = parameters | {key: stock[key] for key in sorted(keys)}
        self.changes.add(*(SetAttribute(config, "rope_parameters", dict(written)) for config in self.base.configs))

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
        if not (parameter := next(found.decoder.parameters())).is_meta:
            rotary.to(parameter.device)
        return rotary

    def parts_of(self, layer: int) -> tuple[str, ...]:
        """Return the paths of what a layer of the site must have from now on."""
        parts = [self.marker]
        if self.attention_attribute and layer in self.base.sizes:
            parts.append(f"{self.base.family.names.attention}.{self.attention_attribute}")
        return (*parts, "posenc") if layer in self.adds_vectors else tuple(parts)


def place(plan: Plan) -> Changes:
    """Return the changes that put the schemes of a plan into its model. Their parameters are not initialised yet.

    Args:
        plan: a checked plan with resolved schemes.
    """
    changes, base, found, family = Changes(plan), plan.base, plan.base.modules, plan.base.family
    sites: list[ModelSite] = []
    for scheme, layers in zip(plan.schemes, plan.layers, strict=True):
        namesakes = sum(site.scheme.name == scheme.name for site in sites)
        marker = MARKER + scheme.name + (f"_{namesakes + 1}" if namesakes else "")
        sites.append(ModelSite(changes, scheme, layers, marker))
    for site in sites:
        site.scheme.silence(site)
    if found.position_table is not None and not plan.base_layers:
        changes.replace_table(NoEmbedding(base.dims.hidden_size))
    attributes = dict(family.decoder_attributes)
    if (pieces := family.attention) is not None:
        attributes |= pieces.decoder_attributes
        if pieces.idle_rotary is not None:
            rotary = found.decoder.get_submodule(pieces.idle_rotary)
            changes.add(SetModule(found.decoder, pieces.idle_rotary, IdentityRotary(rotary)))
    changes.add(*(SetAttribute(found.decoder, name, value) for name, value in attributes.items()))
    for layer in plan.replaced_attentions:
        attention, own_pieces = found.attention_of[layer], family.own_attention()
        state = {"family": family.model_types[0], "window": own_pieces.window(attention)}
        changes.add(Keep(attention, on_attention, state))
        changes.add(SetAttribute(attention, "scaling", own_pieces.scaling(attention)))
        if "config" not in attention.__dict__:
            changes.add(SetAttribute(attention, "config", base.config))
        changes.add(SetClass(attention, replaced_class(type(attention))))
    for site in sorted(sites, key=attrgetter("scheme.put_order")):
        site.scheme.put(site)
        if site.scheme.window is not None:
            state = {"window": site.scheme.window, "kept_first": site.scheme.sinks or 0}
            for layer in site.layers:
                if layer in base.sizes:
                    changes.add(Keep(found.attention_of[layer], on_attention, state))
    if family.always_replaced and plan.base_layers and (own := base.own_scheme(plan.base_layers)) is not None:
        sites.append(ModelSite(changes, own, plan.base_layers, BASE_MARKER))
        own.put(sites[-1])
    if plan.attends:
        changes.add(AttendThroughUs(base, plan.attention, plan.backend))
    _guard(changes, sites)
    _set_lengths(changes)
    return changes


def place_started(plan: Plan, seed: int | None) -> Changes:
    """Return the changes of a plan with initialised parameters.

    Args:
        plan: a checked plan with resolved schemes.
        seed: seed of parameters that start at random; None draws from torch's generators.
    """
    model = plan.base.model
    device = next(model.parameters()).device
    # Not the caller's default device. Rotations have values even if the model is on the meta device.
    with torch.device("cpu" if device.type == "meta" else device), torch.no_grad():
        changes = place(plan)
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            for module, owner in changes.position_modules().items():
                neighbour = next(p for part in (owner, model) for p in part.parameters() if p.is_floating_point())
                module.to(device=neighbour.device, dtype=neighbour.dtype)  # FSDP wants one dtype per layer
                if isinstance(module, PositionEmbedding):
                    module.initialize(plan.base.native)
                else:
                    module.reset_parameters()
                module.train(model.training)
    return changes


def _guard(changes: Changes, sites: list[ModelSite]) -> None:
    """Mark every layer with the names of its schemes, and hook layers and decoder."""
    plan, base = changes.plan, changes.plan.base
    found, family = base.modules, base.family
    holds_numbers = any(site.scheme.uses_tokens for site in sites)
    makes_numbers = holds_numbers or any(site.scheme.uses_queries for site in sites)
    for attention in found.attentions if makes_numbers else ():
        # An attention without a cache argument makes no numbers.
        cache = cache_argument(attention) or on_attention(attention).cache
        changes.add(Keep(attention, on_attention, {"cache": cache}), AddPreHook(attention, wrap_cache))
    replaced = {layer for site in sites if not site.scheme.joins for layer in site.layers}
    parts: list[tuple[str, ...]] = []
    for index, layer in enumerate(found.layers):
        of_base = [] if index in replaced else [BASE_MARKER]
        of_sites = [part for site in sites if index in site.layers for part in site.parts_of(index)]
        parts.append((*of_base, *of_sites))
        device = next(layer.parameters()).device
        for name in parts[-1]:
            if name.startswith(MARKER):
                marker = torch.zeros(1, dtype=torch.uint8, device=device)
                changes.add(SetAttribute(layer, name, marker, "_buffers"))
        arguments = tuple(signature(type(layer).forward).parameters)[1:]
        changes.add(Keep(layer, on_layer, {"parts": parts[-1], "arguments": arguments}), AddPreHook(layer, enter_layer))
    at_first = any(site.adds_to_input for site in sites) and not base.has_table
    alike = len(set(parts[1:] if at_first else parts)) < 2 and len(parts) == len(found.attention_of)
    one_coordinate = family.rotation.parameter_coordinates is not None and any(
        scheme.layers is not None or scheme.needs_one_coordinate(base) for scheme in plan.schemes
    )
    state = {
        "layers": family.names.layers,
        "parts": tuple(parts),
        "count": None if alike else len(parts),
        "at_first": at_first,
        "arguments": tuple(signature(type(found.decoder).forward).parameters)[1:],
        "attends": plan.attends,
        "adds_vectors": any(site.adds_vectors or site.adds_to_input for site in sites),
        "holds_numbers": holds_numbers,
        "hands_down": family.drops_position_ids,
        "rows": base.rotation.coordinates + (not family.drops_position_ids) if one_coordinate else 0,
    }
    changes.add(Keep(found.decoder, on_decoder, state), AddPreHook(found.decoder, enter_decoder))


def _set_lengths(changes: Changes) -> None:
    """Set the lengths in the config that `generate` reads."""
    plan = changes.plan
    config, rotation = plan.base.config, plan.base.rotation
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if plan.limit is not None:
        changes.add(SetAttribute(config, name, plan.limit))
    elif any(scheme.keeps_frequencies for scheme in plan.schemes):
        return  # transformers computes the frequencies of some scalings from the lengths below
    elif not (plan.base.family.sized_by_length or plan.base_layers or plan.rotating) and hasattr(config, name):
        changes.add(SetAttribute(config, name, max(UNLIMITED, config.max_position_embeddings)))
    if ORIGINAL_LENGTH in config.__dict__ and not plan.rotated_by_base:
        # Phi-3's generate drops the cache at this length, to switch between its two sets of frequencies. transformers
        # prefers this attribute to the length in rope_parameters.
        rotations = [rotation.parameters(scheme) or {} for scheme in plan.rotating]
        lengths = [parameters[ORIGINAL_LENGTH] for parameters in rotations if ORIGINAL_LENGTH in parameters]
        changes.add(SetAttribute(config, ORIGINAL_LENGTH, min(lengths, default=UNLIMITED)))
