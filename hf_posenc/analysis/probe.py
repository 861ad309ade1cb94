"""What the analyses read: schemes built on their own, and the modules, angles and attention weights of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from ..api import parse_schemes
from ..call import Call
from ..engines import dispatch
from ..families.base import Resolved
from ..live.base_model import BaseModel
from ..live.state import patch_of
from ..modules import Native, PositionEmbedding, PositionModule, Reference, ScoreModule, owner_of
from ..patching.place import NoEmbedding, seeded
from ..positions import DensePositions
from ..schemes.base import Dims, RotaryScheme, Scheme
from ..upstream import NAME
from ..upstream.rotary import IdentityRotary, PartialRotary, by_pair, make_rotary, scaling_types

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
    (wanted,) = parse_schemes(scheme, hyperparameters)
    native = Native(None, 0.5**0.5, trained_length)
    bench = _Bench(dims, trained_length)
    wanted = wanted.acts_on.fit(wanted, bench).resolve(native, dims)
    with seeded(seed), torch.no_grad():
        wanted.acts_on.put(wanted, bench)
        for module in bench.modules:
            if isinstance(module, PositionModule):
                module.double()
            if isinstance(module, PositionEmbedding):
                module.initialize(native)
            elif isinstance(module, PositionModule):
                module.reset_parameters()
    made = bench.modules[-1] if bench.modules else None
    return wanted, owner_of(made)


class _Bench:
    """Stands in for a model of one layer that has no positions: takes what a placement puts there."""

    name = "a model"
    has_table = False
    positions_in_mask = False
    num_layers = 1
    keeps_table = False
    layers = (0,)
    rotated = (False,)

    def __init__(self, dims: Dims, trained_length: int) -> None:
        self.dims = dims
        self.sizes = {0: dims}
        self.trained_length = trained_length
        self.modules: list[nn.Module] = []
        self.holder = nn.Module()

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the one layer there is."""
        return self.layers

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of the layer's attention."""
        return self.dims

    def require_own_attention(self, scheme: str) -> None:
        """Do nothing: attention is computed here as it has to be."""

    def fit_rotation(self, scheme: RotaryScheme) -> RotaryScheme:
        """Return the scheme as it would be on a base that rotates nothing."""
        scheme.check(self.dims)
        return scheme.with_base({}, self.trained_length, scaling_types())

    def share(self, module: nn.Module) -> Reference:
        """Own a module."""
        self.modules.append(module)
        self.holder.posenc = module
        return Reference(self.holder, "posenc")

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Take the module of the attention."""
        self.modules.append(module)

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Take the module of the vectors, unless it is shared and here already."""
        if isinstance(module, nn.Module):
            self.modules.append(module)

    def at_input(self, module: PositionEmbedding) -> None:
        """Take the module of the vectors."""
        self.modules.append(module)

    def turn(self, scheme: RotaryScheme) -> None:
        """Make the module of the angles, and widen it to whole heads."""
        parameters = scheme.rope_parameters()
        if parameters is None:
            rotary: nn.Module = scheme.build(self.dims)
        else:
            config = LlamaConfig(max_position_embeddings=self.trained_length)
            rotary = make_rotary(parameters, config, self.dims, None, False)
        self.modules += [rotary, PartialRotary(rotary, self.dims.head_dim)]


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
    return BaseModel.of(model).found


@dataclass(frozen=True)
class Added:
    """What makes the vectors that a model adds to its hidden states.

    Attributes:
        module: of the patch or the base.
        limit: number of positions that exist, or None if there is no limit.
        offset: rows of a base's table that stand before position 0.
    """

    module: nn.Module
    limit: int | None
    offset: int = 0

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the vectors (T, E) of positions (T,), float64 on the CPU; gradients flow to what is trained."""
        device = next(itertools.chain(self.module.parameters(), self.module.buffers()), positions).device
        ids = positions.to(device)
        if isinstance(self.module, PositionEmbedding):
            vectors = self.module.embed(ids[None])[0]
        elif isinstance(self.module, nn.Embedding):
            vectors = self.module.weight[ids + self.offset]
        else:
            vectors = self.module(ids[None])[0]
        return vectors.double().cpu()


def added_to(model: PreTrainedModel) -> Added | None:
    """Return what makes the vectors that a patched or stock model adds; with a table per layer, the first layer's.

    None if it adds none.
    """
    base = BaseModel.of(model)
    found = base.found
    for module in [found.position_table, getattr(found.decoder, "posenc", None), getattr(found.layers[0], "posenc", 0)]:
        if isinstance(module, NoEmbedding):
            continue
        if isinstance(module, PositionEmbedding):
            patch = patch_of(model)
            return Added(module, patch.limit if patch else None)
        if isinstance(module, nn.Embedding):
            offset = base.family.table_offset
            return Added(module, module.num_embeddings - offset, offset)
        if module is not None and module is found.position_table:
            return Added(module, None)  # makes its vectors by a rule
    return None


def position_vectors(model: PreTrainedModel, length: int | None = None) -> Tensor | None:
    """Return the vectors that a model adds to its hidden states.

    Args:
        model: patched or stock.
        length: number of positions; None means the whole table, or the config's length where there is no table.

    Returns:
        (length, E) float64 on the CPU, or None if the model adds none. With a table per layer, the first layer's.

    Raises:
        ValueError: if the table is shorter, or nobody says how many there are.
    """
    added = added_to(model)
    if added is None:
        return None
    if length is None:
        rows = int(added.limit or getattr(model.config, "max_position_embeddings", 0))
        if not rows:
            raise ValueError(f"give a length: the config of this {type(model).__name__} does not say how many")
        length = min(rows, 2**16)
    if added.limit is not None and length > added.limit:
        raise ValueError(f"the model has {added.limit} position vectors, {length} were asked for")
    with torch.no_grad():
        return added(torch.arange(length))


def rotary_of(model: PreTrainedModel) -> tuple[nn.Module | None, str]:
    """Return the module that makes the angles of a patched or stock model, or None if nothing is rotated.

    Beside it the form of the angles, see `RotationFacts.angles`.
    """
    base = BaseModel.of(model)
    found, angles = base.found, base.family.rotation.angles
    if (rotation := found.attentions[0].__dict__.get("posenc_rotation")) is not None:
        return cast(nn.Module, rotation()), angles
    rotary = found.rotary if found.rotary is not None else getattr(found.decoder, "rotary_emb", None)
    return None if rotary is None or isinstance(rotary, IdentityRotary) else rotary, angles


@torch.no_grad()
def rotations(
    rotary: nn.Module, positions: Tensor, layer_type: str | None = None, angles: str = "list twice"
) -> tuple[Tensor, Tensor]:
    """Return what a rotary module turns queries and keys by.

    Args:
        rotary: of a model, or of `build`.
        positions: (T,) integers; scalings that depend on the length see the largest.
        layer_type: for families whose kinds of layers turn differently (Gemma 3).
        angles: the form in which the module gives them, see `RotationFacts.angles`.

    Returns:
        cosines and sines (T, pairs), float64, times the module's attention factor.
    """
    own = next(itertools.chain(rotary.buffers(), rotary.parameters()), positions)
    like = torch.empty(0, dtype=torch.float32, device=own.device)
    extra = () if layer_type is None else (layer_type,)
    cos, sin = by_pair(rotary(like, positions[None].to(own.device), *extra), angles)
    return cos[0].double().cpu(), sin[0].double().cpu()


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
    # The query sits where the furthest key is the first token.
    positions = DensePositions(pairs, torch.ones_like(pairs, dtype=torch.bool), pairs[0, 0].amax(-1, keepdim=True))
    call = Call(query, key, key, positions, scaling=scaling, module=module, form=module.form(query)).widened()
    scores: Tensor = call.formula.scores(call)
    return scores


@contextmanager
def dense_attention(model: PreTrainedModel, see: Callable[[int, Tensor], None] | None = None) -> Iterator[None]:
    """Let every layer attend densely, and show the attention weights.

    Schemes that change scores run in the reference engine, everything else in the family's own eager attention: both
    have weights, and second derivatives.

    Args:
        model: patched or stock.
        see: called with a layer's index and its weights (B, H, Q, L), layer by layer as the model runs.
    """
    attentions = parts(model).attention_of
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
        for index, attention in attentions.items():
            module = attention.posenc if ours else attention
            if ours:
                stack.callback(module.register_forward_pre_hook(take_reference, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(show(index)).remove)
        yield


def check_tokens(tokens: Tensor, least: int) -> Tensor:
    """Return tokens as (B, T); ValueError unless there are at least so many in a row."""
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or tokens.shape[1] < least:
        raise ValueError(f"tokens must be (T,) or (B, T) with T >= {least}, not {tuple(tokens.shape)}")
    return tokens
