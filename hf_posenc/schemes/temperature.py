"""Temperature: a factor on the queries, which sharpens attention as the context grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import QueryModule, parameter
from ..core.registry import register_scheme
from .base import QueryScheme, init

if TYPE_CHECKING:
    from ..model.base_model import BaseModel

CONSTANT, LOG_N, LLAMA4, SCALABLE = "constant", "log_n", "llama4", "scalable"

KINDS = (CONSTANT, LOG_N, LLAMA4, SCALABLE)
"""Values of `kind`."""

LLAMA4_STRENGTH = 0.1
"""Strength in Llama 4."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Temperature(QueryScheme):
    """A factor on the queries that grows with their position. It acts beside the positions that a layer has.

    With more keys a softmax gets flatter. A factor on the logits keeps it sharp. `n = i + 1` is the number of tokens
    up to the query, `L` is `length`, and `s` is `strength`.

    Equation: `softmax_j(t_i q_i . k_j / sqrt(D))`, beside the scheme that the layer has. By `kind`, `t_i` is

    - `constant`: `s`;
    - `log_n`: `1 + s max(0, ln n / ln L - 1)`. With `s = 1` this is `max(1, ln n / ln L)`;
    - `llama4`: `1 + s ln(1 + floor(n / L))`;
    - `scalable`: `s ln n`.

    Beyond the training length: no limit; made for it. `log_n` and `llama4` are 1, and change nothing, for `n < L`.
    Deviations: the factor multiplies every term that contains the query, and no bias. The product is rounded to the
    query's dtype, as in Llama 4. The papers' `n` is the number of keys; here a window or padding does not change it.
    `scalable` has the paper's `s` for each head, and starts at `1 / ln L`. A soft cap on scores (Gemma 2) acts after
    the factor.
    Source: `log_n`: Chiang, Cholak 2022, arXiv:2202.12172, with the clip of Qwen's code; `llama4`: the code of Llama 4
    in transformers; `scalable`: Nakanishi 2025, arXiv:2501.19399, equation (3).

    Args:
        kind: one of `constant`, `log_n`, `llama4`, `scalable`.
        strength: the number `s`, or one for each head; None means 1, for `llama4` 0.1, for `scalable` `1 / ln L`.
        length: `L` in tokens, at least 2; None means the length at which the base was trained. Llama 4 has 8192.
            `constant` has none.
        trainable: train `strength`, one number for each head; None does so for `scalable` only.
        share_heads: train one number for all heads.
        share_layers: all layers share one trained `strength`.
    """

    name: ClassVar[str] = "temperature"
    kind: str = field(default=LOG_N, kw_only=False)
    strength: float | tuple[float, ...] | None = None
    length: int | None = None
    trainable: bool | None = None
    share_heads: bool = False
    share_layers: bool = False

    def __post_init__(self) -> None:
        self.one_of("kind", KINDS)
        self.flags("share_heads", "share_layers")
        if self.trainable is not None:
            self.flags("trainable")
        if self.length is not None:
            self.number("length", lambda length: length >= 2, "at least 2", int)
            if self.kind == CONSTANT:
                raise ValueError("temperature: a constant factor has no length: leave it out, or take another kind")
        if (self.share_heads or self.share_layers) and not self.is_trained:
            shared = "share_heads" if self.share_heads else "share_layers"
            raise ValueError(f"temperature: {shared}=True is about trained numbers: give trainable=True too")
        if self.strength is None:
            return
        listed = isinstance(self.strength, (tuple, list))
        self.number("strength", lambda s: 0 <= s < math.inf, "finite and not negative", listed=listed)
        if self.share_heads and listed:
            raise ValueError("temperature: share_heads=True takes one strength for all heads, not a list")

    @property
    def is_trained(self) -> bool:
        """Whether `strength` is a parameter."""
        return self.kind == SCALABLE if self.trainable is None else self.trainable

    def answers(self, layer: int, base: BaseModel) -> bool:
        return self.kind != CONSTANT

    def check(self, dims: Dims) -> None:
        """Raise ValueError unless there is one strength, or one per head."""
        if isinstance(self.strength, tuple) and len(self.strength) != dims.num_heads:
            raise ValueError(f"temperature: {len(self.strength)} strengths were given for {dims.num_heads} heads")

    def with_length(self, length: int | None) -> Temperature:
        """Return the scheme with every None filled in; ValueError if there is no length."""
        wanted = None if self.kind == CONSTANT else self.length or length
        if wanted is None and self.kind != CONSTANT:
            raise ValueError(
                "temperature: the config of this model does not say at which length it was trained: give length=..."
            )
        defaults = {CONSTANT: 1.0, LOG_N: 1.0, LLAMA4: LLAMA4_STRENGTH, SCALABLE: 1 / math.log(wanted or 2)}
        return replace(
            self,
            length=wanted,
            strength=defaults[self.kind] if self.strength is None else self.strength,
            trainable=self.is_trained,
        )

    @property
    def acts_from(self) -> int:
        return {LOG_N: (self.length or 0) + 1, LLAMA4: self.length or 0}.get(self.kind, 0)

    def build(self, dims: Dims) -> QueryModule:
        fitted = self.with_length(self.length)
        assert fitted.strength is not None
        numbers = 1 if self.share_heads else dims.num_heads
        strengths = fitted.strength if isinstance(fitted.strength, tuple) else (fitted.strength,) * numbers
        return QueryFactor(self.kind, strengths, fitted.length, fitted.is_trained)


class QueryFactor(QueryModule):
    """The module of `temperature`, with a parameter `strength` (H,) or (1,) if it is trained."""

    def __init__(self, kind: str, start: tuple[float, ...], length: int | None, trainable: bool) -> None:
        """Store the strengths.

        Args:
            kind: one of `KINDS`.
            start: H strengths or one, the start values if they are trained.
            length: `L` in tokens; None only for `constant`.
            trainable: whether the strengths are a parameter.
        """
        super().__init__()
        self.kind = kind
        self.start = start
        self.length = length or 2
        self.strength = parameter(len(start)) if trainable else None

    def reset_parameters(self) -> None:
        """Start at the strengths `start`."""
        if self.strength is not None:
            init.copy_(self.strength, torch.tensor(self.start, dtype=torch.float64).to(self.strength))

    def factor(self, position: Tensor, like: Tensor) -> Tensor:
        """Return the factor of queries at these positions, (B|1, H|1, Q, 1), in float32, or float64 if `like` is.

        Args:
            position: (B|1, 1, Q, 1), counted from 0.
            like: tensor with the device and the dtype of the queries.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        start = torch.tensor(self.start, dtype=dtype, device=like.device) if self.strength is None else self.strength
        strength = start.to(dtype).view(1, -1, 1, 1)
        tokens = position.to(dtype) + 1
        if self.kind == CONSTANT:
            return strength.expand(len(position), -1, position.shape[2], -1)
        if self.kind == SCALABLE:
            return strength * tokens.log()
        if self.kind == LLAMA4:
            return 1 + strength * (tokens / self.length).floor().log1p()
        return 1 + strength * (tokens.log() / math.log(self.length) - 1).clamp(min=0)

    def forward(self, call: Call) -> Call:
        query = call.query
        return replace(call, query=(query * self.factor(call.query_position(), query)).to(query.dtype))
