"""Patch a model in place, and take the patch off: patch_model, unpatch_model, patched."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from .checkpoints.model_classes import classes_of_ours
from .checkpoints.scheme_entry import CALIBRATION, make_entry
from .core import command_arguments
from .core.dims import REST
from .core.modules import position_parameters
from .core.registry import available_schemes, check_registered, scheme_class
from .model.obstacles import check_undone, dense, to_be_changed
from .model.patch_record import PATCH, SAMPLES, have_moved, patch_of, patched_part, samples_of
from .model.undo import SetAttribute, Undo
from .patching.changes import place_started
from .patching.plan import make_plan
from .schemes.base import Scheme

Model = TypeVar("Model", bound=PreTrainedModel)


OneScheme = str | Scheme
"""A scheme: its registered name, or an instance."""

Schemes = OneScheme | Sequence[OneScheme] | Mapping[Any, OneScheme | Sequence[OneScheme]]
"""One scheme, a list of schemes, or a mapping of layers to schemes."""

DEFAULT = "_default"
"""Key of a mapping of layers to schemes: the layers that no other key names."""


def parse_schemes(scheme: Schemes, hyperparameters: dict[str, object]) -> tuple[Scheme, ...]:
    """Return the schemes from a name with hyper-parameters, an instance, a list of both, or a mapping.

    Args:
        scheme: see `patch_model`.
        hyperparameters: hyper-parameters, which may go with a single name.

    Raises:
        UnknownSchemeError: if a name or a class is not registered; the message lists the registered names.
        TypeError: for unknown hyper-parameters, or for hyper-parameters without a single name.
        ValueError: for values out of range.
    """
    if isinstance(scheme, str):
        return (scheme_class(scheme).parse(hyperparameters),)
    pairs: list[tuple[Any, Any]] = [
        (key, each)
        for key, value in (scheme.items() if isinstance(scheme, Mapping) else [(None, scheme)])
        for each in (value if isinstance(value, (list, tuple)) else [value]) or [None]
    ]
    if not pairs or not all(isinstance(each, (str, Scheme)) for _, each in pairs):
        raise TypeError(
            f"scheme must be one of the names {', '.join(available_schemes())}, a Scheme, a list of names or Schemes, "
            f"or a mapping of layers to them, not {scheme!r}"
        )
    schemes: list[Scheme] = []
    for key, named in pairs:
        each = scheme_class(named).parse({}) if isinstance(named, str) else named
        check_registered(type(each))
        if key is not None:
            if each.layers is not None:
                raise TypeError(f"{each.name} names layers itself, and is the value of {key!r}: name them in one place")
            each = replace(each, layers=REST if key == DEFAULT else (key,) if isinstance(key, int) else key)
        schemes.append(each)
    if hyperparameters:
        raise TypeError(f"hyper-parameters {', '.join(hyperparameters)} go with the name of one scheme only")
    return tuple(schemes)


def is_mixture(scheme: str) -> bool:
    """Return whether the word of a command is JSON, a mixture of schemes, instead of one name."""
    return scheme.lstrip()[:1] in ("{", "[")


def schemes_of_words(scheme: str, scheme_args: Iterable[str]) -> tuple[Scheme, ...]:
    """Return the schemes that words of a command name.

    Args:
        scheme: a name; or JSON of a mapping of layers to schemes, or of a list of schemes, as `patch_model` takes them.
            In JSON a scheme is a name, or an object with the name as `scheme` and hyper-parameters, as in config.json.
        scheme_args: hyper-parameters of a single name, `name=value`.

    Raises:
        UnknownSchemeError, TypeError, ValueError: as for `parse_schemes`, and for what is no JSON.
    """
    if not is_mixture(scheme):
        return parse_schemes(scheme, command_arguments.hyperparameters(scheme_args))
    if scheme_args:
        raise TypeError(
            f"--scheme-args {' '.join(scheme_args)} cannot go with JSON: write hyper-parameters into it, as in "
            '{"scheme": "shaw", "max_distance": 64}'
        )
    content = json.loads(scheme)
    if isinstance(content, dict) and "scheme" not in content:
        by_layers = {int(key) if key.removeprefix("-").isdecimal() else key: content[key] for key in content}
        return parse_schemes({key: _instances(value) for key, value in by_layers.items()}, {})
    return parse_schemes(_instances(content), {})


def _instances(content: object) -> list[Any]:
    """Return the schemes that JSON lists: names, and instances instead of objects with hyper-parameters."""
    return [
        scheme_class(item["scheme"]).parse({key: value for key, value in item.items() if key != "scheme"})
        if isinstance(item, dict) and isinstance(item.get("scheme"), str)
        else item
        for item in (content if isinstance(content, list) else [content])
    ]


def patch_model(
    model: Model, scheme: Schemes, *, attention: str = "auto", seed: int | None = None, **hyperparameters: object
) -> Model:
    """Replace a model's position handling, in place.

    `patch_model` checks everything before it changes anything. A failure half-way leaves the model as it was. New
    parameters take the dtype and device of the layer they sit on.

    Args:
        model: a stock transformers model of a supported family, with or without a head. In a multimodal model,
            `patch_model` patches the language model.
        scheme: a name (`available_schemes()`), a `Scheme` instance, or a list of both. In a layer one scheme may
            replace the positions, and others may join it (`temperature`). A mapping gives schemes by layers, as in
            `{"3::4": "nope", "_default": ["rope", "temperature"]}`: a key is a value of `layers`, or `_default` for the
            layers that no other key names. Layers whose positions no scheme replaces keep the base's positions: its
            rotation, or the vectors of its table in the hidden states.
        attention: engine for schemes that change attention scores: `auto`, or one of
            `hf_posenc.engines.dispatch.NAMES`. A named engine computes every call or refuses it.
        seed: seed of new parameters that start at random; None draws from torch's generator.
        **hyperparameters: hyper-parameters of the scheme, see its class. Every scheme has `layers`, `window` and
            `sinks`.

    Returns:
        The model itself.

    Raises:
        UnknownSchemeError: if there is no such scheme, or the class of an instance is not registered.
        UnsupportedModelError: if the model, its config or its attention backend cannot carry the scheme; if other code
            has replaced a forward that the scheme needs; if the model is wrapped, sharded, offloaded or spread over
            devices; if another call is patching, unpatching or calibrating it.
        AlreadyPatchedError: if the model, or another model that shares a layer with it, is patched. Call
            `unpatch_model` on that model first.
        TypeError: for wrong hyper-parameters.
        ValueError: for hyper-parameters out of range, or an unknown `attention`.
    """
    schemes = parse_schemes(scheme, hyperparameters)
    if seed is not None and not isinstance(seed, int):
        raise TypeError(f"seed must be an integer or None, not {seed!r}")
    with to_be_changed(model, "patch"):
        unpacked = dense(model)
        plan = make_plan(model, schemes, attention)
        changes = place_started(plan, seed)
        base, undo = patched_part(model), Undo()
        patch = plan.record(undo)
        patch.samples = model.base_model.__dict__.get(SAMPLES) or samples_of(model)
        entry = make_entry(plan.schemes)
        classes = classes_of_ours(model, base.config, entry)
        try:
            undo.apply(*changes.pending, SetAttribute(base, PATCH, patch), *unpacked, *classes)
            patch.started = {name: parameter._version for name, parameter in position_parameters(base).items()}
        except BaseException:
            undo.roll_back()
            raise
    return model


def unpatch_model(model: Model) -> Model:
    """Undo `patch_model`: restore modules, classes, config, hooks and attributes, and drop the scheme's parameters.

    Stock parameters keep the values that training or a calibration has given them. After a calibration a warning says
    so.

    Args:
        model: a patched model.

    Returns:
        The model itself.

    Raises:
        NotPatchedError: if the model is not patched, or comes from a patched checkpoint, which does not hold the stock
            positions.
        UnsupportedModelError: if the model is wrapped (DistributedDataParallel), sharded (FSDP), offloaded or spread
            over devices; if layers were copied after it was patched; if other code has replaced a forward that must be
            restored; if another call is patching, unpatching or calibrating it.
    """
    with to_be_changed(model, "unpatch") as patch:
        patch, undo = check_undone(model, patch)
        calibrated = CALIBRATION in model.config.position_encoding
        undo.roll_back()
        model.base_model.__dict__.pop(SAMPLES, None)
        if have_moved(model, patch.samples):
            setattr(model.base_model, SAMPLES, patch.samples)  # for the next patch: those of the original weights
            if calibrated:
                warnings.warn(
                    f"unpatch_model: a calibration has changed weights of this {type(model).__name__}, and they stay "
                    "changed: load the checkpoint again for the stock weights",
                    stacklevel=2,
                )
    return model


@contextmanager
def patched(model: Model, scheme: Schemes, **arguments: Any) -> Iterator[Model]:
    """Patch a model for the length of a `with` block, also when the body raises.

    At the end the model is stock, even if the body has unpatched it or patched it with another scheme.

    Args:
        model: as for `patch_model`.
        scheme: as for `patch_model`.
        **arguments: as for `patch_model`.

    Yields:
        The model itself.
    """
    patch_model(model, scheme, **arguments)
    try:
        yield model
    finally:
        if patch_of(model) is not None:
            unpatch_model(model)


def is_patched(model: nn.Module) -> bool:
    """Return whether a model is patched, also below an adapter of PEFT."""
    return patch_of(model) is not None


def schemes_of(model: nn.Module) -> tuple[Scheme, ...]:
    """Return the schemes of a patched model, with hyper-parameters as fitted to it; nothing for a stock model.

    Args:
        model: any model, also with an adapter of PEFT around it.
    """
    patch = patch_of(model)
    return () if patch is None else patch.schemes
