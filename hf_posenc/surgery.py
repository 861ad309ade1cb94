"""Structural edits of a live model, each recorded with its inverse: adapter + scheme -> changed modules.

Nothing here belongs to one architecture (adapters do) or one formula (schemes do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .adapters.base import Adapter, Resolved, resolve
from .attention import (
    NAME,
    ORIGINAL_LENGTH,
    SPLIT_HEADS,
    IdentityRotary,
    RotaryAttention,
    check_engine,
    check_masks,
    check_scalings,
    make_rotary,
    own_rotation,
    rotary_class,
)
from .errors import UnsupportedModelError
from .registry import adapter_for
from .schemes.base import (
    Dims,
    EmbeddingScheme,
    Native,
    PositionEmbedding,
    PositionModule,
    Reference,
    Scheme,
    ScoreScheme,
    Shared,
)
from .schemes.rope import Rope, by_layer_type

UNLIMITED = 2**17
"""`max_position_embeddings` of a patched model whose scheme has no limit; `generate` caps its default length by it."""


MARKER = "hf_posenc_"
"""Start of the name of a buffer on every patched layer; the scheme's name follows. Nothing reads its value. What counts
is the key in the state dict, which a model with other positions does not know (without it the weights of a model whose
scheme has no parameters would load into the stock model), and that a layer which was added later has none."""


TAKE_OFF = (
    "hooks of accelerate: accelerate.hooks.remove_hook_from_module(model, recurse=True); a wrapper or a compiled "
    "forward: del attention.forward"
)


class Undo:
    """Inverse steps, newest first. Each is recorded before its step is taken, and undoes nothing if it was not.

    A list of (function, arguments) rather than an ExitStack: `deepcopy` and `pickle` follow arguments, so that a copied
    model undoes its own changes and not those of the model it was copied from. Closures would not.
    """

    def __init__(self) -> None:
        """Start with nothing to undo."""
        self.steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def add(self, step: Callable[..., None], *arguments: Any) -> None:
        """Record a step: a module-level function and its arguments."""
        self.steps.append((step, arguments))

    def roll_back(self) -> None:
        """Undo everything."""
        while self.steps:
            step, arguments = self.steps.pop()
            step(*arguments)


@dataclass
class Patch:
    """What is known of a patched model, kept as a plain attribute of its base model.

    Attributes:
        scheme: as resolved against the model.
        attention: `auto` or an engine's name.
        undo: the inverse steps; None for a model that was loaded patched, whose stock positions are gone.
        layers: the decoder layers that were patched, which need not be those that the model has now.
    """

    scheme: Scheme
    attention: str
    undo: Undo | None
    layers: list[nn.Module] = field(default_factory=list)


def set_module(undo: Undo, owner: nn.Module, name: str, module: nn.Module) -> None:
    """Set or replace a sub-module."""
    undo.add(_restore_module, owner, name, owner._modules.get(name), _home(owner), owner.training)
    owner.add_module(name, module)


def _home(owner: nn.Module) -> torch.dtype | None:
    parameter = next(owner.parameters(), None)
    return None if parameter is None else parameter.dtype


def _restore_module(
    owner: nn.Module, name: str, module: nn.Module | None, dtype: torch.dtype | None, training: bool
) -> None:
    if module is None:
        owner._modules.pop(name, None)
        return
    # The module was kept aside while the model may have been moved or cast.
    parameter = next(owner.parameters(), None)
    if parameter is not None and not parameter.is_meta:
        module.to(parameter.device)
        if parameter.dtype != dtype:
            for tensor in module.parameters():
                tensor.data = tensor.data.to(parameter.dtype)
    if owner.training != training:
        module.train(owner.training)
    owner._modules[name] = module


@dataclass(frozen=True)
class PatchedLayers:
    """What every decoder layer of a patched model must carry, checked at each forward pass and when saving.

    Layers can be dropped, copied and appended after a model was patched, and a layer without its share of the scheme
    would run without positions and say nothing. Attributes are read through whatever wraps a layer (FSDP, activation
    checkpointing, regional compilation): those wrappers hand unknown names on.

    Attributes:
        layers: from the decoder to its list of layers.
        attention: from a layer to its attention.
        marker: name of the buffer that every patched layer has.
        on_attention: attribute that every attention must have, or None.
        on_layer: whether every layer must own a position module.
        on_first_layer: whether the first layer, and no other, must own one.
    """

    layers: str
    attention: str
    marker: str
    on_attention: str | None = None
    on_layer: bool = False
    on_first_layer: bool = False

    def problem(self, decoder: nn.Module) -> str | None:
        """Return what is wrong with the layers that a decoder has now, and what to do, or None."""
        again = "unpatch the model, change its layers, then patch it again"
        layers: Any = decoder.get_submodule(self.layers)
        for index, layer in enumerate(layers):
            attention = layer
            for name in self.attention.split("."):
                attention = getattr(attention, name)
            if not hasattr(layer, self.marker) or (self.on_attention and not hasattr(attention, self.on_attention)):
                return (
                    f"layer {index} of {type(decoder).__name__} is not patched, though the model is: it was added or "
                    f"changed afterwards. Append copies of patched layers (copy.deepcopy) instead, or {again}"
                )
            if self.on_layer and not hasattr(layer, "posenc"):
                return f"layer {index} of {type(decoder).__name__} lost its position vectors: {again}"
            if self.on_first_layer and hasattr(layer, "posenc") != (index == 0):
                return (
                    f"layer {index} of {type(decoder).__name__} is {'no longer' if index == 0 else 'a copy of'} the "
                    f"first layer, which adds the position vectors to the hidden states: {again}"
                )
        return None


def mark_layers(undo: Undo, plan: Plan) -> None:
    """Register the buffer that names the scheme on every layer, and have the decoder check them."""
    scheme, adapter, found = plan.scheme, plan.adapter, plan.found
    name = MARKER + scheme.name
    for layer in found.layers:
        undo.add(_remove_buffer, layer, name)
        device = next(layer.parameters()).device
        layer.register_buffer(name, torch.zeros(1, dtype=torch.uint8, device=device))
    every_layer = isinstance(scheme, EmbeddingScheme) and scheme.place()[0]
    at_input = isinstance(scheme, EmbeddingScheme) and not every_layer
    on_attention = None
    if isinstance(scheme, ScoreScheme):
        on_attention = "posenc"
    elif isinstance(scheme, Rope) and found.rotary is None:
        on_attention = "posenc_rotary"
    layers = PatchedLayers(
        adapter.layers,
        adapter.attention,
        name,
        on_attention=on_attention,
        on_layer=every_layer,
        on_first_layer=at_input and found.position_table is None,
    )
    set_attribute(undo, found.decoder, "posenc_layers", layers)
    add_pre_hook(undo, found.decoder, require_patched_layers)


def require_patched_layers(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a patched decoder: refuses to run with layers that lack their share of the scheme."""
    if (problem := decoder.posenc_layers.problem(decoder)) is not None:
        raise UnsupportedModelError(problem)


def _remove_buffer(layer: nn.Module, name: str) -> None:
    layer._buffers.pop(name, None)


def set_attribute(undo: Undo, owner: Any, name: str, value: Any) -> None:
    """Set or replace a plain attribute of a module or config."""
    if name in owner.__dict__:
        undo.add(_restore_attribute, owner, name, owner.__dict__[name])
    else:
        undo.add(_remove_attribute, owner, name)
    object.__setattr__(owner, name, value)


def _restore_attribute(owner: Any, name: str, value: Any) -> None:
    object.__setattr__(owner, name, value)


def _remove_attribute(owner: Any, name: str) -> None:
    owner.__dict__.pop(name, None)


def set_class(undo: Undo, owner: Any, cls: type) -> None:
    """Change the class of an object."""
    if "forward" in owner.__dict__ and has_own_forward(owner):
        # A bound method that stood for nothing (accelerate leaves one when its hook is removed) would keep the old one.
        undo.add(_restore_attribute, owner, "forward", owner.__dict__["forward"])
        del owner.__dict__["forward"]
    undo.add(_restore_class, owner, type(owner))
    owner.__class__ = cls


def _restore_class(owner: Any, cls: type) -> None:
    if has_own_forward(owner):
        owner.__dict__.pop("forward", None)
    owner.__class__ = cls


def has_own_forward(module: Any) -> bool:
    """Return whether a module runs the forward of its class, and no other that was put on the instance."""
    forward = module.__dict__.get("forward")
    return forward is None or (
        getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    )


def check_forwards(plan: Plan) -> None:
    """Check that the scheme would not be bypassed by a forward that somebody put on an attention.

    Raises:
        UnsupportedModelError: if it would; the message says what to do.
    """
    rotating = isinstance(plan.scheme, Rope) and plan.found.rotary is None  # changes the class of each attention
    if not rotating and not isinstance(plan.scheme, ScoreScheme):
        return
    for index, attention in enumerate(plan.found.attentions):
        hooked = has_own_forward(attention)
        if not hooked and not rotating and "_hf_hook" in attention.__dict__:  # accelerate's hook calls what it replaced
            behind = attention.__dict__.get("_old_forward")
            hooked = getattr(behind, "__func__", None) is type(attention).forward
        if not hooked:
            raise UnsupportedModelError(
                f"the attention of layer {index} has a forward of its own ({attention.__dict__['forward']!r:.80}), "
                f"which {plan.scheme.name} would not reach: take it off ({TAKE_OFF}), patch the model, and put it on "
                "again"
            )


def check_class_undone(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a forward was put on an attention whose class is to be changed back."""
    for name, module in model.named_modules():
        if isinstance(module, RotaryAttention) and not has_own_forward(module):
            raise UnsupportedModelError(
                f"{name} was given a forward of its own after the model was patched, which would go on rotating: take "
                f"it off ({TAKE_OFF}), then unpatch the model"
            )


def add_pre_hook(undo: Undo, owner: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook that sees keyword arguments."""
    undo.add(_remove_pre_hook, owner, hook)
    owner.register_forward_pre_hook(hook, with_kwargs=True)


def _remove_pre_hook(owner: nn.Module, hook: Callable[..., Any]) -> None:
    for number in [number for number, registered in owner._forward_pre_hooks.items() if registered is hook]:
        del owner._forward_pre_hooks[number]
        owner._forward_pre_hooks_with_kwargs.pop(number, None)


class NoEmbedding(PositionEmbedding):
    """Stands in for a base's own table of positions: adds nothing."""

    def __init__(self, size: int) -> None:
        """Return vectors of this size.

        Args:
            size: E.
        """
        super().__init__()
        self.size = size

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return zeros (B|1, T, E) that take no memory."""
        return torch.zeros(1, device=position_ids.device).expand(*position_ids.shape, self.size)


def add_positions(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a decoder layer: adds the vectors of `layer.posenc` to the hidden states."""
    hidden_states = args[0] if args else kwargs["hidden_states"]
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        raise ValueError("position_ids did not arrive at the decoder layer, so no position vectors can be added")
    hidden_states = hidden_states + layer.posenc(position_ids).to(hidden_states)
    return ((hidden_states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden_states})


def require_attention(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a decoder whose scheme needs our attention function: refuses what would go wrong there."""
    if decoder.config._attn_implementation != NAME:
        raise ValueError(
            f"the config says attention {decoder.config._attn_implementation!r}, which was set behind the patch, so "
            f"the scheme would be ignored: set it back to {NAME!r}, or unpatch the model"
        )
    check_masks((*args, *kwargs.values()))


@dataclass(frozen=True)
class Plan:
    """Everything that was found out and checked before the model is changed."""

    scheme: Scheme
    adapter: Adapter
    found: Resolved
    dims: Dims
    attention: str


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that owns the layers of a model of a known family."""
    decoder = adapter_for(base_model_type(model.config)).decoder
    return model.base_model.get_submodule(decoder)


def base_model_type(config: Any) -> str:
    """Return the stock model type of a config, also of one of our own (`posenc_gpt2` -> `gpt2`)."""
    return str(config.model_type).removeprefix("posenc_")


def make_plan(model: PreTrainedModel, scheme: Scheme, attention: str) -> Plan:
    """Check that the scheme can be carried by the model; changes nothing.

    Args:
        model: a stock model, with or without head.
        scheme: what to put in.
        attention: `auto` or an engine's name.

    Returns:
        The plan.

    Raises:
        UnsupportedModelError: if the model or one of its settings cannot carry the scheme.
        ValueError: if the hyper-parameters do not fit the model.
    """
    config = model.config
    adapter = adapter_for(base_model_type(config))
    found = resolve(adapter, model)
    first = found.attentions[0]
    dims = Dims(
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=first.head_dim if hasattr(first, "head_dim") else first.head_size,
        hidden_size=config.hidden_size,
        num_layers=len(found.layers),
    )
    check_engine(attention)
    if isinstance(scheme, ScoreScheme):
        scheme.check(dims)
        if (model.tp_size or 1) > 1:
            raise UnsupportedModelError(f"{scheme.name}: {SPLIT_HEADS}")
        backend = config._attn_implementation or "eager"
        if "flash" in backend or "paged" in backend:
            raise UnsupportedModelError(
                f"{scheme.name} changes attention scores, which {backend} cannot carry: load the model with "
                'attn_implementation="sdpa" or "eager" first'
            )
    elif attention != "auto":
        raise ValueError(
            f"{scheme.name} keeps the model's own attention; attention={attention!r} can be chosen for schemes "
            "that change "
            "scores only"
        )
    if isinstance(scheme, Rope):
        scheme = _rope_of(scheme, adapter, found, dims, config)
    return Plan(scheme, adapter, found, dims, attention)


def _rope_of(scheme: Rope, adapter: Adapter, found: Resolved, dims: Dims, config: Any) -> Rope:
    """Return the scheme with all that was not given taken from the base, once transformers can compute it."""
    if adapter.rotary is not None and scheme.layout == "interleaved":
        raise UnsupportedModelError(
            f"rope: {base_model_type(config)} rotates by halves in its own code, so layout='interleaved' cannot "
            "be had: the rows "
            "of its query and key projections would have to be reordered"
        )
    if dims.head_dim % 2:
        raise ValueError(f"rope: heads of size {dims.head_dim} cannot be split into pairs")
    check_scalings(scheme)
    scheme.check(dims)
    own = own_rotation(config, dims, found.rotary, adapter.slices_rotary)
    scheme = scheme.with_base(own, config.max_position_embeddings)
    if found.rotary is None or not _is_own(scheme, own, config):
        make_rotary(_parameters(scheme, own), config, dims, found.rotary, adapter.slices_rotary)  # raises if it cannot
    return scheme


def _is_own(scheme: Rope, own: dict[str, Any], config: Any) -> bool:
    """Return whether a resolved scheme is what a base that rotates does by itself, in every respect."""
    return scheme == Rope().with_base(own, config.max_position_embeddings)


def _parameters(scheme: Rope, own: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope_parameters` of a resolved scheme, as this base writes them: whole heads need no saying."""
    parameters = scheme.rope_parameters()
    written = by_layer_type(own)
    for kind, each in by_layer_type(parameters).items():
        if each["partial_rotary_factor"] == 1.0 and "partial_rotary_factor" not in written[kind]:
            del each["partial_rotary_factor"]
    return parameters


def native_of(found: Resolved, adapter: Adapter, config: Any) -> Native:
    """Look at what the base used for positions.

    Args:
        found: its modules.
        adapter: its family.
        config: its config.

    Returns:
        Native; the table is detached, without the rows before position 0.
    """
    table = None
    if isinstance(found.position_table, nn.Embedding):
        table = found.position_table.weight.detach()[adapter.table_offset :]
    weight = found.token_embedding.weight
    if weight.is_meta:
        rms = 0.0
    else:
        with torch.no_grad():  # called, not read: Gemma scales inside the module
            sample = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // 4096), device=weight.device)
            rms = found.token_embedding(sample).double().square().mean().sqrt().item()
    return Native(table, rms * _input_scale(found, config), config.max_position_embeddings)


def _input_scale(found: Resolved, config: Any) -> float:
    # Gemma and Gemma 2 multiply the embeddings by sqrt(E) in the decoder; Gemma 3's embedding does it itself.
    in_decoder = base_model_type(config) in ("gemma", "gemma2") and not hasattr(found.token_embedding, "embed_scale")
    return config.hidden_size**0.5 if in_decoder else 1.0


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw new parameters from this seed, leaving torch's generators as they were; None draws from them as they are."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether FSDP or DeepSpeed's ZeRO-3 has spread a model's parameters over processes.

    What transformers itself has spread (`distributed_config`) it can gather itself, and does not count.
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


def operate(undo: Undo, plan: Plan, config: Any) -> list[PositionModule]:
    """Change the modules of a model as planned.

    Args:
        undo: where the inverse steps go.
        plan: the checked plan; its scheme is resolved.
        config: the model's config, changed too.

    Returns:
        The new modules that own position parameters, uninitialised.
    """
    _silence_native(undo, plan)
    if isinstance(plan.scheme, ScoreScheme):
        owners = _place_scores(undo, plan, plan.scheme)
        # A layer that was copied (copy.deepcopy) has a config of its own.
        configs = {id(each): each for each in (config, *(attention.config for attention in plan.found.attentions))}
        for each in configs.values():
            set_attribute(undo, each, "_attn_implementation_internal", NAME)
        add_pre_hook(undo, plan.found.decoder, require_attention)
    elif isinstance(plan.scheme, EmbeddingScheme):
        owners = _place_embeddings(undo, plan, plan.scheme)
    elif isinstance(plan.scheme, Rope):
        owners = []
        _place_rotary(undo, plan, plan.scheme, config)
    else:
        owners = []
    mark_layers(undo, plan)
    _set_lengths(undo, plan, config)
    return owners


def _silence_native(undo: Undo, plan: Plan) -> None:
    """Switch off the base's own positions, leaving nothing of them in the forward pass."""
    found, adapter = plan.found, plan.adapter
    if found.rotary is not None and not isinstance(plan.scheme, Rope):
        assert adapter.rotary is not None
        set_module(undo, found.decoder, adapter.rotary, IdentityRotary(found.rotary))
    if found.position_table is not None:
        assert adapter.position_table is not None
        silent = NoEmbedding(plan.dims.hidden_size)
        silent.like = Reference(found.decoder, adapter.token_embedding)
        set_module(undo, found.decoder, adapter.position_table, silent)


def _place_scores(undo: Undo, plan: Plan, scheme: ScoreScheme) -> list[PositionModule]:
    owners: list[PositionModule] = []
    shared = scheme.build_shared(plan.dims)
    if shared is not None:
        set_module(undo, plan.found.decoder, "posenc", shared)
        owners.append(shared)
    for attention in plan.found.attentions:
        module = scheme.build(plan.dims)
        placed = module if shared is None else scheme.attach_shared(module, Reference(plan.found.decoder, "posenc"))
        set_module(undo, attention, "posenc", placed)
        set_attribute(undo, attention, "posenc_engine", plan.attention)
        if isinstance(placed, PositionModule):
            owners.append(placed)
    return owners


def _place_embeddings(undo: Undo, plan: Plan, scheme: EmbeddingScheme) -> list[PositionModule]:
    found, adapter = plan.found, plan.adapter
    every_layer, share_layers = scheme.place()
    if not every_layer and found.position_table is not None:
        assert adapter.position_table is not None
        module = scheme.build(plan.dims)
        module.like = Reference(found.decoder, adapter.token_embedding)
        set_module(undo, found.decoder, adapter.position_table, module)
        return [module]
    owners: list[PositionModule] = []
    if every_layer and share_layers:
        owners.append(scheme.build(plan.dims))
        set_module(undo, found.decoder, "posenc", owners[0])
    for layer in found.layers if every_layer else found.layers[:1]:
        if every_layer and share_layers:
            set_module(undo, layer, "posenc", Shared(Reference(found.decoder, "posenc")))
        else:
            owners.append(scheme.build(plan.dims))
            set_module(undo, layer, "posenc", owners[-1])
        add_pre_hook(undo, layer, add_positions)
    return owners


def _place_rotary(undo: Undo, plan: Plan, scheme: Rope, config: Any) -> None:
    found, adapter = plan.found, plan.adapter
    own = own_rotation(config, plan.dims, found.rotary, adapter.slices_rotary)
    if found.rotary is not None and _is_own(scheme, own, config):
        return  # nothing to do, and so nothing to get wrong
    parameters = _parameters(scheme, own)
    rotary = make_rotary(parameters, config, plan.dims, found.rotary, adapter.slices_rotary)
    parameter = next(found.decoder.parameters())
    if not parameter.is_meta:
        rotary.to(parameter.device)
    if found.rotary is not None:
        assert adapter.rotary is not None
        set_module(undo, found.decoder, adapter.rotary, rotary)
        set_attribute(undo, config, "rope_parameters", parameters)
        if ORIGINAL_LENGTH in config.__dict__:
            # Phi-3's generate drops the cache when it crosses this length, to switch between its two sets of
            # frequencies; and transformers prefers it to what rope_parameters say.
            set_attribute(undo, config, ORIGINAL_LENGTH, parameters.get(ORIGINAL_LENGTH, UNLIMITED))
        if adapter.rotary_size is not None:
            share = parameters.get("partial_rotary_factor", 1.0)
            for attention in found.attentions:
                set_attribute(undo, attention, adapter.rotary_size, int(plan.dims.head_dim * share))
    else:
        set_module(undo, found.decoder, "rotary_emb", rotary)
        for attention in found.attentions:
            set_attribute(undo, attention, "posenc_rotary", rotary)
            set_attribute(undo, attention, "posenc_family", adapter.model_types[0])
            set_attribute(undo, attention, "posenc_layout", scheme.layout)
            set_class(undo, attention, rotary_class(type(attention)))


def _set_lengths(undo: Undo, plan: Plan, config: Any) -> None:
    """Tell the config how long the model may run; `generate` reads it."""
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if plan.scheme.limit is not None:
        set_attribute(undo, config, name, plan.scheme.limit)
    elif not isinstance(plan.scheme, Rope):
        set_attribute(undo, config, name, max(UNLIMITED, config.max_position_embeddings))
    if ORIGINAL_LENGTH in config.__dict__ and not isinstance(plan.scheme, Rope):
        set_attribute(undo, config, ORIGINAL_LENGTH, UNLIMITED)  # no cache is dropped there, see `_place_rotary`


def resolved(plan: Plan, config: Any) -> tuple[Plan, Native]:
    """Return the plan with the scheme's choices made, and what they were made from."""
    native = native_of(plan.found, plan.adapter, config)
    return replace(plan, scheme=plan.scheme.resolve(native, plan.dims)), native
