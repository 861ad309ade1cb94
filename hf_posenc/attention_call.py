"""A call of attention as one object, passed from the attention function of transformers to the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .positions import DensePositions, Positions


class Formula(Protocol):
    """The formula of attention scores: a form, or the module of a scheme that has none."""

    def scores(self, call: Call) -> Tensor:
        """Return the scores of a widened call before masking, (B, H, Q, L)."""

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values (B, H, Q, V), from weights (B, H, Q, L) of a widened call."""


@dataclass(frozen=True)
class Call:
    """The arguments of an attention call: `B` rows, `H` query heads, `K` key-value heads, `Q` queries, `L` keys.

    Attributes:
        query: (B, H, Q, D).
        key: (B, K, L, D), cached keys included; K divides H.
        value: (B, K, L, V); V is D as a rule, and smaller in latent attention (MLA).
        positions: positions of these queries and keys, and which keys each query may see.
        scaling: factor of every term that contains the query, 1/sqrt(D) as a rule.
        vector_scaling: factor of terms without the query; None means `scaling`. They differ where the queries of the
            base model are already scaled.
        softcap: cap of scores that are products of vectors, `cap * tanh(score / cap)`; None means none.
        dropout: probability that an attention weight is dropped.
        weights: whether the caller wants the attention weights (B, H, Q, L).
        sinks: (H,) or None. A score per head beside those of the keys in the softmax; its share of the weights is
            dropped.
        module: the scheme's module, which has `scores` and `mix`; None until the call reaches it.
        form: how the scores depend on distance (`hf_posenc.forms`); None until the call reaches the module, and for
            schemes without a form.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions | DensePositions
    scaling: float
    vector_scaling: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    weights: bool = False
    sinks: Tensor | None = None
    module: Formula | None = None
    form: Any = None

    @property
    def formula(self) -> Formula:
        """The form, or without one the scheme's module: it has `scores` and `mix`."""
        formula = self.module if self.form is None else self.form
        assert formula is not None, "the call has not reached a scheme's module"
        return formula

    @property
    def groups(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def ratio(self) -> float:
        """Factor of terms without the query, relative to that of terms with it."""
        return 1.0 if self.vector_scaling is None else self.vector_scaling / self.scaling

    def widened(self) -> Call:
        """Return the call in float32 (float64 stays) with keys and values repeated to H heads."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        query, key, value = (each.to(dtype) for each in (self.query, self.key, self.value))
        if self.groups > 1:
            key, value = (each.repeat_interleave(self.groups, 1) for each in (key, value))
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        return replace(self, query=query, key=key, value=value, sinks=sinks)

    def distance(self) -> Tensor:
        """Return query position minus key position, integers (B|1, 1, Q, L), 0 where the key comes later."""
        return self.positions.distance().clamp(min=0)

    def query_position(self) -> Tensor:
        """Return the position of each query, counted from 0, integers (B|1, 1, Q, 1); 0 for padding.

        The model counts it, or `position_ids` give it: neither padding nor a sliding window nor a cache changes it.
        Under the user's own 4-D mask a query sits in the slot of the last key that it sees.
        """
        return self.positions.query_positions[:, None, :, None].clamp(min=0)

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, bool (B|1, 1|H, Q, L)."""
        return self.positions.visible()

    def distances(self) -> int:
        """Return how many distances, counted from 0, contain all that occur; reads values from the device.

        While compiling nothing is read. No distance exceeds the number of keys then, except between the caller's own
        position ids, which raise when the compiled code runs.
        """
        if not torch.compiler.is_compiling():
            return int(self.distance().amax()) + 1
        keys = self.key.shape[2]
        message = "position_ids with gaps cannot be compiled with a scheme that has a key for each distance"
        torch._assert_async((self.distance() < keys).all(), message)
        return keys

    def cap(self, scores: Tensor) -> Tensor:
        """Return scores with the model's soft cap, if it has one. A bias is added after it, like a mask."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the weights of masked scores (B, H, Q, L); with sinks a row sums to less than 1."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def products(self) -> Tensor:
        """Return the scores of attention without positions, (B, H, Q, L); of a widened call."""
        return self.cap(self.query @ self.key.mT * self.scaling)
