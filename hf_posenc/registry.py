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
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from .did_you_mean import did_you_mean
from .errors import PluginError, UnknownSchemeError, UnsupportedModelError

if TYPE_CHECKING:
    from .families.base import Family
    from .families.refused import Refusal
    from .schemes.base import Scheme

    SchemeClass = TypeVar("SchemeClass", bound=type[Scheme])

SCHEMES, FAMILIES = "hf_posenc.schemes", "hf_posenc.families"
"""Groups of entry points. Each has the name of the package with our own schemes or families."""

_SCHEMES: dict[str, type[Scheme]] = {}
_FAMILIES: dict[str, Family] = {}
_REFUSED: dict[str, Refusal] = {}
_BROKEN: dict[str, str] = {}
"""Name of a scheme that a package offers and that cannot be made -> why. Its module registers only once."""
_ENTRY_POINTS: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
"""Group -> name -> its entry points. Several entry points mean that packages offer the same name. The dict has a group
once the group's registry is filled."""

RESERVED = ("base",)
"""Names that no scheme may have: checkpoints mark a layer that keeps the base's positions with `hf_posenc_base`."""


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
            if another class or an installed package has this name. You may register a class again, even after a new
            definition (a notebook cell that ran twice): it replaces the old class.
            A class that a function defines replaces none.
    """
    name = _require_valid_name(cls)
    if not _is_ours(cls):
        _read_entry_points(SCHEMES)
    other = _SCHEMES.get(name, cls)
    if other is not cls and (_location(other) != _location(cls) or "<locals>" in cls.__qualname__):
        raise ValueError(f"scheme name {name!r} of {_location(cls)} is taken by {_location(other)}; rename one of them")
    for entry in () if _is_ours(cls) else _read_entry_points(SCHEMES).get(name, ()):
        if name not in _SCHEMES and _top_package(entry.module) != _top_package(cls.__module__):
            raise ValueError(
                f"scheme name {name!r} of {_location(cls)} is taken by {_describe(entry)}; rename one of them"
            )
    _SCHEMES[name] = cls
    return cls


def _require_valid_name(cls: type[Scheme]) -> str:
    """Return the name of a class; TypeError or ValueError if the class cannot be registered."""
    name: Any = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{_location(cls)} needs a class attribute `name: ClassVar[str]`, its name in checkpoints")
    if not name.isidentifier() or name in RESERVED:
        raise ValueError(
            f"scheme name {name!r} of {_location(cls)} must be an identifier and not {', '.join(RESERVED)}: a "
            "buffer of each layer is named after it"
        )
    frozen = getattr(cls.__dict__.get("__dataclass_params__"), "frozen", False)
    positional = sum(not field.kw_only for field in fields(cls)) if frozen else 0
    if not frozen or positional > 1 or any(_has_no_default(field) for field in fields(cls)):
        raise TypeError(
            f"{_location(cls)} must be a frozen dataclass whose fields have defaults and are keyword-only (but for "
            "one), since they are what a checkpoint holds: put @register_scheme above "
            "@dataclass(frozen=True, kw_only=True)"
        )
    return name


def _has_no_default(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def scheme_class(name: str) -> type[Scheme]:
    """Return the scheme class of a name; import the package that offers it, if one does.

    Raises:
        UnknownSchemeError: if no scheme has this name; the message lists the names.
        PluginError: if the package that offers the scheme cannot be imported or lacks it, or several packages offer it.
    """
    _read_entry_points(SCHEMES)
    if name in _BROKEN and name not in _SCHEMES:
        raise PluginError(_BROKEN[name])
    if name not in _SCHEMES and (entry := _only_entry_point(SCHEMES, name)) is not None:
        loaded = _load(entry)
        if isinstance(loaded, type):
            _register(entry, register_scheme, loaded)
        elif not isinstance(loaded, ModuleType):
            raise PluginError(f"{_describe(entry)} must lead to a scheme class, or to a module that registers one")
        if name not in _SCHEMES:
            raise PluginError(f"{_describe(entry)} must register a scheme named {name!r}")
        try:
            _SCHEMES[name]()
        except Exception as error:  # as in `_load`; commands make schemes without arguments
            del _SCHEMES[name]
            reason = f"{type(error).__name__}: {error}"
            _BROKEN[name] = f"{_describe(entry)} cannot be made without arguments: {reason}"
            raise PluginError(_BROKEN[name]) from error
    try:
        return _SCHEMES[name]
    except KeyError:
        names = available_schemes()
        synonyms = {synonym: answer for cls in _SCHEMES.values() for synonym, answer in cls.known_as.items()}
        raise UnknownSchemeError(
            f"unknown scheme {name!r}; choose from {', '.join(names)}"
            f"{did_you_mean(name, synonyms | {each: each for each in names})}"
        ) from None


def check_registered(cls: type[Scheme]) -> None:
    """Check that a class is registered under its own name, because a checkpoint is loaded by this name.

    Raises:
        UnknownSchemeError: if it is not registered; the message says how to register it.
    """
    name = getattr(cls, "name", None)
    registered = _SCHEMES.get(name) if isinstance(name, str) else None
    if registered is not cls:
        taken = "" if registered is None else f"; first rename it, because {_location(registered)} is named {name!r}"
        raise UnknownSchemeError(
            f"{_location(cls)} is not registered, so a model that is patched with it could not be loaded again: put "
            f"@hf_posenc.register_scheme on the class{taken}. Registered are {', '.join(available_schemes())}"
        )


def available_schemes() -> tuple[str, ...]:
    """Return the sorted names of all schemes, registered or offered by an installed package."""
    offered = _read_entry_points(SCHEMES)
    return tuple(sorted({*_SCHEMES, *offered}))


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


def register_refusal(refusal: Refusal) -> None:
    """Record why some model types are not served. You may still register a family for one of them."""
    _REFUSED.update(dict.fromkeys(refusal.model_types, refusal))


def reason_against(model_type: str) -> str | None:
    """Return why a model type is not served, as a clause; None if it is served or has no refusal."""
    refusal = None if model_type in supported_model_types() else _REFUSED.get(model_type)
    return None if refusal is None else refusal.reason


def refusals() -> dict[str, Refusal]:
    """Return model type -> refusal, sorted, for the model types with a refusal and without a family."""
    served = supported_model_types()
    return {model_type: _REFUSED[model_type] for model_type in sorted(_REFUSED) if model_type not in served}


def family_for(model_type: str) -> Family:
    """Return the family that serves models whose `config.model_type` is `model_type`.

    Raises:
        UnsupportedModelError: if no family serves it; the message says why, or how to list the model types.
        PluginError: if the package that offers the family cannot be imported or lacks it, or several packages offer it.
    """
    _read_entry_points(FAMILIES)
    if model_type not in _FAMILIES and (entry := _only_entry_point(FAMILIES, model_type)) is not None:
        loaded = _load(entry)
        types = getattr(loaded, "model_types", None)
        if not isinstance(types, tuple) or model_type not in types:
            raise PluginError(f"{_describe(entry)} must lead to a Family with {model_type!r} among its model_types")
        if unnamed := set(types) - set(_read_entry_points(FAMILIES)):  # transformers would not find their classes
            raise PluginError(f"{_describe(entry)} serves {', '.join(sorted(unnamed))} too: give each an entry point")
        _register(entry, register_family, loaded)
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
    offered = _read_entry_points(FAMILIES)
    return tuple(sorted({*_FAMILIES, *offered}))


def offer(model_type: str) -> str | None:
    """Describe the entry points that offer a family for a model type; None if there are none."""
    return " and ".join(map(_describe, _read_entry_points(FAMILIES).get(model_type, ()))) or None


def _only_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of a name, or None if there is none; PluginError if several packages offer the name."""
    entries = _read_entry_points(group).get(name, ())
    if len(entries) > 1:
        raise PluginError(f"{' and '.join(map(_describe, entries))} offer the same name: uninstall one of them")
    return entries[0] if entries else None


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # importing other code may raise anything
        raise PluginError(f"{_describe(entry)} cannot be loaded: {type(error).__name__}: {error}") from error


def _register(entry: EntryPoint, register: Any, loaded: Any) -> None:
    try:
        register(loaded)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{_describe(entry)} cannot be registered: {error}") from error


def _describe(entry: EntryPoint) -> str:
    """Return an entry point and its distribution as text for messages."""
    of = "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{entry.group} entry point {entry.name!r} = {entry.value!r} of {of}"


def _location(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_ours(cls: type) -> bool:
    """Return whether a class belongs to this package."""
    return _top_package(cls.__module__) == _top_package(__name__)


def _top_package(module: str) -> str:
    return module.partition(".")[0]
