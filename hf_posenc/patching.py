"""patch_model, unpatch_model, patched, describe: an adapter and a scheme become an undo log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from peft import PeftMixedModel, PeftModel
from torch import nn
from torch.distributed import is_available as distributed_is_available
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from . import surgery
from .call import Call
from .classes import PosEncMixin, config_class, entry_of, lacks_loss_type, model_class
from .engines.dispatch import Choice, choose
from .errors import AlreadyPatchedError, NotPatchedError, UnsupportedModelError
from .positions import Positions
from .registry import available_schemes, check_registered, scheme_class
from .schemes.base import PositionEmbedding, PositionModule, Scheme, ScoreScheme, Shared

Model = TypeVar("Model", bound=PreTrainedModel)


def parse_scheme(scheme: str | Scheme, hyperparameters: dict[str, Any]) -> Scheme:
    """Return a scheme from its name and hyper-parameters, or the instance itself.

    Raises:
        UnknownSchemeError: for a name or a class that is not registered; the message lists the names that are.
        TypeError: for unknown hyper-parameters, or any beside an instance.
        ValueError: for values out of range.
    """
    if isinstance(scheme, Scheme):
        check_registered(type(scheme))
        if hyperparameters:
            raise TypeError(f"hyper-parameters {', '.join(hyperparameters)} were given beside a {scheme.name} instance")
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f"scheme must be a Scheme or one of the names {', '.join(available_schemes())}, not {scheme!r}")
    return scheme_class(scheme).parse(hyperparameters)


def patch_of(model: nn.Module) -> surgery.Patch | None:
    """Return what is known of a patched model, also below an adapter of PEFT, or None for a stock one."""
    model = without_adapter(model)
    return getattr(model, "base_model", model).__dict__.get("_posenc_patch")


def without_adapter(model: Any) -> Any:
    """Return the model that PEFT has wrapped, with the adapter's layers inside; any other model as it is."""
    if isinstance(model, PeftMixedModel):
        return model.base_model.model
    return model.get_base_model() if isinstance(model, PeftModel) else model


def check_unwrapped(model: Any, action: str) -> None:
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
    if distributed_is_available():
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
    hooks = [hook for module in model.modules() if (own := module.__dict__.get("_hf_hook")) for hook in _single(own)]
    aligned = [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]
    devices = {str(hook.execution_device) for hook in aligned if hook.execution_device is not None}
    if any(hook.offload for hook in aligned) or len({parameter.is_meta for parameter in model.parameters()}) > 1:
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


def _single(hook: Any) -> list[Any]:
    return [each for part in hook.hooks for each in _single(part)] if isinstance(hook, SequentialHook) else [hook]


def patch_model(
    model: Model, scheme: str | Scheme, *, attention: str = "auto", seed: int | None = None, **hyperparameters: Any
) -> Model:
    """Replace a model's position handling, in place.

    Everything is checked before anything is changed, and a failure half-way leaves the model as it was. New parameters
    take the dtype and device of the layer they sit on.

    Args:
        model: a stock transformers model of a supported family, with or without a head.
        scheme: a name (`available_schemes()`) or a `Scheme` instance.
        attention: engine for schemes that change attention scores: `auto`, or one of
            `hf_posenc.engines.dispatch.NAMES`, which then computes every call or refuses it.
        seed: for new parameters that start at random; None draws from torch's generator.
        **hyperparameters: of the scheme, see its class.

    Returns:
        The model itself.

    Raises:
        UnknownSchemeError: if there is no such scheme, or the class of an instance is not registered.
        UnsupportedModelError: if the model, a setting of it or its attention backend cannot carry the scheme, or
            somebody has replaced the forward that would have to carry it; if it is wrapped, sharded, offloaded or
            spread over devices.
        AlreadyPatchedError: if the model, or another one that has a layer in common with it, is patched;
            `unpatch_model` that first.
        TypeError: for wrong hyper-parameters.
        ValueError: for hyper-parameters out of range, or an unknown `attention`.
    """
    wanted = parse_scheme(scheme, hyperparameters)
    _check_model(model)
    if seed is not None and not isinstance(seed, int):
        raise TypeError(f"seed must be an integer or None, not {seed!r}")
    config = model.config
    plan, native = surgery.resolved(surgery.make_plan(model, wanted, attention), config)
    surgery.check_forwards(plan)
    device = next(model.parameters()).device

    undo = surgery.Undo()
    try:
        # Whatever the caller's default device is; new rotations of a model on the meta device have values all the same.
        with torch.device("cpu" if device.type == "meta" else device):
            owners = surgery.operate(undo, plan, config)
            _initialize(owners, native, seed, model)
        _rename(undo, model, plan.scheme)
        surgery.set_attribute(
            undo, model.base_model, "_posenc_patch", surgery.Patch(plan.scheme, attention, undo, plan.found.layers)
        )
    except BaseException:
        undo.roll_back()
        raise
    return model


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
    if patch_of(model) is not None or isinstance(model, PosEncMixin):
        name = "another scheme" if (patch := patch_of(model)) is None else patch.scheme.name
        raise AlreadyPatchedError(f"this {type(model).__name__} is patched with {name}; unpatch_model(model) first")
    for name, module in model.named_modules():
        if any(key.startswith(surgery.MARKER) for key in module._buffers):
            raise AlreadyPatchedError(
                f"{name} of this {type(model).__name__} is a layer of another model that is patched, or a copy of one: "
                "unpatch that model first, or take the layer of a stock model"
            )
    check_in_place(model, "patch the model")


def _initialize(owners: list[PositionModule], native: Any, seed: int | None, model: PreTrainedModel) -> None:
    """Start new parameters and move them to where their layer is."""
    with torch.no_grad(), surgery.seeded(seed):
        for owner in owners:
            place = _layer_parameter(model, owner)
            owner.to(device=place.device, dtype=place.dtype)
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


def _rename(undo: surgery.Undo, model: PreTrainedModel, scheme: Scheme) -> None:
    """Give model and config our own types, so that what they save cannot be taken for a stock checkpoint."""
    config = model.config
    surgery.set_class(undo, config, config_class(type(config)))
    surgery.set_attribute(undo, config, "position_encoding", entry_of(scheme))
    for module in [m for m in model.modules() if isinstance(m, PreTrainedModel)]:
        surgery.set_class(undo, module, model_class(type(module)))
    surgery.set_attribute(undo, config, "architectures", [type(model).__name__])
    if lacks_loss_type(model):
        surgery.set_attribute(undo, model, "loss_type", "ForCausalLM")
    # PEFT writes this into adapters as their base; the stock checkpoint would be the wrong one.
    surgery.set_attribute(undo, model, "name_or_path", "")
    surgery.set_attribute(undo, config, "_name_or_path", "")


def unpatch_model(model: Model) -> Model:
    """Undo `patch_model`: modules, classes, config, hooks and attributes are what they were.

    Stock parameters that were trained in between keep their new values; the scheme's parameters are dropped.

    Args:
        model: a patched model.

    Returns:
        The model itself.

    Raises:
        NotPatchedError: if it is not patched, or was loaded from a patched checkpoint, which does not hold the stock
            positions.
        UnsupportedModelError: if it is wrapped (DistributedDataParallel), sharded (FSDP), offloaded or spread over
            devices, has copies of layers that were made after it was patched, or if somebody has replaced a forward
            that would have to be taken away.
    """
    check_unwrapped(model, "unpatch the model")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model, and its adapter was trained on the positions that would go: take "
            "it off first with model = model.merge_and_unload(), or model.unload() (which drops it; for prompts "
            "model.get_base_model()), then unpatch what that returns"
        )
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
        if id(module) not in known and any(key.startswith(surgery.MARKER) for key in module._buffers):
            raise UnsupportedModelError(
                f"{name} is a copy of a patched layer, which cannot be unpatched: remove it first, or copy layers "
                "before the model is patched"
            )

    check_in_place(model, "unpatch the model")
    surgery.check_class_undone(model)
    patch.undo.roll_back()
    return model


@contextmanager
def patched(model: Model, scheme: str | Scheme, **arguments: Any) -> Iterator[Model]:
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


def describe(model: PreTrainedModel) -> str:
    """Return a few readable lines: scheme, hyper-parameters, where it acts, attention, limit.

    Args:
        model: patched or stock; of one that PEFT has wrapped, what is inside.

    Raises:
        UnsupportedModelError: for a stock model of a family without adapter, and for one that is wrapped
            (DistributedDataParallel) or sharded (FSDP).
    """
    check_unwrapped(model, "describe the model")
    model = without_adapter(model)
    patch = patch_of(model)
    family = surgery.base_model_type(model.config)
    if patch is None:
        surgery.adapter_for(family)
        return f"{type(model).__name__} ({family}): stock positions, attention {model.config._attn_implementation}"
    scheme = patch.scheme
    values = ", ".join(f"{key}={value!r}" for key, value in scheme.hyperparameters().items())
    parameters = [(n, p) for n, p in model.named_parameters() if _owned(model, n)]
    acts = {
        "none": "nowhere (the causal mask is the only order)",
        "embedding": "on the hidden states, " + str(getattr(scheme, "placement", "")).replace("_", " "),
        "rotary": "on queries and keys",
        "score": "on attention scores",
    }[scheme.kind]
    engine = patch.attention if scheme.kind == "score" else model.config._attn_implementation
    return "\n".join(
        [
            f"{type(model).__name__} ({family}): {scheme.name}({values})",
            f"  acts        {acts}",
            f"  attention   {engine}",
            f"  positions   {'no limit' if scheme.limit is None else scheme.limit}",
            f"  parameters  {sum(p.numel() for _, p in parameters):,} in {len(parameters)} tensors",
        ]
    )


def which_engine(
    model: PreTrainedModel,
    length: int,
    *,
    keys: int | None = None,
    dtype: torch.dtype | None = None,
    dropout: float = 0.0,
    weights: bool = False,
) -> Choice:
    """Say what computes attention in a patched model, and why that: for calls without padding, on the model's device.

    On a GPU the answer may take seconds: FlexAttention is compiled and tried before it is said to be used.

    Args:
        model: patched, also below an adapter of PEFT.
        length: number of queries.
        keys: number of keys, with what is cached, and then without gradients; None means `length`.
        dtype: of queries and keys; None means the model's.
        dropout: probability that an attention weight is dropped.
        weights: whether the attention weights are wanted.

    Returns:
        The engine's name and the reason. A scheme that keeps the model's own attention answers with that.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if it is wrapped (DistributedDataParallel) or sharded (FSDP).
        ValueError: if there is no such call, or the engine that was asked for when patching cannot compute it.
    """
    check_unwrapped(model, "ask for the engine")
    model = without_adapter(model)
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched")
    if length < 1 or (keys is not None and keys < length) or not 0 <= dropout < 1:
        raise ValueError(
            f"there is no call of {length} queries, {keys} keys and dropout {dropout}: length must be at least 1, keys "
            "at least length, dropout at least 0 and below 1"
        )
    own = str(model.config._attn_implementation)
    if not isinstance(patch.scheme, ScoreScheme):
        return Choice(own, f"{patch.scheme.name} keeps the model's own attention")
    plan = surgery.make_plan(model, patch.scheme, patch.attention)
    attention, dims = plan.found.attentions[0], plan.dims
    place = next(model.parameters()).device
    like = torch.empty(0, dtype=dtype or model.dtype, device=place)
    query = like.new_empty(()).expand(1, dims.num_heads, length, dims.head_dim)
    key = like.new_empty(()).expand(1, dims.num_key_value_heads, keys or length, dims.head_dim)
    module = attention.posenc.owner() if isinstance(attention.posenc, Shared) else attention.posenc
    cached = keys is not None and keys > length  # as in generation, which takes no gradients
    with torch.set_grad_enabled(torch.is_grad_enabled() and not cached):
        call = Call(
            query,
            key,
            key,
            Positions.causal(length, keys or length, place),
            scaling=attention.scaling,
            softcap=getattr(model.config, "attn_logit_softcapping", None),
            dropout=dropout,
            weights=weights,
            module=module,
            form=module.form(query),
        )
        return choose(patch.attention, call)


def _owned(model: nn.Module, parameter: str) -> bool:
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), PositionModule)
