"""Modules with position parameters: on an attention, in front of a layer, or in place of the base's positions.

Call them through `forward` only, because PEFT, FSDP and offloading hook nothing else. They have no buffers, because the
meta device would lose them. `transformers.initialization` starts their parameters, because it keeps loaded values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attention_call import Call
from .dims import require_shape
from .dtypes import sinusoids
from .forms import Content, Form, LinearVectors
from .positions import require_whole

ON_ATTENTION = "posenc"
"""Name of the child of an attention that computes its scores."""


@dataclass(frozen=True)
class Native:
    """The base model's own positions, for modules that start from them.

    Attributes:
        table: (num_positions, E) the base's own table of positions, or None.
        token_rms: computes the root mean square of the token embeddings as they enter the first layer.
        max_positions: number of positions in the base's config; None if the config does not say.
    """

    table: Tensor | None
    token_rms: Callable[[], float]
    max_positions: int | None

    @cached_property
    def rms(self) -> float:
        """Root mean square of the table, or of the token embeddings; 0 on the meta device."""
        if self.table is None:
            return self.token_rms()
        return 0.0 if self.table.is_meta else self.table.double().square().mean().sqrt().item()


class PositionModule(nn.Module):
    """A module with position parameters."""

    def reset_parameters(self) -> None:
        """Initialise the parameters through `transformers.initialization`, which keeps loaded values."""


class ScoreModule(PositionModule):
    """Formula of the attention scores, as the child `posenc` of an attention module.

    If `hf_posenc.core.forms` has the formula, return it from `form`: then every engine that takes this form computes
    the attention. Otherwise define `scores`, and `mix` if the weighted sum of values changes: then only engines that
    take every formula do. With neither, this is attention without positions.

    Its child `queries`, if it has one, makes numbers of hidden states, as that of a `TokenModule`.

    Attributes:
        real: whether the formula is defined between whole distances too. Otherwise `position_ids` that are real numbers
            are refused.
    """

    real: ClassVar[bool] = False
    queries: nn.Module

    def forward(
        self, call: Call, attend: Callable[[Call], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Hand the call to an engine, with this module and its form.

        Args:
            call: the attention call.
            attend: computes the call.

        Returns:
            output (B, Q, H, D) in the query's dtype, and the weights (B, H, Q, L) if the call wants them.

        Raises:
            ValueError: if the positions are real numbers, and the formula has whole distances only; or if tensors of
                the form are not for H heads.
        """
        self.check_positions(call)
        output, weights = attend(self.prepared(call))
        for change in call.output_changes:
            output = require_shape(change(output), tuple(output.shape), "a changed output, (B, Q, H, V),")
        return output.to(call.query.dtype), None if weights is None else weights.to(call.query.dtype)

    def prepared(self, call: Call) -> Call:
        """Return the call that an engine computes: with this module and its form, or with other queries and keys.

        A module that overrides it, for other queries and keys, lets `scores` return those of the prepared call.
        """
        form = self.form(call.query)
        if form is not None:
            form = form.checked(call.query.shape[1], type(self).__name__)
        return replace(call, module=self, form=form, query_numbers=call.by_module.get(ON_ATTENTION))

    def check_positions(self, call: Call) -> None:
        """Raise ValueError if the positions of a call are real numbers, and the formula has whole distances only."""
        if not self.real:
            require_whole(call.positions.query_positions, f"the scheme of this layer ({type(self).__name__})")

    def form(self, like: Tensor) -> Form | None:
        """Return the form of the scores, or None if no form describes them.

        Args:
            like: tensor with the device of the form, and with the dtype from which `compute_dtype` chooses.
        """
        return None

    def linear_vectors(self, distances: Tensor, like: Tensor) -> LinearVectors | None:
        """Return the parameters that the form's vectors by distance, or its bias, are linear in, or None.

        Calibration then solves for them. Without this it searches for them.

        Args:
            distances: integers (N,).
            like: tensor with the device and dtype of the features.
        """
        return None

    def rotates(self, heads: int) -> Tensor | None:
        """Return which of the base's pairs of dimensions the formula rotates as the base does, or None for no pairs.

        Args:
            heads: H.

        Returns:
            Bool (H, pairs), on the CPU.
        """
        return None

    def scores(self, call: Call) -> Tensor:
        """Return the scores before masking, (B, H, Q, L).

        Args:
            call: a widened call: float32 or float64, with keys repeated to H heads. Invisible keys (`call.visible()`)
                are masked afterwards.
        """
        return call.products()

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values, (B, H, Q, D), from weights (B, H, Q, L) of a widened call."""
        return weights @ call.value


class QueryModule(PositionModule):
    """Changes an attention call before the scores are computed: its queries and keys, or what it makes of scores."""

    def forward(self, call: Call) -> Call:
        """Return the call with other queries, or keys, or with one more of its functions (`Call.score_changes`).

        Such a function may hold tensors of parameters, but must not read parameters when it is called.

        Args:
            call: the attention call. Its queries and keys are rotated where the layer rotates. The keys are all that
                the cache holds. The cache keeps them as they arrive here.
        """
        raise NotImplementedError(type(self).__name__)


class TokenModule(QueryModule):
    """Changes an attention call by numbers that it makes of the hidden states that enter the attention.

    Its child `tokens` maps hidden states (B, T, E) to numbers for each head and token, in float32 or float64. They stay
    beside the keys in the cache. In `forward`, `call.numbers` are those of the call's keys. Its child `queries` makes
    numbers of the queries, (B, H, T, N), which no cache keeps. In `forward` they are `call.query_numbers`, (B, H, Q,
    N). A module has one of the two children, or both.

    Attributes:
        width: how many numbers `tokens` makes for each head and token: (B, H, T) for one, and (B, H, T, N) for more.
    """

    width: int = 1
    tokens: nn.Module
    queries: nn.Module


class Additions(nn.Module):
    """The child `posenc_additions` of an attention module: modules that change its calls, one after the other."""

    def token_modules(self) -> dict[str, nn.Module]:
        """Return name of an addition -> its child `tokens`, for the additions that use numbers of tokens."""
        children = {name: getattr(addition, "tokens", None) for name, addition in self.named_children()}
        return {name: tokens for name, tokens in children.items() if tokens is not None}

    def widths(self) -> list[int]:
        """Return how many numbers each of `token_modules` makes for a head and token."""
        return [int(getattr(self, name).width) for name in self.token_modules()]

    def forward(self, call: Call, numbers: Tensor | None = None) -> Call:
        """Return the call that the attention shall compute.

        Args:
            call: the attention call.
            numbers: (B, H, L, N) for additions that use N numbers of tokens; None without such additions.
        """
        parts = () if numbers is None else numbers.split(self.widths(), -1)
        made = dict(zip(self.token_modules(), parts, strict=bool(parts)))
        for name, addition in self.named_children():
            own = made.get(name)
            own = own[..., 0] if own is not None and own.shape[-1] == 1 else own
            changed = addition(replace(call, numbers=own, query_numbers=call.by_module.get(name)))
            if call.normaliser is not None and changed.normaliser is not call.normaliser:
                raise ValueError(f"{name} replaces the softmax, and so does another scheme of the layer: take one")
            for part in ("query", "key", "value"):
                wanted = tuple(getattr(call, part).shape)
                require_shape(getattr(changed, part), wanted, f"the {part} that {name} returns")
            for part in ("log_gates", "key_bias"):
                if (each := getattr(changed, part)) is not None:
                    require_shape(each, (*call.query.shape[:2], call.key.shape[2]), f"{part} of {name}, (B, H, L),")
            call = changed
        return replace(call, query_numbers=None)


def query_modules(attention: nn.Module) -> dict[str, nn.Module]:
    """Return name of a module of an attention -> its child `queries`, for those that use numbers of the queries."""
    posenc, additions = (attention._modules.get(name) for name in (ON_ATTENTION, "posenc_additions"))
    modules = {ON_ATTENTION: posenc, **({} if additions is None else dict(additions.named_children()))}
    children = {name: getattr(owner_of(module), "queries", None) for name, module in modules.items()}
    return {name: queries for name, queries in children.items() if queries is not None}


class WithoutPositions(ScoreModule):
    """Attention without a scheme on its scores: only the mask tells positions."""

    real = True

    def form(self, like: Tensor) -> Content:
        """Return the form without distances, see `ScoreModule.form`."""
        return Content()


class PositionEmbedding(PositionModule):
    """Maps positions to vectors that are added to the hidden states.

    `like`, if set, refers to the token embedding. The vectors take the dtype of its weight.
    """

    like: Reference | None = None

    def forward(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return one vector per position.

        The module may replace a base's own table, so it takes the same arguments. GPT-2 passes the positions first. OPT
        passes a mask first, and `position_ids` by name. Padding (negative positions in OPT) gets position 0; the
        decoder refuses other negative positions.

        Args:
            *args: first the position ids (B|1, T), unless they come by name.
            position_ids: (B|1, T).
            **kwargs: ignored.

        Returns:
            (B|1, T, E).
        """
        ids = args[0] if position_ids is None else position_ids
        vectors = require_shape(
            self.embed(ids.clamp(min=0)), (*ids.shape, None), f"the vectors of {type(self).__name__}, (B|1, T, E),"
        )
        return vectors if self.like is None else vectors.to(self.like().weight.dtype)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the vectors (B|1, T, E) of positions (B|1, T) >= 0."""
        raise NotImplementedError(type(self).__name__)

    def initialize(self, native: Native) -> None:
        """Initialise the parameters from the base model, in place of `reset_parameters`."""
        self.reset_parameters()


class Rotation(PositionModule):
    """Computes cosines and sines that rotate pairs of dimensions of queries and keys."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each of `[angles | angles]`, as transformers' rotary modules do.

        Args:
            x: tensor with the dtype of the result.
            position_ids: (B|1, T), or (N, B, T) with N equal coordinates.
            *args: further arguments of some families, ignored.
            **kwargs: further arguments of some families, ignored.

        Returns:
            Cosines and sines, (B|1, T, 2 F) each, for F pairs.
        """
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids
        frequencies = self.frequencies(position_ids.device)
        require_shape(frequencies, (None,), f"the frequencies of {type(self).__name__}, (F,),")
        sines, cosines = sinusoids(position_ids, frequencies)
        return torch.cat([cosines, cosines], -1).to(x.dtype), torch.cat([sines, sines], -1).to(x.dtype)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per token of each rotated pair, (F,) in radians, with F at most D / 2."""
        raise NotImplementedError(type(self).__name__)


class Reference:
    """Reference to the child `name` of a module `parent`. Each call looks the child up.

    torch does not register it as a child, so the module is saved and sharded once. If a wrapper (PEFT) has replaced the
    child, a call returns the wrapper. A deep copy refers to the same module, unless the parent is copied as well.
    """

    def __init__(self, parent: nn.Module, name: str) -> None:
        """Refer to a child.

        Args:
            parent: the module that owns the child.
            name: name of the child in `parent`.
        """
        self.parent = parent
        self.name = name

    def __call__(self) -> Any:
        """Return the module."""
        return getattr(self.parent, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        """Refer to the copied parent if the parent is being copied, too."""
        return Reference(memo.get(id(self.parent), self.parent), self.name)


class Shared(nn.Module):
    """Stand-in for a module that another module owns, so that its parameters are saved once."""

    def __init__(self, owner: Reference) -> None:
        """Refer to a module without registering it.

        Args:
            owner: reference to the module to call.
        """
        super().__init__()
        self.owner = owner

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the shared module."""
        return self.owner()(*args, **kwargs)


def position_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameter name -> parameter, for the parameters of schemes in a model."""
    modules = modules_of_schemes(model)
    return {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] in modules}


def modules_of_schemes(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module, for the modules of schemes in a model and for all modules inside them."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # a parent comes before its children
        if isinstance(module, PositionModule) or (name and name.rpartition(".")[0] in found):
            found[name] = module
    return found


def owner_of(module: object) -> Any:
    """Return the module that layers share, from the stand-in of one layer; any other module itself.

    Args:
        module: the module of a layer, or PEFT's wrapper around it, which hands attributes on.
    """
    owner = getattr(module, "owner", None)
    return owner() if isinstance(owner, Reference) else module


def by_head(numbers: Tensor, distance: Tensor) -> Tensor:
    """Reshape one number per head (H,) so that it broadcasts with distances: append their number of dimensions."""
    return numbers.view(-1, *[1] * distance.ndim)


def parameter(*shape: int) -> nn.Parameter:
    """Return an uninitialised parameter of this shape, in torch's default dtype."""
    return nn.Parameter(torch.empty(*shape))
