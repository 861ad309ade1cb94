"""Wrappers, shards, offloading and quantisation: find them in a model, and refuse those that prevent patching."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .weight_samples import is_packed, is_plain


def check_unwrapped(model: object, action: str) -> None:
    """Raise if a model is wrapped, or its parameters are spread over processes.

    Args:
        model: any module.
        action: what the caller is about to do, as in "patch the model".

    Raises:
        UnsupportedModelError: for DistributedDataParallel, DataParallel, FSDP (1 and 2) and DeepSpeed's ZeRO-3.
    """
    name = type(model).__name__
    engines = ("FullyShardedDataParallel", "DeepSpeedEngine")
    if isinstance(model, (DistributedDataParallel, DataParallel)) or name in engines:
        raise UnsupportedModelError(
            f"{name} has already registered the model's parameters: {action} first, wrap it afterwards (the model "
            "itself is its .module)"
        )
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UnsupportedModelError(
                f"the parameters of this {name} are spread over processes by FSDP: {action} before fully_shard or "
                "accelerator.prepare, or load what was saved in one process"
            )
    if isinstance(model, nn.Module) and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"the parameters of this {name} are spread over processes by DeepSpeed ZeRO-3: {action} before "
            "deepspeed.initialize or accelerator.prepare, on a model that was loaded whole (zero3_init_flag: false)"
        )


def check_in_place(model: nn.Module, action: str, *, one_device: bool = True) -> None:
    """Raise if hooks offload a model's weights or spread them over devices. Such hooks would miss new modules.

    Args:
        model: any module.
        action: what the caller is about to do, as in "patch the model".
        one_device: whether to refuse also weights that are spread over devices and stay there.

    Raises:
        UnsupportedModelError: for a model that accelerate or diffusers has offloaded or spread over devices.
    """
    devices = {str(hook.execution_device) for hook in _aligning(model) if hook.execution_device is not None}
    if is_offloaded(model) or len({parameter.is_meta for parameter in model.parameters()}) > 1:
        state = "offloaded: weights are elsewhere until their layer runs"
    elif any("_diffusers_hook" in module.__dict__ for module in model.modules()):
        state = "offloaded by hooks of diffusers"
    elif one_device and len(devices) > 1:
        state = f"spread over {', '.join(sorted(devices))}"
    else:
        return
    raise UnsupportedModelError(
        f"this {type(model).__name__} is {state}: {action} before dispatching. hf_posenc.from_pretrained(..., "
        "scheme=..., device_map=...) patches first; accelerate.hooks.remove_hook_from_module(model, recurse=True) "
        "takes hooks off and brings back weights that were offloaded to memory"
    )


def _aligning(model: nn.Module) -> list[AlignDevicesHook]:
    """Return accelerate's hooks in a model that move weights or inputs."""
    attached = [hook for module in model.modules() if (hook := module.__dict__.get("_hf_hook"))]
    return [single for hook in attached for single in _single(hook) if isinstance(single, AlignDevicesHook)]


def is_offloaded(model: nn.Module) -> bool:
    """Return whether accelerate keeps weights of a model elsewhere until their module runs."""
    return any(hook.offload for hook in _aligning(model))


@contextmanager
def brought_in(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Bring in the weights of a module for a `with` block, if accelerate has offloaded them.

    Args:
        model: a model, offloaded or not.
        module: a module of the model. Hooks of the modules that contain it may also move its weights.
    """
    path = next(name for name, candidate in model.named_modules() if candidate is module)
    containing = [owner for name, owner in model.named_modules() if not name or f"{path}.".startswith(f"{name}.")]
    with ExitStack() as stack:
        for owner in containing:
            if (hook := owner.__dict__.get("_hf_hook")) is not None:
                hook.pre_forward(owner)
                stack.callback(hook.post_forward, owner, None)
        yield


def check_unquantized(model: nn.Module, action: str) -> None:
    """Raise if a model's weights are quantised.

    Args:
        model: any module.
        action: what the caller is about to do, as in "calibrate the model".

    Raises:
        UnsupportedModelError: if transformers has quantised the model (bitsandbytes, GPTQ and others), or torchao or
            torch.ao in place.
    """
    packed = next((name for name, weight in model.named_parameters() if is_packed(weight)), packed_in_place(model))
    if packed is None and not getattr(model, "is_quantized", False):
        return
    where = "" if packed is None else f" ({packed} is packed)"
    raise UnsupportedModelError(
        f"the weights of this {type(model).__name__} are quantised{where}: {action} before that, save it, and load it "
        "quantised with hf_posenc.from_pretrained(..., quantization_config=...)"
    )


def packed_in_place(model: nn.Module) -> str | None:
    """Return the name of a weight that torchao, quanto or torch.ao has replaced in a live model, or None."""
    for name, weight in model.named_parameters():
        if not is_plain(weight.detach()):
            return name
    return next((name for name, module in model.named_modules() if hasattr(module, "_packed_params")), None)


def _single(hook: ModelHook) -> list[ModelHook]:
    """Return the hooks inside a SequentialHook, or the hook itself."""
    return [single for inner in hook.hooks for single in _single(inner)] if isinstance(hook, SequentialHook) else [hook]


def models_around(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models of transformers around a model without head, such as a multimodal model.

    A module does not refer to the module that contains it, so the garbage collector is asked for referrers.
    """
    if model.base_model is not model:  # a model with a head is whole
        return []
    outer_models: list[PreTrainedModel] = []
    level: list[nn.Module] = [model]
    while level:
        children_dicts = [referrer for referrer in gc.get_referrers(*level) if isinstance(referrer, dict)]
        candidates = (referrer for referrer in gc.get_referrers(*children_dicts) if isinstance(referrer, dict))
        attribute_dicts = [candidate for candidate in candidates if "_modules" in candidate]
        # A module's attributes are referred to by its __dict__, or by the module itself.
        referrers = (*gc.get_referrers(*children_dicts), *gc.get_referrers(*attribute_dicts))
        seen = {id(module) for module in (model, *outer_models, *level)}
        owners = [owner for owner in referrers if isinstance(owner, nn.Module) and id(owner) not in seen]
        level = [owner for owner in owners if any(child is model for child in owner.modules())]
        outer_models += [module for module in level if isinstance(module, PreTrainedModel)]
    return outer_models


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether FSDP or DeepSpeed's ZeRO-3 has spread a model's parameters over processes.

    Parameters that transformers itself has spread (`distributed_config`) do not count, because it can gather them.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return True
    if not dist.is_available() or (getattr(model, "fsdp_size", None) or 1) > 1:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


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
