"""The scheme of a run: read from its arguments, patched into a model, written into its results."""

import json
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import hf_posenc

from .. import arguments
from ..api import parse_schemes
from ..live.state import patch_of
from .options import Hyperparameter, Name, Options, UsageError, option

UNPATCHED = "unpatched"
"""In the place of a scheme's name: the base as it is, as a control."""
GUESSED = {"guesses": ("variants",)}
"""Metadata of the option `scheme`."""


@dataclass
class SchemeArguments(Options):
    """The scheme.

    Args:
        scheme: position encoding to patch in (`hf-posenc schemes` lists them); `extend` also takes unpatched: the base
            as it is, as a control.
        scheme_args: its hyper-parameters, e.g. max_distance=64 share_heads=false; see `hf-posenc schemes NAME`.
    """

    scheme: Name = field(default="alibi", metadata=GUESSED)
    scheme_args: list[Hyperparameter] = field(default_factory=list)


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """Return `name=value` words as a scheme's keyword arguments; raise UsageError if one is not of that form."""
    try:
        return arguments.hyperparameters(pairs)
    except ValueError as error:
        raise UsageError(str(error)) from None


def named(asked: str, name: str, given: dict[str, Any]) -> hf_posenc.Scheme:
    """Return a scheme by name and hyper-parameters; raise UsageError, naming the option, if there is no such scheme."""
    try:
        (scheme,) = parse_schemes(name, given)
        return scheme
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option(asked)} {name}: {error}") from None


def limit_of(model: nn.Module) -> int | None:
    """Return the number of positions of a patched model, also below an adapter of PEFT; None if there is no limit."""
    patch = patch_of(model)
    return None if patch is None else patch.limit


def patch(model: nn.Module, scheme: hf_posenc.Scheme, seed: int) -> str:
    """Patch a model in place and return the report of `verify`.

    Raises:
        RuntimeError: if a layer does not respond to its positions.
    """
    hf_posenc.patch_model(model, scheme, seed=seed)
    if not (report := hf_posenc.verify(model)):
        raise RuntimeError(f"the patch does not do what it should:\n{report}")
    return str(report)


def to_json(*schemes: hf_posenc.Scheme | None) -> dict[str, Any]:
    """Return schemes with all their hyper-parameters as JSON holds them; None, or no scheme at all, is the base."""
    entries = [{"name": scheme.name, **scheme.hyperparameters()} for scheme in schemes if scheme is not None]
    if not entries:
        return {"name": UNPATCHED}
    both = {"name": " + ".join(str(entry["name"]) for entry in entries), "schemes": entries}
    return dict(json.loads(json.dumps(entries[0] if len(entries) == 1 else both)))
