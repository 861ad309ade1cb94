"""Descriptions of model types: positions, special features, schemes that cannot be used, reasons for refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import CONFIG_MAPPING

from .checkpoints.auto_classes import multimodal_model_types
from .errors import PluginError
from .families.base import Family, base_model_type
from .placement import Placement
from .registry import available_schemes, family_for, refusals, scheme_class


@dataclass(frozen=True)
class ServedType:
    """A model type that can be patched, described without a model.

    Attributes:
        positions: how the stock model encodes positions.
        special: other features that a user of schemes has to know; empty for a plain decoder.
        without: names of registered schemes that the model type cannot carry.
        refused: setting of the config -> why models with this setting are refused.
    """

    positions: str
    special: tuple[str, ...]
    without: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        """Return the attributes that are not empty, one line for each."""
        lines = [self.positions]
        if self.special:
            lines.append("; ".join(self.special))
        if self.without:
            lines.append(f"cannot carry {', '.join(self.without)}")
        lines += [f"refused where its config sets {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def served_type(model_type: str) -> ServedType:
    """Describe a model type that can be patched.

    Args:
        model_type: model type of transformers.

    Raises:
        UnsupportedModelError: if the model type cannot be patched; the message says why.
        PluginError: if the model type belongs to a plugin that is broken.
    """
    family = family_for(model_type)
    return ServedType(_positions(family), _special(family), _without(family), dict(family.refuse))


def _positions(family: Family) -> str:
    if family.attention is not None and family.attention.positions is not None:
        return family.attention.positions
    if family.has_table:
        return "a learned table at the input"
    rotation = family.rotation
    if rotation.rotary is None:
        return "none"
    rotates_part = rotation.slices_rotary or rotation.attention_part is not None
    some_layers_only = rotation.attention_switch is not None or rotation.rotates is not None
    return f"rotation of {'a part of each head' if rotates_part else 'whole heads'}" + (
        ", not in every layer" if some_layers_only else ""
    )


def _special(family: Family) -> tuple[str, ...]:
    rotation = family.rotation
    queries_grow = bool(rotation.attention_temperature or rotation.parameter_temperature)
    borrows_keys = family.names.attention_borrows is not None
    joins_documents = family.hybrid or family.joins_documents
    features = {
        "it has layers without attention, which carry order under every scheme": family.hybrid,
        "documents packed into one row see each other": joins_documents and not family.positions_in_mask,
        "latent attention": family.has_latent_attention,
        "attends in code of its own, which is replaced under every scheme": family.always_replaced,
        "its queries are scaled by position: `rope` keeps this, other schemes that replace its positions turn it off "
        "or are refused": queries_grow,
        "its last layers use keys and values of earlier layers, and rotate queries as those do": borrows_keys,
        "the number of heads differs by layer": family.names.attention_heads is not None,
    }
    return tuple(clause for clause, holds in features.items() if holds) + ((family.note,) if family.note else ())


def _without(family: Family) -> tuple[str, ...]:
    """Return the schemes that a family cannot carry.

    They are the rotary schemes if it has no rotary module and its attention cannot be replaced. They are the schemes
    that use numbers of tokens if these would be lost.
    """
    cannot_rotate = family.rotation.rotary is None and family.attention is None
    places = {name: _placement(name) for name in available_schemes()}
    return tuple(
        name
        for name, place in places.items()
        if place is not None
        and ((cannot_rotate and place.needs_queries()) or (family.loses_numbers is not None and place.uses_tokens()))
    )


def _placement(scheme: str) -> Placement | None:
    """Return where a scheme acts by default; None if it is from a broken plugin."""
    try:
        return scheme_class(scheme)().acts_on
    except PluginError:
        return None


def refused_types() -> dict[str, list[str]]:
    """Return reason -> the model types that are refused for it."""
    types_by_reason: dict[str, list[str]] = {}
    for model_type, refusal in refusals().items():
        types_by_reason.setdefault(refusal.reason, []).append(model_type)
    return types_by_reason


def language_type(model_type: str) -> str:
    """Return the type of the language model inside a multimodal model type; return any other type unchanged.

    It is read from the default config. Checkpoints of some multimodal types contain other language models.
    """
    if model_type not in multimodal_model_types():
        return model_type
    try:
        return base_model_type(CONFIG_MAPPING[model_type]())
    except ValueError:  # there is no default config, because any two models can be combined
        return model_type
