"""Patch a model in place, and take the patch off: patch_model, unpatch_model, patched."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .checkpoints.building import PosEncMixin, make_ours
from .checkpoints.config import PosEncConfigMixin
from .checkpoints.entry import CALIBRATION
from .checkpoints.stock import check_served
from .errors import AlreadyPatchedError, NotPatchedError, UnsupportedModelError
from .live.state import Patch, alone, patch_of, patched_part, without_adapter
from .live.undo import Undo, set_attribute
from .live.weights import have_moved, samples_of
from .live.wrappers import check_in_place, check_unwrapped
from .modules import PositionEmbedding, PositionModule, position_parameters
from .patching.layers import MARKER
from .patching.place import operate, seeded
from .patching.plan import check_class_undone, check_forwards, make_plan
from .registry import available_schemes, check_registered, scheme_class
from .schemes.base import Scheme

Model = TypeVar("Model", bound=PreTrainedModel)

SAMPLES = "_posenc_samples"
"""Attribute of the base model of a stock model whose weights moved while it was patched: samples of what they were."""


def parse_schemes(scheme: str | Scheme | Sequence[Scheme], hyperparameters: dict[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes that a caller means: a name with its hyper-parameters, an instance, or a list of instances.

    Raises:
        UnknownSchemeError: for a name or a class that is not registered; the message lists the names that are.
        TypeError: for unknown hyper-parameters, or any beside an instance.
        ValueError: for values out of range.
    """
    if isinstance(scheme, str):
        return (scheme_class(scheme).parse(hyperparameters),)
    given = [scheme] if isinstance(scheme, Scheme) else list(scheme) if isinstance(scheme, (list, tuple)) else []
    if not given or not all(isinstance(each, Scheme) for each in given):
        raise TypeError(
            f"scheme must be one of the names {', '.join(available_schemes())}, a Scheme, or a list of Schemes for "
            f"different layers, not {scheme!r}"
        )
    for each in given:
        check_registered(type(each))
    if hyperparameters:
        names = " and ".join(each.name for each in given)
        raise TypeError(f"hyper-parameters {', '.join(hyperparameters)} were given beside an instance of {names}")
    return tuple(given)


def patch_model(
    model: Model,
    scheme: str | Scheme | Sequence[Scheme],
    *,
    attention: str = "auto",
    seed: int | None = None,
    **hyperparameters: Any,
) -> Model:
    """Replace a model's position handling, in place.

    Everything is checked before anything is changed, and a failure half-way leaves the model as it was. New parameters
    take the dtype and device of the layer they sit on.

    Args:
        model: a stock transformers model of a supported family, with or without a head.
        scheme: a name (`available_schemes()`), a `Scheme` instance, or a list of instances for different layers.
            Layers that nobody names keep what the base has: its rotation, or what its table has put into the hidden
            states.
        attention: engine for schemes that change attention scores: `auto`, or one of
            `hf_posenc.engines.dispatch.NAMES`, which then computes every call or refuses it.
        seed: for new parameters that start at random; None draws from torch's generator.
        **hyperparameters: of the scheme, see its class; `layers` and `window` among them, which every scheme has.

    Returns:
        The model itself.

    Raises:
        UnknownSchemeError: if there is no such scheme, or the class of an instance is not registered.
        UnsupportedModelError: if the model, a setting of it or its attention backend cannot carry the scheme, or
            somebody has replaced the forward that would have to carry it; if it is wrapped, sharded, offloaded or
            spread over devices; if another call is patching, unpatching or calibrating it.
        AlreadyPatchedError: if the model, or another one that has a layer in common with it, is patched;
            `unpatch_model` that first.
        TypeError: for wrong hyper-parameters.
        ValueError: for hyper-parameters out of range, or an unknown `attention`.
    """
    wanted = parse_schemes(scheme, hyperparameters)
    _check_model(model)
    if seed is not None and not isinstance(seed, int):
        raise TypeError(f"seed must be an integer or None, not {seed!r}")
    with alone(model, "patch the model"):
        _check_stock(model)
        _patch(model, wanted, attention, seed)
    return model


def _patch(model: PreTrainedModel, wanted: Sequence[Scheme], attention: str, seed: int | None) -> None:
    """Plan and put in the schemes of `patch_model`."""
    plan = make_plan(model, wanted, attention)
    native = plan.base.native()
    plan = plan.resolved(native)
    check_forwards(plan)
    device = next(model.parameters()).device

    undo = Undo()
    try:
        # Whatever the caller's default device is; new rotations of a model on the meta device have values all the same.
        with torch.device("cpu" if device.type == "meta" else device):
            owners = operate(undo, plan)
            _initialize(owners, native, seed, model)
        make_ours(undo, model, plan.schemes)
        base = patched_part(model)
        samples = base.__dict__.get(SAMPLES) or samples_of(model)
        patch = Patch(plan.schemes, attention, undo, plan.base.found.layers, plan.limit(), plan.attends, samples)
        patch.started = {name: parameter._version for name, parameter in position_parameters(base).items()}
        set_attribute(undo, base, "_posenc_patch", patch)
        for around in _models_around(model):
            set_attribute(undo, around, "save_pretrained", partial(_refuse_to_save, type(around).__name__, patch.name))
    except BaseException:
        undo.roll_back()
        raise


def _models_around(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models of transformers that a bare model is a part of, such as a multimodal one around its decoder.

    Nothing in a module leads to what is around it, so that the garbage collector is asked.
    """
    if model.base_model is not model:  # with a head it is whole
        return []
    found: list[PreTrainedModel] = []
    inner: list[Any] = [model]
    while inner:
        tables = [each for each in gc.get_referrers(*inner) if isinstance(each, dict)]
        owners = [each for each in gc.get_referrers(*tables) if isinstance(each, dict) and "_modules" in each]
        # Its attributes are a module's __dict__, or are in the module itself, as Python likes.
        referrers = (*gc.get_referrers(*tables), *gc.get_referrers(*owners))
        holders = [each for each in referrers if isinstance(each, nn.Module)]
        known = {id(each) for each in (model, *found, *inner)}
        inner = [each for each in holders if id(each) not in known and any(child is model for child in each.modules())]
        found += [each for each in inner if isinstance(each, PreTrainedModel)]
    return found


def _refuse_to_save(around: str, schemes: str, *args: Any, **kwargs: Any) -> None:
    """Stand in for `save_pretrained` of a stock model around a patched one: nobody could load what it writes."""
    raise UnsupportedModelError(
        f"a part of this {around} is patched with {schemes}, and as a whole it could not be loaded again: save the "
        "part that was given to patch_model by its own save_pretrained, or unpatch_model it first"
    )


def _check_model(model: Any) -> None:
    check_unwrapped(model, "patch the model")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model: patch the base model first, then add the adapter with "
            'hf_posenc.lora_config(model), or LoraConfig(task_type="CAUSAL_LM", modules_to_save=["posenc"]), so that '
            "new position parameters are trained and saved"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a transformers PreTrainedModel is needed, not {type(model).__name__}")


def _check_stock(model: PreTrainedModel) -> None:
    if patch_of(model) is not None or isinstance(model, PosEncMixin):
        name = "another scheme" if (patch := patch_of(model)) is None else patch.name
        raise AlreadyPatchedError(f"this {type(model).__name__} is patched with {name}; unpatch_model(model) first")
    if isinstance(model.config, PosEncConfigMixin):
        raise AlreadyPatchedError(
            f"the config of this {type(model).__name__} is the same object as that of a model that is patched: make "
            "each model from a config of its own, copy.deepcopy(config)"
        )
    check_served(model.config)
    for name, module in model.named_modules():
        if any(key.startswith(MARKER) for key in module._buffers):
            raise AlreadyPatchedError(
                f"{name} of this {type(model).__name__} is a layer of another model that is patched, or a copy of one: "
                "unpatch that model first, or take the layer of a stock model"
            )
    check_in_place(model, "patch the model")


def _initialize(owners: list[PositionModule], native: Any, seed: int | None, model: PreTrainedModel) -> None:
    """Start new parameters and move them to where their layer is."""
    with torch.no_grad(), seeded(seed):
        for owner in owners:
            beside = _layer_parameter(model, owner)
            owner.to(device=beside.device, dtype=beside.dtype)
            if isinstance(owner, PositionEmbedding):
                owner.initialize(native)
            else:
                owner.reset_parameters()
            owner.train(model.training)


def _layer_parameter(model: PreTrainedModel, owner: nn.Module) -> torch.Tensor:
    """Return a stock floating-point parameter near a new module: FSDP wants one dtype per layer."""
    new = {id(p) for p in owner.parameters()}
    parent = next(m for m in model.modules() if any(child is owner for child in m.children()))
    for module in (parent, model):
        for parameter in module.parameters():
            if id(parameter) not in new and parameter.is_floating_point():
                return parameter
    raise UnsupportedModelError(f"{type(model).__name__} has no floating-point parameters")


def unpatch_model(model: Model) -> Model:
    """Undo `patch_model`: modules, classes, config, hooks and attributes are what they were.

    Stock parameters that were trained in between keep their new values; the scheme's parameters are dropped. Weights
    that a calibration has moved stay moved as well, and a warning says so.

    Args:
        model: a patched model.

    Returns:
        The model itself.

    Raises:
        NotPatchedError: if it is not patched, or was loaded from a patched checkpoint, which does not hold the stock
            positions.
        UnsupportedModelError: if it is wrapped (DistributedDataParallel), sharded (FSDP), offloaded or spread over
            devices, has copies of layers that were made after it was patched, if somebody has replaced a forward that
            would have to be taken away, or if another call is patching, unpatching or calibrating it.
    """
    check_unwrapped(model, "unpatch the model")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model, and its adapter was trained on the positions that would go: take "
            "it off first with model = model.merge_and_unload(), or model.unload() (which drops it; for prompts "
            "model.get_base_model()), then unpatch what that returns"
        )
    with alone(model, "unpatch the model"):
        _unpatch(model)
    return model


def _unpatch(model: PreTrainedModel) -> None:
    """Check that nothing stands in the way, and undo the patch."""
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched")
    if patch.undo is None:
        raise NotPatchedError(
            "this model was loaded from a patched checkpoint, which does not hold the stock positions: load the "
            "stock checkpoint"
        )
    known = {id(layer) for layer in patch.layers}
    for name, module in model.named_modules():
        if id(module) not in known and any(key.startswith(MARKER) for key in module._buffers):
            raise UnsupportedModelError(
                f"{name} is a copy of a patched layer, which cannot be unpatched: remove it first, or copy layers "
                "before the model is patched"
            )

    check_in_place(model, "unpatch the model")
    check_class_undone(model)
    calibrated = CALIBRATION in model.config.position_encoding
    patch.undo.roll_back()
    if not have_moved(model, patch.samples):
        patched_part(model).__dict__.pop(SAMPLES, None)
        return
    setattr(patched_part(model), SAMPLES, patch.samples)  # what is calibrated next must not take it for the base it was
    if calibrated:
        warnings.warn(
            f"unpatch_model: a calibration has moved weights of this {type(model).__name__}, and they stay moved: load "
            "the checkpoint again for what it was",
            stacklevel=3,
        )


@contextmanager
def patched(model: Model, scheme: str | Scheme | Sequence[Scheme], **arguments: Any) -> Iterator[Model]:
    """Patch a model for the length of a `with` block, also when the body raises.

    At the end the model is stock, whatever the body did: nothing is left to do where the body has unpatched it, and
    what it has patched it with instead is undone. If it cannot be unpatched, an error of the body is still the one that
    is raised, with a note.

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
    """Return the schemes of a patched model with everything they were resolved to; of a stock model none.

    Args:
        model: also below an adapter of PEFT.
    """
    patch = patch_of(model)
    return () if patch is None else patch.schemes
