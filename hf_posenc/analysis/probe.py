"""What the analyses read: schemes built on their own, and the modules, angles and attention weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from .. import surgery
from ..adapters.base import Resolved, resolve
from ..attention import NAME, IdentityRotary, PartialRotary, check_scalings, make_rotary
from ..call import Call
from ..engines import dispatch
from ..patching import parse_scheme
from ..positions import DensePositions
from ..registry import adapter_for
from ..schemes.base import (
    Dims,
    EmbeddingScheme,
    Native,
    PositionEmbedding,
    Reference,
    Scheme,
    ScoreModule,
    ScoreScheme,
    Shared,
)
from ..schemes.rope import Rope

DIMS = Dims(num_heads=8, num_key_value_heads=8, head_dim=64, hidden_size=512, num_layers=1)
"""Sizes of the attention that a scheme without a model is looked at in."""

TRAINED_LENGTH = 512
"""Length of the training that a scheme without a model is taken to have had, in tokens."""


def build(
    scheme: str | Scheme,
    *,
    dims: Dims = DIMS,
    trained_length: int = TRAINED_LENGTH,
    seed: int = 0,
    **hyperparameters: Any,
) -> tuple[Scheme, nn.Module | None]:
    """Make a scheme's module without a model, in float64, as it starts.

    Args:
        scheme: a name or an instance.
        dims: sizes of the attention.
        trained_length: of the base, in tokens; embeddings start at an RMS of sqrt(1/2), as sinusoids of size 1.
        seed: of parameters that start at random.
        **hyperparameters: beside a name.

    Returns:
        The scheme with its choices made, and its module: one that makes vectors, angles or scores, None for `nope`.
    """
    wanted = parse_scheme(scheme, hyperparameters)
    native = Native(None, 0.5**0.5, trained_length)
    if isinstance(wanted, Rope):
        check_scalings(wanted)
        wanted = wanted.with_base({}, trained_length)
    wanted = wanted.resolve(native, dims)
    with surgery.seeded(seed), torch.no_grad():
        if isinstance(wanted, Rope):
            config = LlamaConfig(max_position_embeddings=trained_length)
            rotary = make_rotary(wanted.rope_parameters(), config, dims, None, False)
            return wanted, PartialRotary(rotary, dims.head_dim)
        if isinstance(wanted, EmbeddingScheme):
            vectors = wanted.build(dims).double()
            vectors.initialize(native)
            return wanted, vectors
        if isinstance(wanted, ScoreScheme):
            wanted.check(dims)
            scores, shared = wanted.build(dims).double(), wanted.build_shared(dims)
            scores.reset_parameters()
            if shared is not None:
                shared.double().reset_parameters()
                holder = nn.Module()
                holder.posenc = shared
                attached = wanted.attach_shared(scores, Reference(holder, "posenc"))
                return wanted, attached.owner() if isinstance(attached, Shared) else attached
            return wanted, scores
    return wanted, None


def scheme_vectors(scheme: str | Scheme, length: int, **arguments: Any) -> Tensor | None:
    """Return the vectors that a scheme adds to the hidden states, as it starts.

    Args:
        scheme: a name or an instance.
        length: number of positions.
        **arguments: as for `build`.

    Returns:
        (length, E) float64, or None if the scheme adds none.

    Raises:
        ValueError: if the scheme has fewer positions.
    """
    resolved, module = build(scheme, **arguments)
    if not isinstance(module, PositionEmbedding):
        return None
    if resolved.limit is not None and length > resolved.limit:
        raise ValueError(f"{resolved.name} has {resolved.limit} positions, {length} were asked for")
    with torch.no_grad():
        return module.embed(torch.arange(length)[None])[0].double()


def parts(model: PreTrainedModel) -> Resolved:
    """Return the modules of a patched or stock model; UnsupportedModelError for another family."""
    return resolve(adapter_for(surgery.base_model_type(model.config)), model)


def position_vectors(model: PreTrainedModel, length: int | None = None) -> Tensor | None:
    """Return the vectors that a model adds to its hidden states.

    Args:
        model: patched or stock.
        length: number of positions; None means the whole table, or the config's length where there is no table.

    Returns:
        (length, E) float64 on the CPU, or None if the model adds none. With a table per layer, the first layer's.

    Raises:
        ValueError: if the table is shorter.
    """
    found = parts(model)
    for module in [found.position_table, getattr(found.decoder, "posenc", None), getattr(found.layers[0], "posenc", 0)]:
        if isinstance(module, surgery.NoEmbedding):
            continue
        if isinstance(module, PositionEmbedding):
            patch = getattr(model.base_model, "_posenc_patch", None)
            rows = (patch.scheme.limit if patch else None) or model.config.max_position_embeddings
            place = found.token_embedding.weight.device
            ids = torch.arange(min(rows, 2**16) if length is None else length, device=place)[None]
            with torch.no_grad():
                return module.embed(ids)[0].double().cpu()
        if isinstance(module, nn.Embedding):
            offset = adapter_for(surgery.base_model_type(model.config)).table_offset
            table = module.weight.detach()[offset:].double().cpu()
            if length is not None and length > len(table):
                raise ValueError(f"the model has {len(table)} position vectors, {length} were asked for")
            return table[:length]
    return None


def rotary_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that makes the angles of a patched or stock model, or None if nothing is rotated."""
    found = parts(model)
    rotary = found.rotary if found.rotary is not None else getattr(found.decoder, "rotary_emb", None)
    return None if rotary is None or isinstance(rotary, IdentityRotary) else rotary


@torch.no_grad()
def rotations(rotary: nn.Module, positions: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Return what a rotary module turns queries and keys by.

    Args:
        rotary: of a model, or of `build`.
        positions: (T,) integers; scalings that depend on the length see the largest.
        layer_type: for families whose kinds of layers turn differently (Gemma 3).

    Returns:
        cosines and sines (T, pairs), float64, times the module's attention factor.
    """
    buffer = next(rotary.buffers())
    like = torch.empty(0, dtype=torch.float32, device=buffer.device)
    extra = () if layer_type is None else (layer_type,)
    cos, sin = rotary(like, positions[None].to(buffer.device), *extra)
    pairs = cos.shape[-1] // 2
    return cos[0, :, :pairs].double().cpu(), sin[0, :, :pairs].double().cpu()


def scores_at(module: ScoreModule, query: Tensor, key: Tensor, distances: Tensor, scaling: float) -> Tensor:
    """Return the scores of a query against one key per distance.

    Args:
        module: of a scheme on attention scores.
        query: (B, H, 1, D).
        key: (B, H, n, D).
        distances: (n,) integers >= 0.
        scaling: factor of the scores.

    Returns:
        (B, H, 1, n), float32 or float64.
    """
    pairs = distances.to(query.device)[None, None, None]
    positions = DensePositions(pairs, torch.ones_like(pairs, dtype=torch.bool))
    call = Call(query, key, key, positions, scaling=scaling, module=module, form=module.form(query)).widened()
    scores: Tensor = call.formula.scores(call)
    return scores


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and back in the mode that each was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def dense_attention(model: PreTrainedModel, see: Callable[[int, Tensor], None] | None = None) -> Iterator[None]:
    """Let every layer attend densely, and show the attention weights.

    Schemes that change scores run in the reference engine, everything else in the family's own eager attention: both
    have weights, and second derivatives.

    Args:
        model: patched or stock.
        see: called with a layer's index and its weights (B, H, Q, L), layer by layer as the model runs.
    """
    attentions = parts(model).attentions
    ours = model.config._attn_implementation == NAME

    def take_reference(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (replace(args[0], weights=True), partial(dispatch.attend, wanted="reference")), kwargs

    def show(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if see is not None:
                see(index, output[1])

        return hook

    with ExitStack() as stack:
        if not ours:
            stock = model.config._attn_implementation
            model.set_attn_implementation("eager")
            stack.callback(model.set_attn_implementation, stock)
        for index, attention in enumerate(attentions):
            place = attention.posenc if ours else attention
            if ours:
                stack.callback(place.register_forward_pre_hook(take_reference, with_kwargs=True).remove)
            stack.callback(place.register_forward_hook(show(index)).remove)
        yield


def check_tokens(tokens: Tensor, least: int) -> Tensor:
    """Return tokens as (B, T); ValueError unless there are at least so many in a row."""
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or tokens.shape[1] < least:
        raise ValueError(f"tokens must be (T,) or (B, T) with T >= {least}, not {tuple(tokens.shape)}")
    return tokens
