"""The forward pre-hooks of a patched model: one on its decoder, which refuses wrong calls, and one on each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import UnsupportedModelError
from ..core.layer_state import on_decoder, on_layer
from ..core.positions import check_padding, ensure, is_compact, require_numbers, unpack
from ..core.registry import family_for
from ..model.watch import Args, Kwargs
from ..transformers_glue import NAME, POSITION_IDS, Arguments
from ..transformers_glue.masks import check_masks, shown
from ..transformers_glue.positions_in_mask import as_channel, positions_of
from ..transformers_glue.token_numbers import check_cache

ROTATION = "position_embeddings"
"""Name of the decoder layer's argument that carries cosines and sines."""

SEVERAL_COORDINATES = (
    "position_ids give a token several coordinates (time, height and width), and the scheme takes one number per "
    "token: pass position_ids (B, T), or take a scheme that leaves coordinates to the base (rope or nope in all layers)"
)

NEGATIVE = (
    "position_ids are negative where attention_mask shows a token, and no vectors exist for negative positions: "
    "count from 0"
)


def enter_decoder(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Forward pre-hook of the decoder: refuse calls that would lose positions, and pass on what its layers need.

    Raises:
        UnsupportedModelError: if a layer lacks a part of its scheme.
        ValueError: for an attention, a cache, a mask or position ids that do not go with the schemes.
    """
    state = on_decoder(decoder)
    given = {**dict(zip(state.arguments, args, strict=False)), **kwargs}
    if (problem := problem_of_layers(decoder)) is not None:
        raise UnsupportedModelError(problem)
    if state.holds_numbers:
        check_cache(given.get("past_key_values"))
    if state.attends:
        config: Any = decoder.config
        if config._attn_implementation != NAME:
            raise ValueError(
                f"the config says attention {config._attn_implementation!r}, which was set behind the patch, so the "
                f"scheme would be ignored: set it back to {NAME!r}, or unpatch the model"
            )
        check_masks(given.values())
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        return args, kwargs  # the decoder refuses the call
    ids, cache = given.get("position_ids"), given.get("past_key_values")
    if state.rows or state.hands_down:
        # The decoder does not pass position ids on, or not as one number. Without ids it counts on from the cache.
        if ids is None:
            num_cached = 0 if cache is None else cache.get_seq_length()
            ids = (torch.arange(tokens.shape[1], device=tokens.device) + num_cached)[None]
        if state.rows and ids.ndim == 3:
            ensure((ids == ids[:1]).all(), SEVERAL_COORDINATES)
            ids = ids[0]
        given[POSITION_IDS] = ids
        if state.rows:  # those of the text come first, from which the decoder reads which tokens are of one document
            given["position_ids"] = ids.expand(state.rows, -1, -1)
    ids, mask = given.get("position_ids"), given.get("attention_mask")
    check_padding(mask)
    if ids is not None:
        require_numbers(ids)
        if mask is None and cache is None:
            # Of several coordinates, the first is that of the text. A mask of ones says that a row is one document.
            given["attention_mask"] = shown(ids[0] if ids.ndim == 3 else ids, len(tokens))
    if state.adds_vectors:
        _check_counts(given, tokens)
    return (), given


def problem_of_layers(decoder: nn.Module) -> str | None:
    """Return what is wrong with a patched decoder's layers and what to do, or None if nothing is wrong.

    Users may drop, copy and append layers after a model was patched. A layer without a scheme's parts would silently
    run without positions. A layer may be wrapped by FSDP, activation checkpointing or regional compilation; these
    wrappers look up unknown attributes in the layer.
    """
    state = on_decoder(decoder)
    layers: Any = decoder.get_submodule(state.layers)
    name, remedy = type(decoder).__name__, "unpatch the model, change its layers, then patch it again"
    if state.count not in (None, len(layers)):
        return f"{name} has {len(layers)} layers now, and had {state.count} when it was patched: {remedy}"
    for index, layer in enumerate(layers):
        parts = state.parts[min(index, len(state.parts) - 1)]
        if on_layer(layer).parts != parts or not _has(layer, parts):
            return (
                f"layer {index} of {name} is not patched as it was: it was added, moved or changed afterwards. Append "
                f"copies of patched layers (copy.deepcopy) instead, or {remedy}"
            )
    return None


def _has(layer: Any, parts: tuple[str, ...]) -> bool:
    """Return whether each of these dotted paths leads from a layer to something."""
    for part in parts:
        found = layer
        for name in part.split("."):
            found = getattr(found, name, None)
        if found is None:
            return False
    return True


def _check_counts(given: Arguments, tokens: Tensor) -> None:
    """Refuse negative position ids where vectors are added.

    Padding may have any position ids. A 2-D mask or the compact position channel says which tokens are padding.
    """
    ids, mask = given.get("position_ids"), given.get("attention_mask")
    is_token = torch.ones((), dtype=torch.bool, device=tokens.device)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        is_token = mask[:, -tokens.shape[1] :] != 0
    elif isinstance(mask, Tensor) and is_compact(mask):
        channel = unpack(mask, tokens.shape[1])
        is_token = channel.query_valid
        ids = channel.query_positions if ids is None else ids
    if ids is not None:
        ensure(~((ids < 0) & is_token).any(), NEGATIVE)


def enter_layer(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Forward pre-hook of every decoder layer: replace its cosines and sines, and add its position vectors.

    A layer that needs neither has the hook too, because torch.compile does not guard hooks. A graph that was compiled
    for a layer without the hook would also run for a layer with it. Attributes that are read with getattr are guarded.
    """
    state, vectors = on_layer(layer), getattr(layer, "posenc", None)
    if state.rotation is None and vectors is None:
        return None
    given = {**dict(zip(state.arguments, args, strict=False)), **kwargs}
    hidden_states = given.pop(state.arguments[0])
    position_ids = given.get(POSITION_IDS)
    if position_ids is None:
        position_ids = given.get("position_ids")
    if state.family:
        channel = as_channel(given.get("attention_mask"), as_bool=family_for(state.family).mask_as_bool)
        position_ids = positions_of(channel, hidden_states.shape[1])
    if position_ids is None:
        raise ValueError("position_ids did not arrive at the decoder layer, which needs them")
    if state.rotation is not None:
        if given.get(ROTATION) is None:
            raise ValueError("the rotation did not arrive at the decoder layer by name, so it cannot be replaced")
        # Rotary modules of older releases of transformers take one id per coordinate.
        ids = position_ids.expand(state.coordinates, -1, -1) if state.coordinates else position_ids
        given[ROTATION] = state.rotation()(hidden_states, ids, *state.rotation_arguments)
    if vectors is not None:
        hidden_states = hidden_states + vectors(position_ids).to(hidden_states)
    return (hidden_states,), given  # hidden states by position, as hooks that record them expect
