"""Access for the analyses: build schemes without a model, and read a model's modules, angles and attention weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from ..api import parse_schemes
from ..attention_call import Call
from ..dims import Dims
from ..engines import dispatch
from ..families.base import Resolved, language_config
from ..layer_state import on_attention
from ..live.base_model import BaseModel
from ..live.patch_record import patch_of
from ..modules import Native, PositionEmbedding, PositionModule, Reference, ScoreModule, owner_of
from ..patching.changes import NoEmbedding, seeded
from ..placement import Placed, RopeParameters
from ..positions import DensePositions
from ..schemes.base import RotaryScheme, Scheme
from ..schemes.far_rope import BaseAngles
from ..upstream import NAME
from ..upstream.rotary import IdentityRotary, PartialRotary, by_pair, make_rotary, read_frequencies, scaling_types

K = TypeVar("K")

DIMS = Dims(num_heads=8, num_key_value_heads=8, head_dim=64, hidden_size=512, num_layers=1)
"""Default sizes of the attention for a scheme without a model."""

TRAINED_LENGTH = 512
"""Default trained length of the base, in tokens, for a scheme without a model."""


def build(
    scheme: str | Scheme,
    *,
    dims: Dims = DIMS,
    trained_length: int = TRAINED_LENGTH,
    seed: int = 0,
    **hyperparameters: object,
) -> tuple[Scheme, nn.Module | None]:
    """Build a scheme's module without a model, in float64, with its initial parameters.

    Args:
        scheme: a name or an instance.
        dims: sizes of the attention.
        trained_length: length that the base was trained at, in tokens.
        seed: seed of random initial parameters. Position vectors start with an RMS of sqrt(1/2), as sinusoids of
            amplitude 1 have.
        **hyperparameters: hyper-parameters, for a name.

    Returns:
        The resolved scheme, and its module, which computes vectors, angles or scores. The module is None for `nope`.
    """
    (wanted,) = parse_schemes(scheme, hyperparameters)
    native = Native(None, 0.5**0.5, trained_length)
    bench = _OneLayerModel(dims, trained_length)
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
    return wanted, owner_of(bench.modules[-1] if bench.modules else None)


class _OneLayerModel:
    """A stand-in for a model of one layer without positions. It collects the modules that a placement installs."""

    name = "a model"
    has_table = False
    positions_in_mask = False
    num_layers = 1
    keeps_table = False
    layers: tuple[int, ...] = (0,)
    rotated = (False,)
    normed = ()

    def __init__(self, dims: Dims, trained_length: int) -> None:
        self.dims = dims
        self.sizes = {0: dims}
        self.trained_length = trained_length
        self.modules: list[nn.Module] = []
        self.holder = nn.Module()

    @property
    def length(self) -> int:
        """Length that the base was trained at."""
        return self.trained_length

    def layers_of(self, scheme: Placed) -> tuple[int, ...]:
        """Return the only layer."""
        return self.layers

    def dims_of(self, layer: int) -> Dims:
        """Return the sizes of the layer's attention."""
        return self.dims

    def require_our_attention(self, scheme: str) -> None:
        """Do nothing, because this model has no attention."""

    def require_token_numbers(self, scheme: str, layers: Sequence[int]) -> None:
        """Do nothing, because this model has no cache."""

    def fit_rotation(self, scheme: RotaryScheme) -> RotaryScheme:
        """Fit the scheme to a base that rotates nothing."""
        scheme.check(self.dims)
        completed = scheme.with_base({}, self.trained_length, scaling_types())
        return completed.with_frequencies(
            lambda parameters: read_frequencies(self._rotary(parameters), parameters), self.trained_length
        )

    def has_own_rotation(self, scheme: RotaryScheme) -> bool:
        """Return False, because this model rotates nothing."""
        return False

    def turns_like_stock(self, scheme: RotaryScheme) -> bool:
        """Return False, because this model has no stock class."""
        return False

    def own_angles(self, scheme: Scheme) -> dict[int, BaseAngles]:
        """Return the usual rotation of whole heads."""
        return {0: BaseAngles.of_head(self.dims.head_dim)}

    def silence_rotation(self) -> None:
        """Do nothing, because this model rotates nothing."""

    def share(self, module: nn.Module) -> Reference:
        """Collect a module, and return a reference to it."""
        self.modules.append(module)
        self.holder.posenc = module
        return Reference(self.holder, "posenc")

    def on_attention(self, layer: int, module: nn.Module) -> None:
        """Collect the module of the attention."""
        self.modules.append(module)

    def on_queries(self, layer: int, name: str, module: nn.Module) -> None:
        """Collect the module of the queries."""
        self.modules.append(module)

    def before_layer(self, layer: int, module: nn.Module | Reference) -> None:
        """Collect the module of the vectors. A reference is to a module that has been collected before."""
        if isinstance(module, nn.Module):
            self.modules.append(module)

    def at_input(self, module: PositionEmbedding) -> None:
        """Collect the module of the vectors."""
        self.modules.append(module)

    def turn(self, scheme: RotaryScheme) -> None:
        """Build and collect the module of the angles, extended to all dimensions of a head."""
        parameters = scheme.rope_parameters()
        if parameters is None:
            rotary: nn.Module = scheme.build(self.dims)
        else:
            rotary = self._rotary(parameters)
        self.modules += [rotary, PartialRotary(rotary, self.dims.head_dim)]

    def _rotary(self, parameters: RopeParameters) -> nn.Module:
        """Return a rotary module of transformers with these `rope_parameters`."""
        config = LlamaConfig(max_position_embeddings=self.trained_length)
        return make_rotary(parameters, config, self.dims, None, False)


def scheme_vectors(scheme: str | Scheme, length: int, **arguments: Any) -> Tensor | None:
    """Return the vectors that a scheme adds to the hidden states, with its initial parameters.

    Args:
        scheme: a name or an instance.
        length: number of positions.
        **arguments: arguments of `build`.

    Returns:
        (length, E) float64, or None if the scheme adds none.

    Raises:
        ValueError: if the scheme has fewer positions than `length`.
    """
    resolved, module = build(scheme, **arguments)
    if not isinstance(module, PositionEmbedding):
        return None
    if resolved.limit is not None and length > resolved.limit:
        raise ValueError(f"{resolved.name} has {resolved.limit} positions, {length} were asked for")
    with torch.no_grad():
        return module.embed(torch.arange(length)[None])[0].double()


def parts(model: PreTrainedModel) -> Resolved:
    """Return the modules of a patched or stock model; UnsupportedModelError if its family is not supported."""
    return BaseModel.of(model).modules


@dataclass(frozen=True)
class Added:
    """The position vectors that a model adds to its hidden states, and the module that computes them.

    Attributes:
        module: the module, from the patch or the base.
        limit: number of positions that exist, or None if there is no limit.
        offset: number of unused rows of a base's table before position 0.
    """

    module: nn.Module
    limit: int | None
    offset: int = 0

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the vectors (T, E) of positions (T,), float64 on the CPU, with gradients to the parameters."""
        ids = positions.to(device_of(self.module))
        if isinstance(self.module, PositionEmbedding):
            vectors = self.module.embed(ids[None])[0]
        elif isinstance(self.module, nn.Embedding):
            vectors = self.module.weight[ids + self.offset]
        else:
            vectors = self.module(ids[None])[0]
        return vectors.double().cpu()


def added_to(model: PreTrainedModel) -> Added | None:
    """Return the position vectors that a patched or stock model adds, or None if it adds none.

    If layers have separate tables, they are those of the first layer.
    """
    base = BaseModel.of(model)
    found = base.modules
    patched = [holder._modules.get("posenc") for holder in (found.decoder, found.layers[0])]
    for module in (found.position_table, *patched):
        if isinstance(module, NoEmbedding):
            continue
        if isinstance(module, PositionEmbedding):
            patch = patch_of(model)
            return Added(module, patch.limit if patch else None)
        if isinstance(module, nn.Embedding):
            offset = base.family.table_offset
            return Added(module, module.num_embeddings - offset, offset)
        if module is found.position_table and module is not None:
            return Added(module, None)  # computes sinusoids, without a limit
    return None


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
    added = added_to(model)
    if added is None:
        return None
    if length is None:
        rows = added.limit or getattr(language_config(model.config), "max_position_embeddings", None)
        if not rows:
            raise ValueError(f"give a length: the config of this {type(model).__name__} does not say how many")
        length = min(rows, 2**16)
    if added.limit is not None and length > added.limit:
        raise ValueError(f"the model has {added.limit} position vectors, {length} were asked for")
    with torch.no_grad():
        return added(torch.arange(length))


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
    types = (
        getattr(language_config(model.config), "layer_types", None) if getattr(rotary, "layer_types", None) else None
    )
    return types[layer] if types else None


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


@contextmanager
def outputs(modules: Iterable[tuple[K, nn.Module]], see: Callable[[K, Any], object]) -> Iterator[None]:
    """Call a function with every output of some modules within a `with` block.

    Args:
        modules: pairs of a key and a module; keys can repeat.
        see: function that is called with the key and the output. If it returns something else than None, this replaces
            the output.
    """

    def hook(key: K) -> Callable[..., object]:
        return lambda module, args, output: see(key, output)

    with ExitStack() as hooks:
        for key, module in modules:
            hooks.callback(module.register_forward_hook(hook(key)).remove)
        yield


@contextmanager
def dense_attention(model: PreTrainedModel, see: Callable[[int, Tensor], None] | None = None) -> Iterator[None]:
    """Compute attention densely within a `with` block, and pass the attention weights to a function.

    Schemes on scores run in the reference engine, all other models in the family's eager attention. Both compute
    weights and have second derivatives.

    Args:
        model: a patched or stock model.
        see: function that every layer calls with its index and its weights (B, H, Q, L); None for none.
    """
    ours = language_config(model.config)._attn_implementation == NAME

    def take_reference(module: nn.Module, args: tuple[Call], kwargs: dict[str, object]) -> Any:
        return (replace(args[0], weights=True), partial(dispatch.attend, wanted="reference")), kwargs

    attentions = {
        index: attention.get_submodule("posenc") if ours else attention
        for index, attention in parts(model).attention_of.items()
    }
    with ExitStack() as stack:
        if not ours:
            stock = language_config(model.config)._attn_implementation
            model.set_attn_implementation("eager")
            stack.callback(model.set_attn_implementation, stock)
        for module in attentions.values() if ours else ():
            stack.callback(module.register_forward_pre_hook(take_reference, with_kwargs=True).remove)
        if see is not None:
            stack.enter_context(outputs(attentions.items(), lambda index, output: see(index, output[1])))
        yield


def check_tokens(tokens: Tensor, least: int) -> Tensor:
    """Return tokens as (B, T); ValueError if a text has fewer than `least` tokens."""
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or tokens.shape[1] < least:
        raise ValueError(f"tokens must be (T,) or (B, T) with T >= {least}, not {tuple(tokens.shape)}")
    return tokens
