"""Descriptions of model types: positions, special features, schemes that cannot be used, reasons for refusal."""

from __future__ import annotations

from contextlib import suppress

from transformers import CONFIG_MAPPING

from ..checkpoints.auto_classes import multimodal_model_types
from ..core.errors import PluginError
from ..core.registry import available_schemes, family_for, refusals, scheme_class
from ..families.base import Family, base_model_type


def served_type(model_type: str) -> tuple[str, ...]:
    """Describe a model type that can be patched, without a model.

    Args:
        model_type: model type of transformers.

    Returns:
        How the stock model encodes positions, then a line for each thing that a user of schemes has to know beside it.

    Raises:
        UnsupportedModelError: if the model type cannot be patched; the message says why.
        PluginError: if the model type belongs to a plugin that is broken.
    """
    family = family_for(model_type)
    without = ", ".join(f"`{name}`" for name in _without(family))
    return (
        _positions(family),
        *_special(family),
        *([f"takes no {without}"] if without else []),
        *(f"refused with `config.{name}`: {reason}" for name, reason in family.refuse.items()),
    )


def _positions(family: Family) -> str:
    rotation = family.rotation
    if family.attention is not None and family.attention.positions is not None:
        return family.attention.positions
    if rotation.attention_bias is not None:
        return "a learned bias by distance on the scores, and queries scaled by position, in place of a rotation"
    if family.has_table or rotation.rotary is None:
        return "a learned table at the input" if family.has_table else "none"
    rotates_part = rotation.slices_rotary or rotation.attention_part is not None
    some_layers_only = rotation.attention_switch is not None or rotation.rotates is not None
    of = "a part of each head" if rotates_part else "whole heads"
    return f"rotation of {of}{', not in every layer' if some_layers_only else ''}"


def _special(family: Family) -> tuple[str, ...]:
    rotation = family.rotation
    features = {
        "it has layers without attention, which carry order under every scheme": family.hybrid,
        "documents packed into one row see each other": (family.hybrid or family.joins_documents)
        and not family.positions_in_mask,
        "latent attention": family.has_latent_attention,
        "attends in code of its own, which is replaced under every scheme": family.always_replaced,
        "its queries are scaled by position: `rope` keeps this, other schemes that replace its positions turn it off "
        "or are refused": rotation.attention_temperature or rotation.parameter_temperature,
        "its last layers use keys and values of earlier layers, and rotate queries as those do": (
            family.names.attention_borrows
        ),
        "the number of heads differs by layer": family.names.attention_heads,
        family.note: family.note,
    }
    return tuple(clause for clause, holds in features.items() if holds)


def _without(family: Family) -> tuple[str, ...]:
    """Return the schemes that a family cannot carry.

    They are the rotary schemes if it has no rotary module and its attention cannot be replaced. They are the schemes
    that use numbers of tokens if these would be lost.
    """
    cannot_rotate = family.rotation.rotary is None and family.attention is None
    found = []
    for name in available_schemes():
        with suppress(PluginError):  # of a broken plugin
            scheme = scheme_class(name)
            if (cannot_rotate and scheme.needs_queries) or (family.loses_numbers and scheme.uses_tokens):
                found.append(name)
    return tuple(found)


def refused_types() -> dict[str, list[str]]:
    """Return reason -> the model types that are refused for it."""
    types_by_reason: dict[str, list[str]] = {}
    for model_type, reason in refusals().items():
        types_by_reason.setdefault(reason, []).append(model_type)
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
