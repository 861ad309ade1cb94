"""The two registries: scheme names to scheme classes, model types to families.

Both refuse duplicates, since the later of two registrations would otherwise change models that name the earlier one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .errors import UnknownSchemeError, UnsupportedModelError

if TYPE_CHECKING:
    from .families.base import Family
    from .schemes.base import Scheme

    SchemeClass = TypeVar("SchemeClass", bound=type[Scheme])

_SCHEMES: dict[str, type[Scheme]] = {}
_FAMILIES: dict[str, Family] = {}


def register_scheme(cls: SchemeClass) -> SchemeClass:
    """Class decorator: makes a scheme available under its class attribute `name`.

    Args:
        cls: the scheme class.

    Returns:
        `cls`, unchanged.

    Raises:
        ValueError: another class is registered under this name. Registering the same class again is allowed.
    """
    other = _SCHEMES.setdefault(cls.name, cls)
    if other is not cls:
        raise ValueError(
            f"scheme name {cls.name!r} of {_location(cls)} is taken by {_location(other)}; rename one of them"
        )
    return cls


def scheme_class(name: str) -> type[Scheme]:
    """The scheme class registered under `name`.

    Raises:
        UnknownSchemeError: no scheme has this name; the message lists those that exist.
    """
    try:
        return _SCHEMES[name]
    except KeyError:
        raise UnknownSchemeError(f"unknown scheme {name!r}; choose from {', '.join(available_schemes())}") from None


def check_registered(cls: type[Scheme]) -> None:
    """Check that a class is the one which its name stands for: a checkpoint holds the name, and is loaded by it.

    Raises:
        UnknownSchemeError: if it is not; the message says how to register it.
    """
    name = getattr(cls, "name", None)
    known = _SCHEMES.get(name) if isinstance(name, str) else None
    if known is not cls:
        taken = "" if known is None else f"; its name {name!r} is that of {_location(known)}, so it needs another"
        raise UnknownSchemeError(
            f"{_location(cls)} is not registered, so a model that is patched with it could not be loaded again: put "
            f"@hf_posenc.registry.register_scheme on the class{taken}. Registered are {', '.join(available_schemes())}"
        )


def available_schemes() -> tuple[str, ...]:
    """The names of all registered schemes, sorted."""
    return tuple(sorted(_SCHEMES))


def register_family(family: Family) -> Family:
    """Makes a family available for each of its model types.

    Args:
        family: the family.

    Returns:
        `family`, unchanged.

    Raises:
        ValueError: it names no model type, or a model type is served by another family already (nothing is registered
            then). Registering an equal family again is allowed.
    """
    if not family.model_types:
        raise ValueError(f"the family names no model type, so no model could ever use it: {family}")
    for model_type in family.model_types:
        other = _FAMILIES.get(model_type, family)
        if other != family:
            raise ValueError(
                f"model type {model_type!r} is already served by the family for {', '.join(other.model_types)}; "
                "a model type has exactly one family"
            )
    _FAMILIES.update(dict.fromkeys(family.model_types, family))
    return family


def family_for(model_type: str) -> Family:
    """The family that serves models whose `config.model_type` is `model_type`.

    Raises:
        UnsupportedModelError: no family serves it; the message lists the model types that are served.
    """
    try:
        return _FAMILIES[model_type]
    except KeyError:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; choose from {', '.join(supported_model_types())}"
        ) from None


def supported_model_types() -> tuple[str, ...]:
    """All model types that have a family, sorted."""
    return tuple(sorted(_FAMILIES))


def _location(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
