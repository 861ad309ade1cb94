"""Model types in words: their positions, what is special, which schemes they carry, why some are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import CONFIG_MAPPING

from .checkpoints.auto_classes import multimodal_model_types
from .errors import PluginError
from .families.base import Family, base_model_type
from .registry import available_schemes, family_for, refusals, scheme_class


@dataclass(frozen=True)
class ServedType:
    """A model type that can be patched, described without a model.

    Attributes:
        positions: what the stock model has for positions.
        special: what else of it a user of schemes has to know; empty where it is a plain decoder.
        without: names of the schemes that it cannot carry, of those that are registered; the others it can.
        refused: settings of its config that are refused, each with the reason.
    """

    positions: str
    special: tuple[str, ...]
    without: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        """Return one line for positions, and one for each of the others where there is something to say."""
        lines = [self.positions]
        if self.special:
            lines.append("; ".join(self.special))
        if self.without:
            lines.append(f"cannot carry {', '.join(self.without)}")
        lines += [f"refused where its config sets {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def served_type(model_type: str) -> ServedType:
    """Describe a model type that is served.

    Args:
        model_type: of transformers.

    Raises:
        UnsupportedModelError: if it is not served; the message says why.
        PluginError: if it is that of a package which is broken.
    """
    family = family_for(model_type)
    return ServedType(_positions(family), _special(family), _without(family), dict(family.refuse))


def _positions(family: Family) -> str:
    if family.own_positions is not None:
        return family.own_positions
    if family.has_table:
        return "a learned table at the input"
    rotation = family.rotation
    if rotation.rotary is None:
        return "none"
    part = rotation.slices_rotary or rotation.attention_part is not None
    some = rotation.attention_switch is not None or rotation.rotates is not None
    return f"rotation of {'a part of each head' if part else 'whole heads'}" + (", not in every layer" if some else "")


def _special(family: Family) -> tuple[str, ...]:
    rotation = family.rotation
    grows = bool(rotation.attention_temperature or rotation.parameter_temperature)
    borrows = family.names.attention_borrows is not None
    said = {
        "layers without attention, through which order flows under every scheme": family.hybrid,
        "latent attention": rotation.attention_part is not None,
        "attends in code of its own, which is replaced under every scheme": family.always_replaced,
        "queries that grow with their position, until a scheme takes the place of its rotation": grows,
        "its last layers borrow keys and values, and turn their queries as the layers that lend": borrows,
        "the number of heads differs by layer": family.names.attention_heads is not None,
    }
    return tuple(clause for clause, holds in said.items() if holds) + ((family.note,) if family.note else ())


def _without(family: Family) -> tuple[str, ...]:
    """Return the schemes that rotate, where a family has no rotary module and its attention cannot be replaced."""
    if family.rotation.rotary is not None or family.attention is not None:
        return ()
    return tuple(name for name in available_schemes() if _rotates(name))


def _rotates(scheme: str) -> bool:
    """Return whether a scheme turns queries and keys; False if the package that brings it is broken."""
    try:
        return scheme_class(scheme)().acts_on.needs_queries()
    except PluginError:
        return False


def refused_types() -> dict[str, list[str]]:
    """Return why model types are not served: reason -> model types."""
    found: dict[str, list[str]] = {}
    for model_type, refusal in refusals().items():
        found.setdefault(refusal.reason, []).append(model_type)
    return found


def language_type(model_type: str) -> str:
    """Return the type of the language model inside models of a multimodal type; any other type as it is.

    It is the one of the type's default config. Checkpoints of some types bring others.
    """
    if model_type not in multimodal_model_types():
        return model_type
    try:
        return base_model_type(CONFIG_MAPPING[model_type]())
    except ValueError:  # its config has no default, because any two models can be put together
        return model_type
