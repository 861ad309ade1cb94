"""The two registries: scheme name -> scheme class, and model type -> family.

Both refuse duplicates. Otherwise a second registration would change models that name the first one.

Other packages offer schemes and families as entry points, in the groups `hf_posenc.schemes` and `hf_posenc.families`.
The name of an entry point is the scheme's name, or one model type of the family. So hf_posenc can list names without
importing other packages. It imports the code behind a name when the name is first used, so a broken package breaks only
its own names. The first call that reads a registry registers this package's own schemes and families and reads the
entry points. So importing hf_posenc costs next to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from .did_you_mean import did_you_mean
from .errors import PluginError, UnknownSchemeError, UnsupportedModelError

if TYPE_CHECKING:
    from ..families.base import Family
    from ..schemes.base import Scheme

    SchemeClass = TypeVar("SchemeClass", bound=type[Scheme])

SCHEMES, FAMILIES = "hf_posenc.schemes", "hf_posenc.families"
"""Groups of entry points. Each has the name of the package with our own schemes or families."""

_SCHEMES: dict[str, type[Scheme]] = {}
_FAMILIES: dict[str, Family] = {}
_REFUSED: dict[str, str] = {}
_ENTRY_POINTS: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
"""Group -> name -> its entry points. Several entry points mean that packages offer the same name. The dict has a group
once the group's registry is filled."""


def _read_entry_points(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of installed packages, by name. The first call also registers our own.

    It ignores an entry point that has the name of one of ours, and warns of it (UserWarning).
    """
    if group in _ENTRY_POINTS:
        return _ENTRY_POINTS[group]
    _ENTRY_POINTS[group] = {}  # importing our own schemes or families calls this function again
    import_module(group)
    own_names, what = (_SCHEMES, "scheme") if group == SCHEMES else (_FAMILIES, "model type")
    entries_by_name: dict[str, list[EntryPoint]] = {}
    for entry in entry_points().select(group=group):
        if entry.name in own_names:
            warnings.warn(f"{_describe(entry)} is ignored: hf_posenc has a {what} {entry.name!r} itself", stacklevel=3)
        else:
            entries_by_name.setdefault(entry.name, []).append(entry)
    _ENTRY_POINTS[group] = {name: tuple(entries) for name, entries in entries_by_name.items()}
    return _ENTRY_POINTS[group]


def register_scheme(cls: SchemeClass) -> SchemeClass:
    """Make a scheme available under its class attribute `name`; a class decorator.

    Args:
        cls: the scheme class, a frozen dataclass whose fields are keyword-only and have defaults.

    Returns:
        `cls`, unchanged.

    Raises:
        TypeError: if `cls` is not such a class.
        ValueError: if its name is not an identifier (a buffer in checkpoints is named after it) or reserved, or
            if another class has this name. You may register a class again, even after a new definition (a notebook
            cell that ran twice): it replaces the old class. A class that a function defines replaces none.
    """
    name: Any = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{_location(cls)} needs a class attribute `name: ClassVar[str]`, its name in checkpoints")
    if not name.isidentifier() or name == "base":  # checkpoints mark layers that keep the base's positions by it
        raise ValueError(
            f"scheme name {name!r} of {_location(cls)} must be an identifier and not base: a buffer of each layer is "
            "named after it"
        )
    frozen = getattr(cls.__dict__.get("__dataclass_params__"), "frozen", False)
    if not frozen or any(field.default is field.default_factory is MISSING for field in fields(cls)):
        raise TypeError(
            f"{_location(cls)} must be a frozen dataclass whose fields have defaults, since they are what a checkpoint "
            "holds: put @register_scheme above @dataclass(frozen=True, kw_only=True)"
        )
    _read_entry_points(SCHEMES)
    other = _SCHEMES.get(name, cls)
    if other is not cls and (_location(other) != _location(cls) or "<locals>" in cls.__qualname__):
        raise ValueError(f"scheme name {name!r} of {_location(cls)} is taken by {_location(other)}; rename one of them")
    _SCHEMES[name] = cls
    return cls


def scheme_class(name: str) -> type[Scheme]:
    """Return the scheme class of a name; import the package that offers it, if one does.

    Raises:
        UnknownSchemeError: if no scheme has this name; the message lists the names.
        PluginError: if the package that offers the scheme cannot be imported or lacks it, or several packages offer it.
    """
    if (entry := _entry_of(SCHEMES, name, _SCHEMES)) is not None:
        _load(entry, _SCHEMES, register_scheme, f"a scheme class named {name!r}, or to a module that registers it")
        try:
            _SCHEMES[name]()
        except Exception as error:  # commands make schemes without arguments
            del _SCHEMES[name]
            reason = f"{type(error).__name__}: {error}"
            raise PluginError(f"{_describe(entry)} cannot be made without arguments: {reason}") from error
    if name in _SCHEMES:
        return _SCHEMES[name]
    names = available_schemes()
    synonyms = {synonym: answer for cls in _SCHEMES.values() for synonym, answer in cls.known_as.items()}
    raise UnknownSchemeError(
        f"unknown scheme {name!r}; choose from {', '.join(names)}, or install or import the package that has it"
        f"{did_you_mean(name, synonyms | {each: each for each in names})}"
    )


def check_registered(cls: type[Scheme]) -> None:
    """Check that a class is registered under its own name, because a checkpoint is loaded by this name.

    Raises:
        UnknownSchemeError: if it is not registered; the message says how to register it.
    """
    if _SCHEMES.get(getattr(cls, "name", "")) is not cls:
        raise UnknownSchemeError(
            f"{_location(cls)} is not registered, so a model that is patched with it could not be loaded again: put "
            f"@hf_posenc.register_scheme on the class. Registered are {', '.join(available_schemes())}"
        )


def available_schemes() -> tuple[str, ...]:
    """Return the sorted names of all schemes, registered or offered by an installed package."""
    return tuple(sorted({*_read_entry_points(SCHEMES), *_SCHEMES}))


def register_family(family: Family) -> Family:
    """Make a family available for each of its model types.

    Args:
        family: the family.

    Returns:
        `family`, unchanged.

    Raises:
        ValueError: if the family names no model type, or another family serves one of its model types. Then no model
            type is registered. You may register an equal family again.
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


def register_refusals(reasons: Mapping[str, str]) -> None:
    """Record model type -> why it is not served, as a clause. You may still register a family for one of them."""
    _REFUSED.update(reasons)


def reason_against(model_type: str) -> str | None:
    """Return why a model type is not served, as a clause; None if it is served or has no refusal."""
    return None if model_type in supported_model_types() else _REFUSED.get(model_type)


def refusals() -> dict[str, str]:
    """Return model type -> reason, sorted, for the model types with a reason and without a family."""
    return {model_type: _REFUSED[model_type] for model_type in sorted({*_REFUSED} - {*supported_model_types()})}


def family_for(model_type: str) -> Family:
    """Return the family that serves models whose `config.model_type` is `model_type`.

    Raises:
        UnsupportedModelError: if no family serves it; the message says why, or how to list the model types.
        PluginError: if the package that offers the family cannot be imported or lacks it, or several packages offer it.
    """
    if (entry := _entry_of(FAMILIES, model_type, _FAMILIES)) is not None:
        _load(entry, _FAMILIES, register_family, f"a Family with {model_type!r} among its model_types")
        types = _FAMILIES[model_type].model_types
        if unnamed := set(types) - set(_read_entry_points(FAMILIES)):  # transformers would not find their classes
            for each in types:
                del _FAMILIES[each]
            raise PluginError(f"{_describe(entry)} serves {', '.join(sorted(unnamed))} too: give each an entry point")
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    if (reason := reason_against(model_type)) is not None:
        raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}")
    raise UnsupportedModelError(
        f"model type {model_type!r} is not supported (`hf-posenc families` lists the supported ones; install or import "
        f"the package that adds another){did_you_mean(model_type, {*supported_model_types(), *_REFUSED})}"
    )


def supported_model_types() -> tuple[str, ...]:
    """Return the sorted model types whose family is registered or offered by an installed package."""
    return tuple(sorted({*_read_entry_points(FAMILIES), *_FAMILIES}))


def is_offered(model_type: str) -> bool:
    """Return whether an installed package offers a family for a model type."""
    return model_type in _read_entry_points(FAMILIES)


def _entry_of(group: str, name: str, registered: Mapping[str, object]) -> EntryPoint | None:
    """Return the entry point of a name that is not registered yet, or None; PluginError if there are several."""
    entries = _read_entry_points(group).get(name, ())
    if len(entries) > 1:
        raise PluginError(f"{' and '.join(map(_describe, entries))} offer the same name: uninstall one of them")
    return entries[0] if entries and name not in registered else None


def _load(entry: EntryPoint, registered: Mapping[str, object], register: Callable[[Any], object], what: str) -> None:
    """Register what an entry point leads to; PluginError if that fails, or its name is not registered then."""
    try:
        loaded = entry.load()
        if not isinstance(loaded, ModuleType):  # a module registers by itself
            register(loaded)
    except AttributeError as error:
        raise PluginError(f"{_describe(entry)} must lead to {what}: {error}") from error
    except (Exception, SystemExit) as error:  # importing other code may raise anything
        raise PluginError(f"{_describe(entry)} cannot be loaded: {type(error).__name__}: {error}") from error
    if entry.name not in registered:
        raise PluginError(f"{_describe(entry)} must lead to {what}")


def _describe(entry: EntryPoint) -> str:
    """Return an entry point and its distribution as text for messages."""
    of = "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{entry.group} entry point {entry.name!r} = {entry.value!r} of {of}"


def _location(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
