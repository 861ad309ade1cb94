"""The scheme of a run: from its arguments, into a model, and as its results say it."""

import json
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import hf_posenc

from .. import arguments
from ..api import parse_schemes
from ..live.state import patch_of
from .options import UsageError, option

UNPATCHED = "unpatched"
"""In the place of a scheme's name: the base as it is, as a control."""


@dataclass
class SchemeArguments:
    """The scheme."""

    scheme: str = field(
        default="alibi",
        metadata={
            "help": f"position encoding to patch in (`hf-posenc schemes` lists them); `extend` also takes "
            f"{UNPATCHED}: the base as it is, as a control",
            "metavar": "NAME",
            "guesses": ("variants",),
        },
    )
    scheme_args: list[str] = field(
        default_factory=list,
        metadata={
            "help": "its hyper-parameters, e.g. max_distance=64 share_heads=false; see `hf-posenc schemes NAME`",
            "metavar": "NAME=VALUE",
        },
    )


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """`name=value` words as a scheme's keyword arguments; UsageError where they are none."""
    try:
        return arguments.hyperparameters(pairs)
    except ValueError as error:
        raise UsageError(str(error)) from None


def named(asked: str, name: str, given: dict[str, Any]) -> hf_posenc.Scheme:
    """The scheme of this name with these hyper-parameters; UsageError, naming the option, if it cannot be."""
    try:
        (scheme,) = parse_schemes(name, given)
        return scheme
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option(asked)} {name}: {error}") from None


def limit_of(model: nn.Module) -> int | None:
    """Number of positions of a patched model, also below an adapter of PEFT; None if there is no end."""
    patch = patch_of(model)
    return None if patch is None else patch.limit


def patch(model: nn.Module, scheme: hf_posenc.Scheme, seed: int) -> str:
    """Patches in place; returns what `verify` says.

    Raises:
        RuntimeError: a layer does not answer to its positions.
    """
    hf_posenc.patch_model(model, scheme, seed=seed)
    if not (answers := hf_posenc.verify(model)):
        raise RuntimeError(f"the patch does not do what it should:\n{answers}")
    return str(answers)


def said(*given: hf_posenc.Scheme | None) -> dict[str, Any]:
    """Schemes with all their hyper-parameters, given or not, as JSON holds them; None, or none at all, is the base."""
    found = [{"name": scheme.name, **scheme.hyperparameters()} for scheme in given if scheme is not None]
    if len(found) > 1:
        return json.loads(json.dumps({"name": " + ".join(each["name"] for each in found), "schemes": found}))
    return json.loads(json.dumps(found[0])) if found else {"name": UNPATCHED}
