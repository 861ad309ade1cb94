"""Patch a model in place, and take the patch off: patch_model, unpatch_model, patched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from .checkpoints.model_classes import classes_of_ours
from .checkpoints.scheme_entry import CALIBRATION, make_entry
from .dims import REST
from .errors import UnsupportedModelError
from .live.obstacles import models_around
from .live.patch_record import PATCH, Patch, patch_of, patched_part
from .live.undo import SetAttribute, Undo
from .live.weight_samples import keep_if_moved, stock_samples
from .modules import position_parameters
from .patching.changes import place_started
from .patching.check import to_be_patched, to_be_unpatched
from .patching.plan import make_plan
from .registry import available_schemes, check_registered, scheme_class
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
    schemes = _by_layers(scheme) if isinstance(scheme, Mapping) else _instances(scheme)
    if not schemes:
        raise TypeError(
            f"scheme must be one of the names {', '.join(available_schemes())}, a Scheme, a list of names or Schemes, "
            f"or a mapping of layers to them, not {scheme!r}"
        )
    for each in schemes:
        check_registered(type(each))
    if hyperparameters:
        names = " and ".join(each.name for each in schemes)
        raise TypeError(f"hyper-parameters {', '.join(hyperparameters)} cannot go with an instance of {names}")
    return tuple(schemes)


def _instances(scheme: object) -> list[Scheme]:
    """Return the schemes of a name, an instance or a list of both; an empty list for anything else."""
    listed: list[Any] = list(scheme) if isinstance(scheme, (list, tuple)) else [scheme]
    if not all(isinstance(each, (str, Scheme)) for each in listed):
        return []
    return [scheme_class(each).parse({}) if isinstance(each, str) else each for each in listed]


def _by_layers(mapping: Mapping[Any, object]) -> list[Scheme]:
    """Return the schemes of a mapping of layers to schemes; an empty list if a value is no scheme.

    Raises:
        TypeError: if a scheme names layers itself.
    """
    schemes = []
    for key, value in mapping.items():
        listed = _instances(value)
        if not listed:
            return []
        layers = REST if key == DEFAULT else (key,) if isinstance(key, int) else key
        for each in listed:
            if each.layers is not None:
                raise TypeError(f"{each.name} names layers itself, and is the value of {key!r}: name them in one place")
            schemes.append(replace(each, layers=layers))
    return schemes


def patch_model(
    model: Model,
    scheme: Schemes,
    *,
    attention: str = "auto",
    seed: int | None = None,
    **hyperparameters: object,
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
    with to_be_patched(model):
        plan = make_plan(model, schemes, attention)
        placed = place_started(plan, seed)
        plan, undo, changes = placed.plan, Undo(), placed.pending
        base, layers = patched_part(model), plan.base.modules.layers
        patch = Patch(plan.schemes, attention, undo, layers, plan.limit, plan.attends, stock_samples(model))
        patch.backend = plan.backend
        changes.append(SetAttribute(base, PATCH, patch))
        for around in models_around(model):
            changes.append(SetAttribute(around, "save_pretrained", partial(_refuse_to_save, type(around), patch.name)))
        changes += classes_of_ours(model, base.config, make_entry(plan.schemes))
        try:
            undo.apply(*changes)
            patch.started = {name: parameter._version for name, parameter in position_parameters(base).items()}
        except BaseException:
            undo.roll_back()
            raise
    return model


def _refuse_to_save(around: type, schemes: str, *args: object, **kwargs: object) -> None:
    """Replace `save_pretrained` of a stock model around a patched one, because its checkpoint could not be loaded."""
    raise UnsupportedModelError(
        f"only a part of this {around.__name__} is patched with {schemes}, so a checkpoint of the whole could not be "
        "loaded: call save_pretrained on the patched part; or call unpatch_model on the part, then patch_model on the "
        "whole"
    )


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
    with to_be_unpatched(model) as (patch, undo):
        calibrated = CALIBRATION in model.config.position_encoding
        undo.roll_back()
        if keep_if_moved(model, patch.samples) and calibrated:
            warnings.warn(
                f"unpatch_model: a calibration has changed weights of this {type(model).__name__}, and they stay "
                "changed: load the checkpoint again for the stock weights",
                stacklevel=2,
            )
    return model


@contextmanager
def patched(model: Model, scheme: Schemes, **arguments: Any) -> Iterator[Model]:
    """Patch a model for the length of a `with` block, also when the body raises.

    At the end the model is stock, even if the body has unpatched it or patched it with another scheme. If unpatching
    fails after an error of the body, the error of the body is raised, with a note.

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
    except BaseException as error:
        try:
            _make_stock(model)
        except Exception as failure:
            error.add_note(f"After this the model could not be unpatched: {failure}")
        raise
    _make_stock(model)


def _make_stock(model: PreTrainedModel) -> None:
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
