"""Access for the analyses: build schemes without a model, and read a model's modules and angles."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..api import parse_schemes, patch_model
from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.layer_state import on_attention
from ..core.modules import PositionEmbedding, ScoreModule
from ..core.positions import DensePositions
from ..families.base import language_config
from ..model.base_model import BaseModel
from ..model.patch_record import patch_of
from ..patching.changes import NoEmbedding
from ..schemes.base import Scheme
from ..transformers_glue.rotary import IdentityRotary, by_pair

DIMS = Dims(num_heads=8, num_key_value_heads=8, head_dim=64, hidden_size=512, num_layers=1)
"""Default sizes of the attention for a scheme without a model."""

TRAINED_LENGTH = 512
"""Default trained length of the base, in tokens, for a scheme without a model."""


def build(
    scheme: str | Scheme,
    *,
    dims: Dims = DIMS,
    trained_length: int | None = None,
    seed: int = 0,
    **hyperparameters: object,
) -> PreTrainedModel:
    """Build a LLaMA of one layer and patch it with a scheme, to read the scheme's initial parameters in float64.

    Args:
        scheme: a name or an instance. One that joins the positions of a layer joins none.
        dims: sizes of the attention.
        trained_length: length that the base was trained at, in tokens; None means 512.
        seed: seed of random initial parameters. Position vectors start with an RMS of sqrt(1/2), as sinusoids of
            amplitude 1 have.
        **hyperparameters: hyper-parameters, for a name.
    """
    (wanted,) = parse_schemes(scheme, hyperparameters)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=dims.hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=dims.num_heads,
        num_key_value_heads=dims.num_key_value_heads,
        head_dim=dims.head_dim,
        max_position_embeddings=trained_length or TRAINED_LENGTH,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double().eval()
        model.model.embed_tokens.weight.fill_(0.5**0.5)
    return patch_model(model, ["nope", wanted] if wanted.joins else wanted, seed=seed)


def scheme_vectors(scheme: str | Scheme, length: int, **arguments: Any) -> Tensor | None:
    """Return the vectors that a scheme adds to the hidden states, with its initial parameters.

    Args:
        scheme: a name or an instance.
        length: number of positions.
        **arguments: `dims`, `trained_length`, `seed` and hyper-parameters, see `decay`.

    Returns:
        (length, E) float64, or None if the scheme adds none.

    Raises:
        ValueError: if the scheme has fewer positions than `length`.
    """
    return position_vectors(build(scheme, **arguments), length)


def added_by(model: PreTrainedModel) -> tuple[nn.Module, int | None] | None:
    """Return the module that computes the position vectors a patched or stock model adds, and their number.

    The number is None if there is no limit, the result is None if the model adds none. If layers have separate tables,
    the module is that of the first layer.
    """
    base = BaseModel.of(model)
    found = base.modules
    patched = [holder._modules.get("posenc") for holder in (found.decoder, found.layers[0])]
    for module in (found.position_table, *patched):
        if isinstance(module, PositionEmbedding) and not isinstance(module, NoEmbedding):
            patch = patch_of(model)
            return module, patch.limit if patch else None
        if isinstance(module, nn.Embedding):
            return module, module.num_embeddings - base.family.table_offset
        if module is found.position_table and not isinstance(module, NoEmbedding | None):
            return module, None  # computes sinusoids
    return None


@torch.no_grad()
def position_vectors(model: PreTrainedModel, length: int | None = None) -> Tensor | None:
    """Return the vectors that a model adds to its hidden states.

    Args:
        model: patched or stock.
        length: number of positions; None means the whole table, or the config's length if there is no table.

    Returns:
        (length, E) float64 on the CPU, or None if the model adds none. If layers have separate tables, the vectors are
        those of the first layer.

    Raises:
        ValueError: if the table has fewer rows than `length`, or if neither the caller nor the config gives a length.
    """
    added = added_by(model)
    if added is None:
        return None
    module, limit = added
    if length is None:
        rows = limit or getattr(language_config(model.config), "max_position_embeddings", None)
        if not rows:
            raise ValueError(f"give a length: the config of this {type(model).__name__} does not say how many")
        length = min(rows, 2**16)
    if limit is not None and length > limit:
        raise ValueError(f"the model has {limit} position vectors, {length} were asked for")
    ids = torch.arange(length, device=device_of(module))
    if isinstance(module, PositionEmbedding):
        vectors = module.embed(ids[None])[0]
    elif isinstance(module, nn.Embedding):
        vectors = module.weight[ids + BaseModel.of(model).family.table_offset]
    else:
        vectors = module(ids[None])[0]
    return vectors.double().cpu()


def rotary_of(model: PreTrainedModel) -> tuple[nn.Module | None, str]:
    """Return the rotary module of a patched or stock model, and the form of its output, see `RotationFacts.angles`.

    The module is None if the model rotates nothing.
    """
    base = BaseModel.of(model)
    found, angles = base.modules, base.family.rotation.angles
    if (rotation := on_attention(found.attentions[0]).rotation) is not None:
        return rotation(), angles
    rotary = found.rotary if found.rotary is not None else getattr(found.decoder, "rotary_emb", None)
    return None if rotary is None or isinstance(rotary, IdentityRotary) else rotary, angles


@torch.no_grad()
def rotations(
    rotary: nn.Module, positions: Tensor, layer_type: str | None = None, angles: str = "list twice"
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles by which a rotary module rotates queries and keys.

    Args:
        rotary: rotary module of a model, or from `build`.
        positions: (T,) integers. Scalings that depend on the length take the largest one as the length.
        layer_type: type of the layer, for families that rotate layer types differently (Gemma 3).
        angles: form of the module's output, see `RotationFacts.angles`.

    Returns:
        cosines and sines (T, pairs), float64, times the module's attention factor.
    """
    device = device_of(rotary)
    like = torch.empty(0, dtype=torch.float32, device=device)
    extra = () if layer_type is None else (layer_type,)
    cos, sin = by_pair(rotary(like, positions[None].to(device), *extra), angles)
    return cos[0].double().cpu(), sin[0].double().cpu()


def layer_type(model: PreTrainedModel, rotary: nn.Module, layer: int) -> str | None:
    """Return the type of a layer if the rotary module distinguishes layer types, or None."""
    return language_config(model.config).layer_types[layer] if getattr(rotary, "layer_types", None) else None


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters and buffers; the CPU if it has none."""
    return next(itertools.chain(module.parameters(), module.buffers()), torch.empty(0)).device


def scores_at(module: ScoreModule, query: Tensor, key: Tensor, distances: Tensor, scaling: float) -> Tensor:
    """Return the scores of a query against one key per distance.

    Args:
        module: module of a scheme on attention scores.
        query: (B, H, 1, D).
        key: (B, H, n, D).
        distances: (n,) integers >= 0.
        scaling: factor of the scores.

    Returns:
        (B, H, 1, n), float32 or float64.
    """
    pairs = distances.to(query.device)[None, None, None]
    # The query's position is the largest distance, so that the farthest key is the first token.
    positions = DensePositions(pairs, torch.ones_like(pairs, dtype=torch.bool), pairs[0, 0].amax(-1, keepdim=True))
    call = Call(query, key, key, positions, scaling=scaling, module=module, form=module.form(query)).widened()
    return call.scores()


def check_tokens(tokens: Tensor, least: int) -> Tensor:
    """Return tokens as (B, T); ValueError if a text has fewer than `least` tokens."""
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or tokens.shape[1] < least:
        raise ValueError(f"tokens must be (T,) or (B, T) with T >= {least}, not {tuple(tokens.shape)}")
    return tokens
