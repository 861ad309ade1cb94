"""Wrappers, shards, offloading and quantisation: find them in a model, and refuse those that prevent patching."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from ..core.errors import AlreadyPatchedError, NotPatchedError, UnsupportedModelError
from ..core.layer_state import MARKER
from ..transformers_glue.replaced_attention import ReplacedAttention
from .patch_record import OfPatched, Patch, alone, is_packed, without_adapter
from .undo import Absent, Change, SetAttribute, Undo, has_own_forward

TAKE_OFF = "accelerate.hooks.remove_hook_from_module(model, recurse=True), or del attention.forward"
"""How to take a replaced forward off an attention."""


def check_unwrapped(model: object, action: str, *, in_place: bool = True, one_device: bool = True) -> None:
    """Raise if an object is no model of transformers, or a wrapped one, or its parameters are elsewhere.

    Args:
        model: any object. PEFT may be around a model.
        action: what the caller is about to do, as in "patch the model".
        in_place: whether to refuse also hooks that offload weights or spread them over devices. They would miss new
            modules.
        one_device: whether that includes weights that are spread over devices and stay there.

    Raises:
        UnsupportedModelError: for DistributedDataParallel, DataParallel, FSDP (1 and 2), DeepSpeed's ZeRO-3, a model
            that accelerate or diffusers has offloaded or spread over devices, and whatever is no model. The message
            says how to get at one.
    """
    name = type(model).__name__
    engines = ("FullyShardedDataParallel", "DeepSpeedEngine")
    if isinstance(model, (DistributedDataParallel, DataParallel)) or name in engines:
        raise UnsupportedModelError(
            f"{name} has already registered the model's parameters: {action} first, wrap it afterwards (the model "
            "itself is its .module)"
        )
    if isinstance(model, nn.Module):
        if (spread := _spread_by(model)) is not None:
            raise UnsupportedModelError(
                f"the parameters of this {name} are spread over processes by {spread}: {action} before fully_shard, "
                "deepspeed.initialize or accelerator.prepare, on a model that was loaded whole (zero3_init_flag: false)"
            )
        if in_place and (state := _elsewhere(model, one_device)) is not None:
            raise UnsupportedModelError(
                f"this {name} is {state}: {action} before dispatching, as hf_posenc.from_pretrained(..., scheme=..., "
                "device_map=...) does, or after accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )
    if not _is_model(model):
        raise UnsupportedModelError(f"a transformers PreTrainedModel is needed, not {name}{_instead(model, action)}")


def _elsewhere(model: nn.Module, one_device: bool) -> str | None:
    """Return where hooks have put weights of a model, or None; see `check_unwrapped`."""
    found = [hook for module in model.modules() if (hook := module.__dict__.get("_hf_hook"))]
    for hook in found:  # the list grows
        found += hook.hooks if isinstance(hook, SequentialHook) else ()
    hooks = [hook for hook in found if isinstance(hook, AlignDevicesHook)]  # accelerate's, that move weights or inputs
    devices = {str(hook.execution_device) for hook in hooks if hook.execution_device is not None}
    if any(hook.offload for hook in hooks) or len({parameter.is_meta for parameter in model.parameters()}) > 1:
        return "offloaded: weights are elsewhere until their layer runs"
    if any("_diffusers_hook" in module.__dict__ for module in model.modules()):
        return "offloaded by hooks of diffusers"
    return f"spread over {', '.join(sorted(devices))}" if one_device and len(devices) > 1 else None


def _spread_by(model: nn.Module) -> str | None:
    """Return the name of what has spread a model's parameters over processes, or None."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "DeepSpeed ZeRO-3"
    # By name, because FSDP takes long to import.
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return "FSDP" if "FSDPModule" in classes else None


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether FSDP or DeepSpeed's ZeRO-3 has spread a model's parameters over processes.

    Parameters that transformers itself has spread (`distributed_config`) do not count, because it can gather them.
    """
    spread = _spread_by(model)
    return spread is not None and (spread != "FSDP" or (getattr(model, "fsdp_size", None) or 1) == 1)


def _is_model(candidate: object) -> bool:
    return isinstance(without_adapter(candidate), PreTrainedModel)


def _instead(wrong: object, action: str) -> str:
    """Return what to do with an object that is no model, as the end of a message; empty if nobody knows."""
    if isinstance(wrong, (str, os.PathLike)):
        return (
            f": load {str(wrong)!r} first, with AutoModelForCausalLM.from_pretrained, or with hf_posenc.from_pretrained"
            ' if it is patched (hf_posenc.from_pretrained(..., scheme="alibi") loads and patches at once)'
        )
    if isinstance(wrong, (PreTrainedConfig, type)):
        return ": make a model first, with its from_pretrained or AutoModelForCausalLM.from_config"
    names = ("_orig_mod", "model", "module")  # of torch.compile's wrapper, a pipeline or Trainer, and other wrappers
    inside = next((name for name in names if _is_model(getattr(wrong, name, None))), None)
    return "" if inside is None else f": {action} first, wrap it afterwards (the model itself is its .{inside})"


def check_unquantized(model: nn.Module, action: str) -> None:
    """Raise if a model's weights are quantised.

    Args:
        model: any module.
        action: what the caller is about to do, as in "calibrate the model".

    Raises:
        UnsupportedModelError: if transformers has quantised the model (bitsandbytes, GPTQ and others), or torchao or
            torch.ao in place.
    """
    is_gguf = getattr(model, "quantization_method", None) == QuantizationMethod.GGUF
    packed = _packed(model)
    if packed is None and (is_gguf or not getattr(model, "is_quantized", False)):
        return
    instead = f"{action} before that, save it, and load it with hf_posenc.from_pretrained(..., quantization_config=...)"
    if is_gguf:
        instead = f"to {action}, load the file with quantization_config=transformers.GgufConfig(dequantize=True)"
    where = "" if packed is None else f" ({packed} is packed)"
    raise UnsupportedModelError(f"the weights of this {type(model).__name__} are quantised{where}: {instead}")


def dense(model: nn.Module) -> list[Change]:
    """Return the changes after which a model from an unpacked GGUF file does not call itself quantised.

    transformers leaves the quantizer that unpacked the file on the model, and then refuses to save or train it. Models
    of other quantizers need theirs even with dense weights: BitNet's layers round them as they compute.
    """
    if getattr(model, "quantization_method", None) != QuantizationMethod.GGUF or _packed(model) is not None:
        return []
    names = ("hf_quantizer", "is_quantized", "quantization_method")
    removed: list[Change] = [SetAttribute(model, name, Absent) for name in names]
    return [*removed, SetAttribute(model.config, "quantization_config", Absent)]


def _packed(model: nn.Module) -> str | None:
    """Return the name of a packed weight or module, or None. Some quantizers of transformers pack into buffers."""
    weights = dict(model.named_parameters())
    if getattr(model, "is_quantized", False):
        weights |= {name: weight for name, weight in model.state_dict().items() if weight.ndim > 1}
    packed = [name for name, weight in weights.items() if is_packed(weight)]
    packed += [name for name, module in model.named_modules() if hasattr(module, "_packed_params")]  # torch.ao's
    return packed[0] if packed else None


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather parameters that DeepSpeed's zero.Init has spread over processes, and spread them again afterwards.

    Args:
        module: the module with these parameters, on every process. The values that the first process writes stay.
    """
    spread = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not spread:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(spread, modifier_rank=0):
        yield


OF_ADAPTER = {
    "patch": (
        ": patch the base model first, then add the adapter with hf_posenc.lora_config(model), or "
        'LoraConfig(task_type="CAUSAL_LM", modules_to_save=["posenc"])'
    ),
    "unpatch": (
        ", whose adapter was trained on these positions: unpatch what model.merge_and_unload() returns, or "
        "model.unload() (which drops the adapter; of prompts get_base_model())"
    ),
}
"""What to do with a model that PEFT wraps, as the end of a message."""


@contextmanager
def to_be_changed(model: PreTrainedModel, how: Literal["patch", "unpatch"]) -> Iterator[Patch | None]:
    """Check that a model can be patched or unpatched, and keep other calls from changing it for a `with` block.

    Yields:
        The record of its patch; None for a model that can be patched.

    Raises:
        AlreadyPatchedError: if the model is to be patched and is patched, or another patched model shares a layer or
            the config with it.
        UnsupportedModelError: if it is wrapped, sharded, offloaded or spread over devices, or if another call is
            changing it.
    """
    action, this = f"{how} the model", f"this {type(model).__name__}"
    check_unwrapped(model, action)
    if without_adapter(model) is not model:
        raise UnsupportedModelError(f"{type(model).__name__} wraps the model{OF_ADAPTER[how]}")
    with alone(model, action) as patch:
        if how == "patch":
            if patch is not None or isinstance(model, OfPatched):
                name = "another scheme" if patch is None else patch.name
                raise AlreadyPatchedError(f"{this} is patched with {name}; unpatch_model(model) first")
            if isinstance(model.config, OfPatched):
                raise AlreadyPatchedError(
                    f"{this} shares its config object with a patched model: make each model from a config of its own, "
                    "copy.deepcopy(config)"
                )
            if marked := _marked(model, ()):
                raise AlreadyPatchedError(
                    f"{marked[0]} of {this} is a layer of another patched model, or a copy of such a layer: unpatch "
                    "that model first, or take the layer of a stock model"
                )
        yield patch


def _marked(model: nn.Module, known: Sequence[nn.Module]) -> list[str]:
    """Return the names of the modules that a patch has marked, but for the known ones."""
    others = ((name, module) for name, module in model.named_modules() if module not in known)
    return [name for name, module in others for buffer in module._buffers if buffer.startswith(MARKER)]


def check_undone(model: PreTrainedModel, patch: Patch | None) -> tuple[Patch, Undo]:
    """Return the record of a patch, and its inverse steps.

    Raises:
        NotPatchedError: if the model is not patched, or was loaded from a patched checkpoint.
        UnsupportedModelError: if they would leave a copy of a patched layer, or a forward that somebody added later.
    """
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched")
    if patch.undo is None:
        raise NotPatchedError("a patched checkpoint does not hold the stock positions: load the stock checkpoint")
    if copies := _marked(model, patch.layers):
        raise UnsupportedModelError(
            f"{copies[0]} is a copy of a patched layer, which cannot be unpatched: remove it first, or copy layers "
            "before the model is patched"
        )
    for name, module in model.named_modules():
        if isinstance(module, ReplacedAttention) and not has_own_forward(module):
            raise UnsupportedModelError(
                f"somebody has given {name} a forward of its own after the model was patched, and unpatching would "
                f"leave it: take it off ({TAKE_OFF}), then unpatch the model"
            )
    return patch, patch.undo
