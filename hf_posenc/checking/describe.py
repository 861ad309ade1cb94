"""Describe a model's positions, and name the engine of its attention: describe, which_engine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from ..core.attention_call import Call
from ..core.dims import Layers
from ..core.errors import NotPatchedError
from ..core.layer_state import on_attention
from ..core.modules import ScoreModule, owner_of, position_parameters
from ..core.positions import Positions
from ..core.registry import family_for
from ..engines.dispatch import Choice, choose
from ..families.base import base_model_type, language_config
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.patch_record import patch_of
from ..model.watch import caught
from ..schemes.base import Scheme
from .runner import unwrapped


@dataclass(frozen=True)
class Description:
    """A model's positions. `str` gives a few readable lines.

    Attributes:
        model: class name of the model.
        family: stock model type; for a multimodal model, that of its language model.
        inside: stock model type of a multimodal model; None for other models.
        schemes: schemes as fitted to the model; empty for a stock model.
        kept: indices of the layers that keep the base's positions in a patched model.
        attention: `auto` or an engine's name if the model attends through this package; otherwise the model's own
            attention implementation, or the flash attention to which this package hands changed queries.
        limit: number of positions, or None if there is no limit (or the model is stock).
        parameters: number of position parameters.
        tensors: number of tensors that hold the position parameters.
    """

    model: str
    family: str
    inside: str | None
    schemes: tuple[Scheme, ...]
    kept: tuple[int, ...]
    attention: str
    limit: int | None
    parameters: int
    tensors: int

    def __str__(self) -> str:
        """Return the lines."""
        name = f"{self.model} ({self.family}{'' if self.inside is None else f' inside {self.inside}'})"
        if not self.schemes:
            return f"{name}: stock positions, attention {self.attention}"
        lines = [f"{name}: " + " + ".join(map(str, self.schemes))]
        for number, scheme in enumerate(self.schemes):
            lines.append(f"  {'acts' if number == 0 else '':<12}{scheme.place}{_in_layers(scheme.layers)}")
        if self.kept:
            lines.append(f"  kept        the base's own{_in_layers(self.kept)}")
        tensors = f"{self.tensors} tensor{'' if self.tensors == 1 else 's'}"
        limit = "no limit" if self.limit is None else self.limit
        lines += [f"  attention   {self.attention}", f"  positions   {limit}"]
        return "\n".join([*lines, f"  parameters  {self.parameters:,} in {tensors}"])


def _in_layers(layers: Layers) -> str:
    return "" if layers is None else f", in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def describe(model: PreTrainedModel) -> Description:
    """Describe a model's positions: schemes, hyper-parameters, where they act, attention, limit.

    Args:
        model: a patched or stock model. PEFT may be around it.

    Raises:
        UnsupportedModelError: for a stock model of an unknown family, and for a model that is wrapped
            (DistributedDataParallel) or sharded (FSDP).
    """
    model = unwrapped(model, "describe the model", runs=False)
    patch = patch_of(model)
    name, family = type(model).__name__, base_model_type(model.config)
    whole = str(type(model.config).model_type).removeprefix("posenc_")
    inside = None if language_config(model.config) is model.config else whole
    own_attention = str(language_config(model.config)._attn_implementation)
    family_for(family)
    if patch is None:
        return Description(name, family, inside, (), (), own_attention, None, 0, 0)
    parameters = position_parameters(model).values()
    selections = [scheme.layers for scheme in patch.schemes if not scheme.joins]
    taken = {layer for layers in selections if layers is not None for layer in layers}
    kept = () if None in selections else tuple(layer for layer in range(len(patch.layers)) if layer not in taken)
    attention = (patch.backend or patch.attention) if patch.attends else own_attention
    count = sum(parameter.numel() for parameter in parameters)
    schemes = patch.schemes
    return Description(name, family, inside, schemes, kept, attention, patch.limit, count, len(parameters))


def which_engine(
    model: PreTrainedModel,
    length: int,
    *,
    keys: int | None = None,
    dtype: torch.dtype | None = None,
    layer: int | None = None,
) -> Choice:
    """Name the engine that computes attention in a patched model, and say why: for calls without padding.

    The answer is for the model's device. `which_engine` runs the model on one token, in evaluation mode, up to the
    attention of the layer. On a GPU this may take seconds, because it compiles FlexAttention and tries it first. A
    scheme that rotates queries and keys itself, such as `far_rope`, rotates those of one layer at this length, which
    takes memory.

    Args:
        model: a patched model, also with an adapter of PEFT around it.
        length: number of queries.
        keys: number of keys, cached ones included; None means `length`. With more keys than queries, gradients are off.
        dtype: dtype of queries and keys; None means the model's dtype.
        layer: index of the layer; None means the first layer with a scheme on its scores.

    Returns:
        The engine's name and the reason; or the model's own attention implementation if the scheme keeps it, or hands
        its queries and keys to it.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if the model is wrapped (DistributedDataParallel), sharded (FSDP) or offloaded.
        ValueError: if an argument is out of range, the engine that was chosen when patching cannot compute the call, or
            the model is on the meta device.
    """
    model = unwrapped(model, "ask for the engine")
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched")
    keys = length if keys is None else keys
    if length < 1 or keys < length:
        raise ValueError(f"length must be at least 1, and keys at least length, not {length} and {keys}")
    if not patch.attends:
        own_attention = str(language_config(model.config)._attn_implementation)
        return Choice(own_attention, f"{patch.name} keeps the model's own attention")
    if patch.backend:
        return Choice(patch.backend, f"{patch.name} changes queries and keys only")
    if next(model.parameters()).is_meta:
        raise ValueError("the model is on the meta device, where nothing computes attention: ask once it has weights")
    base = BaseModel.of(model)
    attention: Any = base.modules.attention_of[_layer_with_attention(base, layer)]
    cached = keys > length  # generation, which takes no gradients
    with torch.set_grad_enabled(torch.is_grad_enabled() and not cached):
        call = _call_of(base, attention, length, keys, dtype or model.dtype)
        return choose(on_attention(attention).engine, _handed_on(owner_of(attention.posenc), call))


class _HandedOnError(BaseException):
    """Stops a module where it hands its call to an engine."""


def _handed_on(module: ScoreModule, call: Call) -> Call:
    """Return the call that a module hands to an engine: some rotate queries and keys, and leave no formula to do."""
    calls: list[Call] = []

    def attend(call: Call) -> NoReturn:
        calls.append(call)
        raise _HandedOnError

    with suppress(_HandedOnError):
        module(call, attend)
    return calls[0]


def _layer_with_attention(base: BaseModel, layer: int | None) -> int:
    """Return the index of a layer, counted from 0; ValueError if it does not exist or has no attention."""
    index = min(base.layers_with_scores() or base.sizes) if layer is None else layer % base.num_layers
    if index not in base.sizes or (layer is not None and layer not in (index, index - base.num_layers)):
        raise ValueError(f"there is no attention in layer {layer}: ask for one of {', '.join(map(str, base.sizes))}")
    return index


def _call_of(base: BaseModel, attention: Any, length: int, keys: int, dtype: torch.dtype) -> Call:
    """Return the call of an attention in a patched model, without its form, with tensors that take no memory.

    The model makes the call for one token, with its own scaling, soft cap and sinks. Then the tensors are lengthened.
    """
    token, decoder = torch.zeros(1, 1, dtype=torch.int64, device=base.token_weight.device), base.modules.decoder
    with evaluation(decoder), torch.no_grad():
        (call, *_), _ = caught(attention.posenc, lambda: decoder(input_ids=token, use_cache=False))
    tensors = {"query": (call.query, length), "key": (call.key, keys), "value": (call.value, keys)}
    empty = torch.empty((), dtype=dtype, device=call.query.device)
    lengthened = {name: empty.expand(1, one.shape[1], size, one.shape[3]) for name, (one, size) in tensors.items()}
    positions = on_attention(attention).within_window(Positions.causal(length, keys, call.query.device))
    own = {name: numbers.expand(-1, -1, length, -1) for name, numbers in call.by_module.items()}
    return replace(call, positions=positions, by_module=own, **lengthened)
