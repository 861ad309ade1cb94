"""Check that a live model can be patched or unpatched, and keep other calls away from it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from ..errors import AlreadyPatchedError, NotPatchedError, UnsupportedModelError
from ..families.lookup import family_of
from ..live.obstacles import check_in_place, check_unwrapped
from ..live.patch_record import OfPatched, Patch, alone, without_adapter
from ..live.undo import Undo, has_own_forward
from ..upstream.replaced_attention import ReplacedAttention
from .patched_layers import MARKER

TAKE_OFF = (
    "hooks of accelerate: accelerate.hooks.remove_hook_from_module(model, recurse=True); a wrapper or a compiled "
    "forward: del attention.forward"
)


@contextmanager
def to_be_patched(model: object) -> Iterator[None]:
    """Check that a stock model can be patched, and keep other calls from changing it for a `with` block.

    Raises:
        AlreadyPatchedError: if the model is patched, or another patched model shares a layer or the config with it.
        UnsupportedModelError: if no family serves the model; if it is wrapped, sharded, offloaded or spread over
            devices; or if another call is changing it.
    """
    check_unwrapped(model, "patch the model")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model: patch the base model first, then add the adapter with "
            'hf_posenc.lora_config(model), or LoraConfig(task_type="CAUSAL_LM", modules_to_save=["posenc"]), so that '
            "new position parameters are trained and saved"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a transformers PreTrainedModel is needed, not {type(model).__name__}")
    with alone(model, "patch the model") as patch:
        if patch is not None or isinstance(model, OfPatched):
            name = "another scheme" if patch is None else patch.name
            raise AlreadyPatchedError(f"this {type(model).__name__} is patched with {name}; unpatch_model(model) first")
        if isinstance(model.config, OfPatched):
            raise AlreadyPatchedError(
                f"this {type(model).__name__} shares its config object with a patched model: "
                "make each model from a config of its own, copy.deepcopy(config)"
            )
        for name, module in model.named_modules():
            if any(key.startswith(MARKER) for key in module._buffers):
                raise AlreadyPatchedError(
                    f"{name} of this {type(model).__name__} is a layer of another patched model, or a copy of such a "
                    "layer: unpatch that model first, or take the layer of a stock model"
                )
        check_in_place(model, "patch the model")
        family_of(model.config)
        yield


@contextmanager
def to_be_unpatched(model: object) -> Iterator[tuple[Patch, Undo]]:
    """Check that a patched model can be unpatched, and keep other calls from changing it for a `with` block.

    Yields:
        The record of the patch, and its inverse steps.

    Raises:
        NotPatchedError: if the model is not patched, or was loaded from a patched checkpoint.
        UnsupportedModelError: if it is wrapped, sharded, offloaded or spread over devices; if another call is changing
            it; or if a copy of a patched layer, or a forward that somebody added later, would stay.
    """
    check_unwrapped(model, "unpatch the model")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model, and its adapter was trained on the positions that unpatching "
            "removes: take it off first with model = model.merge_and_unload(), or model.unload() (which drops it; for "
            "prompts model.get_base_model()), then unpatch what that returns"
        )
    if not isinstance(model, PreTrainedModel):
        raise NotPatchedError(f"this {type(model).__name__} is not patched")
    with alone(model, "unpatch the model") as patch:
        if patch is None:
            raise NotPatchedError(f"this {type(model).__name__} is not patched")
        if patch.undo is None:
            raise NotPatchedError(
                "this model was loaded from a patched checkpoint, which does not hold the stock positions: load the "
                "stock checkpoint"
            )
        check_in_place(model, "unpatch the model")
        _check_undone(model, patch)
        yield patch, patch.undo


def _check_undone(model: PreTrainedModel, patch: Patch) -> None:
    """Raise UnsupportedModelError if undoing a patch would leave copied layers, or forwards that somebody added."""
    patched_ids = {id(layer) for layer in patch.layers}
    for name, module in model.named_modules():
        if id(module) not in patched_ids and any(key.startswith(MARKER) for key in module._buffers):
            raise UnsupportedModelError(
                f"{name} is a copy of a patched layer, which cannot be unpatched: remove it first, or copy layers "
                "before the model is patched"
            )
        if isinstance(module, ReplacedAttention) and not has_own_forward(module):
            raise UnsupportedModelError(
                f"somebody has given {name} a forward of its own after the model was patched, and unpatching would "
                f"leave it: take it off ({TAKE_OFF}), then unpatch the model"
            )
