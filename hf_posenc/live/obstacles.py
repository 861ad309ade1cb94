"""Wrappers, shards, offloading and quantisation of a model, which of them prevent patching, and models around it."""

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
    """Raise unless a model is whole and itself: no wrapper around it, no parameters spread over processes.

    Args:
        model: any module.
        action: what cannot be done with it otherwise, as in "patch the model".

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
    """Raise unless a model's weights are all there, on one device: hooks that move them know the modules of one moment.

    Args:
        model: any module.
        action: what cannot be done with it otherwise, as in "patch the model".
        one_device: refuse also what is spread over devices and stays there.

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
        "takes hooks off and brings back the weights that were offloaded from memory"
    )


def _aligning(model: nn.Module) -> list[AlignDevicesHook]:
    """Return accelerate's hooks in a model that move weights or inputs."""
    hooks = [hook for module in model.modules() if (own := module.__dict__.get("_hf_hook")) for hook in _single(own)]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def is_offloaded(model: nn.Module) -> bool:
    """Return whether accelerate keeps weights of a model elsewhere until their module runs."""
    return any(hook.offload for hook in _aligning(model))


@contextmanager
def brought_in(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Bring in the weights of a module for the length of a `with` block, where accelerate has offloaded them.

    Args:
        model: offloaded or not.
        module: a part of it; the hook of a module around it may move its weights.
    """
    name = next(name for name, each in model.named_modules() if each is module)
    around = [each for prefix, each in model.named_modules() if not prefix or f"{name}.".startswith(f"{prefix}.")]
    with ExitStack() as stack:
        for each in around:
            if (hook := each.__dict__.get("_hf_hook")) is not None:
                hook.pre_forward(each)
                stack.callback(hook.post_forward, each, None)
        yield


def check_unquantized(model: nn.Module, action: str) -> None:
    """Raise unless a model's weights are the numbers that it computes with.

    Args:
        model: any module.
        action: what cannot be done with it otherwise, as in "calibrate the model".

    Raises:
        UnsupportedModelError: for a model that was quantised, by transformers (bitsandbytes, GPTQ and all others) or in
            place (torchao, torch.ao).
    """
    packed = next((name for name, weight in model.named_parameters() if is_packed(weight)), packed_in_place(model))
    if packed is None and not getattr(model, "is_quantized", False):
        return
    where = "" if packed is None else f" ({packed} is one that is packed)"
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
    return [each for part in hook.hooks for each in _single(part)] if isinstance(hook, SequentialHook) else [hook]


def models_around(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models of transformers that a bare model is a part of, such as a multimodal one around its decoder.

    Nothing in a module leads to what is around it, so that the garbage collector is asked.
    """
    if model.base_model is not model:  # with a head it is whole
        return []
    found: list[PreTrainedModel] = []
    inner: list[nn.Module] = [model]
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


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether FSDP or DeepSpeed's ZeRO-3 has spread a model's parameters over processes.

    Parameters that transformers itself has spread (`distributed_config`) do not count: it can gather them.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return True
    if not dist.is_available() or (getattr(model, "fsdp_size", None) or 1) > 1:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Make parameters whole that DeepSpeed's zero.Init has spread over processes, and spread them again.

    Args:
        module: on every process; what the first one writes is what stays.
    """
    spread = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not spread:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(spread, modifier_rank=0):
        yield
