"""What a scheme is: hyper-parameters (a frozen dataclass) and, where it has parameters, a module that carries them.

Notation everywhere in this package: `B` batch, `H` query heads, `K` key-value heads, `Q`, `L` query and key length, `D`
head size, `E` hidden size, `N` layers; `d = i - j >= 0` distance of query `i` from key `j`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..call import Call
from ..forms import Form


@dataclass(frozen=True)
class Dims:
    """Sizes of the attention that a scheme is built for."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    num_layers: int


@dataclass(frozen=True)
class Native:
    """What the base model used before, for schemes that start from it.

    Attributes:
        table: (num_positions, E) the base's own table of positions, or None.
        token_rms: root mean square of the token embeddings as they enter the first layer.
        max_positions: the length the base was configured for.
    """

    table: Tensor | None
    token_rms: float
    max_positions: int


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Hyper-parameters of a position encoding; each field is one, and is written to the checkpoint."""

    name: ClassVar[str]
    """Registered name."""

    kind: ClassVar[Literal["none", "embedding", "rotary", "score"]]
    """Where the scheme acts: nowhere, on the hidden states, on queries and keys, on the attention scores."""

    def hyperparameters(self) -> dict[str, Any]:
        """Return every hyper-parameter by name, as values that JSON can hold."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @property
    def limit(self) -> int | None:
        """Number of positions that exist, or None if there is no limit."""
        return None

    def resolve(self, native: Native, dims: Dims) -> Scheme:
        """Return the scheme with every choice that depends on the base model made; ValueError if it cannot be."""
        return self

    def one_of(self, field: str, choices: tuple[str, ...]) -> None:
        """Raise ValueError, naming the choices, unless the field has one of the given values."""
        if getattr(self, field) not in choices:
            raise ValueError(f"{self.name}: {field} must be one of {', '.join(choices)}, not {getattr(self, field)!r}")

    def positive(self, field: str, kind: Any = (int, float)) -> None:
        """Raise TypeError or ValueError unless the field is a number of this kind above 0."""
        value: Any = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "an integer" if kind is int else "a number"
            raise TypeError(f"{self.name}: {field} must be {wanted}, not {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{self.name}: {field} must be positive and finite, not {value!r}")

    def flags(self, *names: str) -> None:
        """Raise TypeError unless each of the fields is a bool."""
        for field in names:
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{self.name}: {field} must be True or False, not {getattr(self, field)!r}")

    @classmethod
    def parse(cls, hyperparameters: dict[str, Any]) -> Scheme:
        """Build the scheme from keyword arguments or a checkpoint's entry; TypeError names unknown ones."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(hyperparameters) - set(known))
        if unknown:
            raise TypeError(
                f"{cls.name} has no hyper-parameter {', '.join(unknown)}; it has "
                f"{', '.join(known) if known else 'none'}"
            )
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in hyperparameters.items()})


class PositionModule(nn.Module):
    """A module with position parameters. Called through `forward` only: PEFT, FSDP and offloading see nothing else."""

    def reset_parameters(self) -> None:
        """Start the parameters through `transformers.initialization`, which leaves loaded values alone."""


class ScoreModule(PositionModule):
    """Sits on an attention module as `posenc`, and has the formula of the attention scores.

    A scheme whose scores depend on the distance in one of the ways in `hf_posenc.forms` says so in `form`, and gets
    every engine that takes this form. Any other scheme writes out `scores`, and `mix` if it also changes what is
    summed, and runs on the engines that take every formula. Without either, this is attention without positions.
    """

    def forward(
        self, call: Call, attend: Callable[[Call], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            call: what is to be computed.
            attend: computes it.

        Returns:
            output (B, Q, H, D) in the query's dtype, and the weights (B, H, Q, L) if the call wants them.
        """
        return attend(replace(call, module=self, form=self.form(call.query)))

    def form(self, like: Tensor) -> Form | None:
        """Return how the scores depend on distance, or None if that is no form.

        Args:
            like: has the device, and the dtype beside which positions are computed (`compute_dtype`).
        """
        return None

    def scores(self, call: Call) -> Tensor:
        """Return the scores before masking, (B, H, Q, L).

        Args:
            call: widened: float32 or float64, keys repeated to H heads. What a query does not see (`call.visible()`) is
                masked afterwards.
        """
        return call.products()

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values, (B, H, Q, D), from weights (B, H, Q, L) of a widened call."""
        return weights @ call.value


class PositionEmbedding(PositionModule):
    """Turns positions into vectors that are added to the hidden states.

    `like`, where set, refers to the token embedding: the vectors take the dtype of its weight.
    """

    like: Reference | None = None

    def forward(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return one vector per position.

        It may stand in for a base's own table, so it takes what those are called with: GPT-2 passes the positions
        first, OPT passes a mask first and `position_ids` by name. Positions of padding (negative in OPT) count as 0.

        Args:
            *args: position ids (B|1, T) first, unless given by name.
            position_ids: (B|1, T).
            **kwargs: ignored.

        Returns:
            (B|1, T, E).
        """
        ids = args[0] if position_ids is None else position_ids
        vectors = self.embed(ids.clamp(min=0))
        return vectors if self.like is None else vectors.to(self.like().weight.dtype)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the vectors (B|1, T, E) of positions (B|1, T) >= 0."""
        raise NotImplementedError(type(self).__name__)

    def initialize(self, native: Native) -> None:
        """Start from the base model; afterwards `reset_parameters` has nothing to do."""
        self.reset_parameters()


class ScoreScheme(Scheme):
    """A scheme that changes attention scores: needs our attention function."""

    kind: ClassVar = "score"

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the hyper-parameters do not fit these sizes."""

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of one attention layer, parameters uninitialised until `reset_parameters`."""
        raise NotImplementedError(type(self).__name__)

    def build_shared(self, dims: Dims) -> PositionModule | None:
        """Return what all layers share (owned once by the model), or None."""
        return None

    def attach_shared(self, module: ScoreModule, shared: Reference) -> nn.Module:
        """Return what goes on the attention, given its own module and a reference to the shared one."""
        return Shared(shared)


class EmbeddingScheme(Scheme):
    """A scheme that adds vectors to the hidden states, before the first layer or before every layer."""

    kind: ClassVar = "embedding"

    def place(self) -> tuple[bool, bool]:
        """Return whether to add before every layer, and whether the layers share one module."""
        raise NotImplementedError(type(self).__name__)

    def build(self, dims: Dims) -> PositionEmbedding:
        """Return the module that makes the vectors."""
        raise NotImplementedError(type(self).__name__)


class Reference:
    """Points at a module that is owned elsewhere: the child called `name` of `parent`, looked up at each call.

    It is not registered, so that what it points at is saved and sharded once. It finds what a wrapper (PEFT) has put
    in the child's place. A copy of what holds it points at the same module, unless the parent is copied as well.
    """

    def __init__(self, parent: nn.Module, name: str) -> None:
        """Point at a child.

        Args:
            parent: the module that owns it.
            name: its attribute there.
        """
        self.parent = parent
        self.name = name

    def __call__(self) -> Any:
        """Return the module."""
        return getattr(self.parent, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        """Point into the copied model where the whole model is being copied."""
        return Reference(memo.get(id(self.parent), self.parent), self.name)


class Shared(nn.Module):
    """Calls a module that is owned elsewhere, so that its parameters stay one object, saved once."""

    def __init__(self, owner: Reference) -> None:
        """Refer to a module without registering it.

        Args:
            owner: what to call.
        """
        super().__init__()
        self.owner = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the owner."""
        return self.owner()(*args, **kwargs)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which positions are computed beside this tensor: float64 for float64, else float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for angles: float64, or float32 on MPS, which has nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def geometric_frequencies(size: int, base: float, device: torch.device) -> Tensor:
    """Return `w_u = base^(-2u/size)` in radians per token, u from 0: (ceil(size / 2),), in `wide_dtype`."""
    return base ** -(torch.arange(0, size, 2, dtype=wide_dtype(device), device=device) / size)


def sinusoids(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of position times frequency.

    Angles are formed in `wide_dtype`: at position 100,000 a float32 product is wrong by up to 0.004 radians.

    Args:
        positions: integers of any shape (...).
        frequencies: (F,) in radians per token; gradients flow to them.

    Returns:
        sines and cosines, (..., F), in `wide_dtype`.
    """
    wide = wide_dtype(positions.device)
    angles = positions[..., None].to(wide) * frequencies.to(wide)
    return angles.sin(), angles.cos()


def parameter(*shape: int) -> nn.Parameter:
    """Return an uninitialised parameter of this shape, in torch's default dtype."""
    return nn.Parameter(torch.empty(*shape))


__all__ = [
    "Dims",
    "EmbeddingScheme",
    "Native",
    "PositionEmbedding",
    "PositionModule",
    "Reference",
    "Scheme",
    "ScoreModule",
    "ScoreScheme",
    "Shared",
    "compute_dtype",
    "geometric_frequencies",
    "init",
    "parameter",
    "sinusoids",
    "wide_dtype",
]
