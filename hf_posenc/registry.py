"""The two registries: scheme names to scheme classes, model types to families.

Both refuse duplicates, since the later of two registrations would otherwise change models that name the earlier one.

Other packages offer schemes and families as entry points, in the groups `hf_posenc.schemes` and `hf_posenc.families`.
An entry point is named after what it offers: the scheme's name, or one model type of the family. So names are known
without importing anybody's code, and the code behind a name is imported when the name is first used. A package that is
broken breaks its own names, and nothing else. This package's own schemes and families, and the names of the others, are
read when a registry is first asked for anything, so that importing hf_posenc costs next to nothing.
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
"""Groups of entry points."""

_SCHEMES: dict[str, type[Scheme]] = {}
_FAMILIES: dict[str, Family] = {}
_REFUSED: dict[str, Refusal] = {}
_OFFERED: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
"""Group -> name -> the entry points of this name: one, or several of packages that are in each other's way. A group is
here once its registry has been filled."""

RESERVED = ("base",)
"""Names that checkpoints use for something else: a layer that keeps what the base has is marked `hf_posenc_base`."""


def _offers(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return what installed packages offer, by name; the first time this package's own are registered before.

    Warns (UserWarning) of each name that hf_posenc has itself: nobody can replace that, so the offer is ignored.
    """
    if group in _OFFERED:
        return _OFFERED[group]
    _OFFERED[group] = {}  # importing our own comes back here
    import_module(group)
    own, what = (_SCHEMES, "scheme") if group == SCHEMES else (_FAMILIES, "model type")
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points().select(group=group):
        if entry.name in own:
            warnings.warn(f"{_describe(entry)} is ignored: hf_posenc has a {what} {entry.name!r} itself", stacklevel=3)
        else:
            found.setdefault(entry.name, []).append(entry)
    _OFFERED[group] = {name: tuple(entries) for name, entries in found.items()}
    return _OFFERED[group]


def register_scheme(cls: SchemeClass) -> SchemeClass:
    """Make a scheme available under its class attribute `name`; a class decorator.

    Args:
        cls: the scheme class, a frozen dataclass whose fields are keyword-only and have defaults.

    Returns:
        `cls`, unchanged.

    Raises:
        TypeError: it is no such class.
        ValueError: its name is no identifier (parameters of checkpoints are named after it), or reserved, or that of
            another class, registered or offered by an installed package. Registering the same class again is allowed,
            also one that was defined anew, as by a cell of a notebook that ran twice: it takes the other's place.
    """
    name = _checked_name(cls)
    if not _is_own(cls):
        _offers(SCHEMES)
    other = _SCHEMES.get(name, cls)
    if other is not cls and (_location(other) != _location(cls) or "<locals>" in cls.__qualname__):
        raise ValueError(f"scheme name {name!r} of {_location(cls)} is taken by {_location(other)}; rename one of them")
    for entry in () if _is_own(cls) else _offers(SCHEMES).get(name, ()):
        if name not in _SCHEMES and _top(entry.module) != _top(cls.__module__):
            raise ValueError(
                f"scheme name {name!r} of {_location(cls)} is taken by {_describe(entry)}; rename one of them"
            )
    _SCHEMES[name] = cls
    return cls


def _checked_name(cls: type[Scheme]) -> str:
    name: Any = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{_location(cls)} needs a class attribute `name: ClassVar[str]`, its name in checkpoints")
    if not name.isidentifier() or name in RESERVED:
        raise ValueError(
            f"scheme name {name!r} of {_location(cls)} must be an identifier, and none of {', '.join(RESERVED)}: a "
            "buffer of each layer is named after it"
        )
    frozen = getattr(cls.__dict__.get("__dataclass_params__"), "frozen", False)
    if not frozen or any(not field.kw_only or _has_no_default(field) for field in fields(cls)):
        raise TypeError(
            f"{_location(cls)} must be a frozen dataclass whose fields are keyword-only and have defaults, since they "
            "are what a checkpoint holds: put @register_scheme above @dataclass(frozen=True, kw_only=True)"
        )
    return name


def _has_no_default(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def scheme_class(name: str) -> type[Scheme]:
    """Return the scheme class of a name; import the package that offers it, if one does.

    Raises:
        UnknownSchemeError: no scheme has this name; the message lists those that exist.
        PluginError: the package that offers it cannot be imported, or does not have it; or several packages offer it.
    """
    _offers(SCHEMES)
    if name not in _SCHEMES and (entry := _offer(SCHEMES, name)) is not None:
        loaded = _load(entry)
        if isinstance(loaded, type):
            _register(entry, register_scheme, loaded)
        elif not isinstance(loaded, ModuleType):
            raise PluginError(f"{_describe(entry)} must lead to a scheme class, or to a module that registers one")
        if name not in _SCHEMES:
            raise PluginError(f"{_describe(entry)} registers no scheme of the name {name!r}, after which it is named")
        try:
            _SCHEMES[name]()
        except Exception as error:  # as in `_load`; every command makes it so
            del _SCHEMES[name]
            raise PluginError(
                f"{_describe(entry)} cannot be made without arguments: {type(error).__name__}: {error}"
            ) from error
    try:
        return _SCHEMES[name]
    except KeyError:
        known = available_schemes()
        other = {other: asked for cls in _SCHEMES.values() for other, asked in cls.known_as.items()}
        raise UnknownSchemeError(
            f"unknown scheme {name!r}; choose from {', '.join(known)}"
            f"{did_you_mean(name, other | {each: each for each in known})}"
        ) from None


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
            f"@hf_posenc.register_scheme on the class{taken}. Registered are {', '.join(available_schemes())}"
        )


def available_schemes() -> tuple[str, ...]:
    """Return the names of all schemes, sorted: registered, or offered by an installed package."""
    offered = _offers(SCHEMES)
    return tuple(sorted({*_SCHEMES, *offered}))


def register_family(family: Family) -> Family:
    """Make a family available for each of its model types.

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


def register_refusal(refusal: Refusal) -> None:
    """Record why some model types are not served. A family for one of them can be registered all the same."""
    _REFUSED.update(dict.fromkeys(refusal.model_types, refusal))


def reason_against(model_type: str) -> str | None:
    """Return why a model type is not served, as a clause; None if it is served, or nothing is known of it."""
    refusal = None if model_type in supported_model_types() else _REFUSED.get(model_type)
    return None if refusal is None else refusal.reason


def refusals() -> dict[str, Refusal]:
    """Return the model types that are not served for a known reason, sorted, each with its refusal."""
    served = supported_model_types()
    return {model_type: _REFUSED[model_type] for model_type in sorted(_REFUSED) if model_type not in served}


def family_for(model_type: str) -> Family:
    """Return the family that serves models whose `config.model_type` is `model_type`.

    Raises:
        UnsupportedModelError: no family serves it; the message says why, or how to list what is served.
        PluginError: the package that offers it cannot be imported, or does not have it; or several packages offer it.
    """
    _offers(FAMILIES)
    if model_type not in _FAMILIES and (entry := _offer(FAMILIES, model_type)) is not None:
        loaded = _load(entry)
        types = getattr(loaded, "model_types", None)
        if not isinstance(types, tuple) or model_type not in types:
            raise PluginError(f"{_describe(entry)} must lead to a Family with {model_type!r} among its model_types")
        if unnamed := set(types) - set(_offers(FAMILIES)):  # whose model classes nobody would find
            raise PluginError(f"{_describe(entry)} serves {', '.join(sorted(unnamed))} too: give each an entry point")
        _register(entry, register_family, loaded)
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    if (reason := reason_against(model_type)) is not None:
        raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}")
    raise UnsupportedModelError(
        f"model type {model_type!r} is not supported (`hf-posenc families` lists those that are; a package that brings "
        f"another has to be installed or imported){did_you_mean(model_type, {*supported_model_types(), *_REFUSED})}"
    )


def supported_model_types() -> tuple[str, ...]:
    """Return the model types that have a family, sorted: registered, or offered by an installed package."""
    offered = _offers(FAMILIES)
    return tuple(sorted({*_FAMILIES, *offered}))


def offer(model_type: str) -> str | None:
    """Return the name, for messages, of the package that offers a family for a model type; None if none does."""
    return " and ".join(map(_describe, _offers(FAMILIES).get(model_type, ()))) or None


def _offer(group: str, name: str) -> EntryPoint | None:
    """Return the one entry point of a name, or None; PluginError if several packages offer it."""
    entries = _offers(group).get(name, ())
    if len(entries) > 1:
        raise PluginError(
            f"{' and '.join(map(_describe, entries))} offer the same name, which cannot mean both: uninstall one of "
            "them"
        )
    return entries[0] if entries else None


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever somebody's code raises while it is imported
        raise PluginError(f"{_describe(entry)} cannot be loaded: {type(error).__name__}: {error}") from error


def _register(entry: EntryPoint, register: Any, loaded: Any) -> None:
    try:
        register(loaded)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{_describe(entry)} cannot be registered: {error}") from error


def _describe(entry: EntryPoint) -> str:
    """Return an entry point and the distribution that it belongs to, for messages."""
    of = "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{entry.group} entry point {entry.name!r} = {entry.value!r} of {of}"


def _location(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_own(cls: type) -> bool:
    """Return whether a class is of this package, which is registered before anything else is asked for."""
    return _top(cls.__module__) == _top(__name__)


def _top(module: str) -> str:
    return module.partition(".")[0]
