"""A call of attention as one object, passed from the attention function to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .dims import require_shape
from .dtypes import compute_dtype
from .positions import DensePositions, Positions


@dataclass(frozen=True)
class Call:
    """The arguments of an attention call: `B` rows, `H` query heads, `K` key-value heads, `Q` queries, `L` keys.

    Attributes:
        query: (B, H, Q, D).
        key: (B, K, L, D), cached keys included; K divides H.
        value: (B, K, L, V). Usually V is D; latent attention (MLA) has a smaller V.
        positions: positions of the queries and keys, and which keys each query may see.
        scaling: factor of every term that contains the query, usually 1/sqrt(D).
        vector_scaling: factor of terms without the query; None means `scaling`. The two differ if the base model scales
            its queries itself.
        softcap: soft cap of scores that are products of vectors, `cap * tanh(score / cap)`; None means no cap.
        dropout: probability that an attention weight is dropped.
        weights: whether the caller wants the attention weights (B, H, Q, L).
        sinks: (H,), or (B, H, Q), or None. One more score per head in the softmax; its weight is dropped.
        numbers: (B, H, L) or (B, H, L, N), or None. Numbers of the tokens of the keys, for the addition that made them.
        query_numbers: (B, H, Q, N) or None. Numbers of the tokens of the queries, for the module that made them.
        by_module: name of a module -> its `query_numbers`.
        log_gates: (B, H, L) or None. Logarithms of forget gates, one for each token of the keys. A score gets the sum
            over the visible tokens after its key.
        key_bias: (B, H, L) or None. Added to the score of each key, whatever the query, after a soft cap.
        base_bias: (B, H, Q, L) or None. The base's own positions, in layers that keep them, added after a soft cap.
        score_changes: functions of a call and its masked scores (B, H, Q, L), applied in turn. They return other
            scores; hidden keys stay hidden.
        normaliser: function of masked scores that returns weights, in place of the softmax; None means the softmax. A
            hidden key has a score below half the dtype's minimum, and must get the weight 0. Keys are in the order of
            their tokens; learned sinks (gpt_oss) are one more, the last, (B, H, Q, L + 1).
        weight_changes: functions of weights, applied in turn.
        output_changes: functions of the output (B, Q, H, V), applied in turn after any engine.
        module: the scheme's module, which has `scores` and `mix`; None until the call reaches the module.
        form: form of the scores (`hf_posenc.core.forms`); None until the call reaches the module, and for schemes
            without a form.
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
    numbers: Tensor | None = None
    log_gates: Tensor | None = None
    key_bias: Tensor | None = None
    base_bias: Tensor | None = None
    query_numbers: Tensor | None = None
    by_module: Mapping[str, Tensor] = field(default_factory=dict)
    score_changes: tuple[Callable[[Call, Tensor], Tensor], ...] = ()
    normaliser: Callable[[Tensor], Tensor] | None = None
    weight_changes: tuple[Callable[[Tensor], Tensor], ...] = ()
    output_changes: tuple[Callable[[Tensor], Tensor], ...] = ()
    module: Any = None
    form: Any = None

    @property
    def formula(self) -> Any:
        """What has `scores` and `mix`: the form, or the scheme's module if there is no form."""
        return self.module if self.form is None else self.form

    @property
    def groups(self) -> int:
        """Number of query heads per key-value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def ratio(self) -> float:
        """`vector_scaling / scaling`: the factor of terms without the query, relative to terms with it."""
        return 1.0 if self.vector_scaling is None else self.vector_scaling / self.scaling

    def widened(self) -> Call:
        """Return the widened call: in float32 (float64 stays), with keys and values repeated to H heads."""
        dtype = compute_dtype(self.query)
        query, key, value = self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)
        if (groups := self.groups) > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        return replace(self, query=query, key=key, value=value, sinks=sinks)

    def cut(self, queries: slice | Tensor, keys: slice | Tensor) -> Call:
        """Return the call for some of its queries and keys, given as slices or indices (N,)."""
        by_key = (self.numbers, self.log_gates, self.key_bias)
        numbers, log_gates, key_bias = (None if each is None else each[:, :, keys] for each in by_key)
        own, sinks, base = self.query_numbers, self.sinks, self.base_bias
        return replace(
            self,
            query=self.query[:, :, queries],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            positions=self.positions.cut(queries, keys),
            numbers=numbers,
            log_gates=log_gates,
            key_bias=key_bias,
            base_bias=None if base is None else base[:, :, queries][..., keys],
            sinks=sinks if sinks is None or sinks.ndim == 1 else sinks[:, :, queries],
            query_numbers=None if own is None else own[:, :, queries],
            by_module={name: each[:, :, queries] for name, each in self.by_module.items()},
        )

    def distance(self) -> Tensor:
        """Return query position minus key position, (B|1, 1, Q, L); 0 for keys that come later.

        Distances are integers. Between real positions they have the dtype in which scores are computed, so that they
        do not change that of the scores.
        """
        distance = self.positions.distance().clamp(min=0)
        return distance.to(compute_dtype(self.query)) if self.positions.real else distance

    @property
    def has_key_positions(self) -> bool:
        """Whether a distance is a difference of positions: not from several queries to first tokens that are kept."""
        positions = self.positions
        return isinstance(positions, DensePositions) or positions.key_kept is None or self.query.shape[2] == 1

    def key_positions(self) -> Tensor:
        """Return the position of each key, (B|1, L), if `has_key_positions`."""
        positions = self.positions
        if isinstance(positions, DensePositions) or positions.key_kept is None:
            return positions.key_positions
        return positions.query_positions[:, -1:] - positions.distance()[:, 0, -1]

    def query_position(self) -> Tensor:
        """Return the position of each query, counted from 0, (B|1, 1, Q, 1), in a dtype as `distance`; 0 for padding.

        The model counts positions, or takes them from `position_ids`. Padding, sliding windows and caches do not change
        them. Under the user's own 4-D mask the position of a query is the slot of the last key that it sees.
        """
        position = self.positions.query_positions[:, None, :, None].clamp(min=0)
        return position.to(compute_dtype(self.query)) if self.positions.real else position

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, bool (B|1, 1|H, Q, L)."""
        return self.positions.visible()

    def distances(self) -> int:
        """Return the largest distance plus 1; this reads from the device.

        While compiling, return the number of keys and read nothing. Only the caller's own position ids can make larger
        distances. They raise an error when the compiled code runs.
        """
        if not torch.compiler.is_compiling():
            return int(self.distance().amax()) + 1
        keys = self.key.shape[2]
        message = "position_ids with gaps cannot be compiled with a scheme that has a key for each distance"
        torch._assert_async((self.distance() < keys).all(), message)
        return keys

    def gate_bias(self) -> Tensor:
        """Return the sum of `log_gates` over the visible tokens after each key, (B, H, Q, L).

        A sum begins at the query. So the sums of near keys keep their digits, however many tokens come before.
        """
        assert self.log_gates is not None
        hidden = self.positions.once("hidden", lambda: ~self.visible())
        gates = self.log_gates[:, :, None].masked_fill(hidden, 0)
        return torch.nn.functional.pad(gates[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)

    @property
    def has_token_bias(self) -> bool:
        """Whether numbers of tokens are added to scores: forget gates, biases of keys, or the base's own bias."""
        return any(each is not None for each in (self.log_gates, self.key_bias, self.base_bias))

    def token_bias(self) -> Tensor:
        """Return what numbers of tokens add to scores, (B, H, Q, L), if `has_token_bias`."""
        bias = None if self.key_bias is None else self.key_bias[:, :, None].expand(-1, -1, self.query.shape[2], -1)
        if self.log_gates is not None:
            bias = self.gate_bias() if bias is None else bias + self.gate_bias()
        if self.base_bias is not None:
            bias = self.base_bias if bias is None else bias + self.base_bias
        assert bias is not None
        return bias

    def scores(self) -> Tensor:
        """Return the scores of a widened call before masking, (B, H, Q, L)."""
        scores = require_shape(
            self.formula.scores(self),
            (*self.query.shape[:3], self.key.shape[2]),
            f"the scores of {type(self.formula).__name__}, (B, H, Q, L),",
        )
        return scores + self.token_bias() if self.has_token_bias else scores

    def mix(self, weights: Tensor) -> Tensor:
        """Return the weighted sum of values (B, H, Q, V) of a widened call, from weights (B, H, Q, L)."""
        wanted = (*self.query.shape[:3], self.value.shape[-1])
        mixed = self.formula.mix(self, weights)
        return require_shape(mixed, wanted, f"the sum of {type(self.formula).__name__}, (B, H, Q, V),")

    def cap(self, scores: Tensor) -> Tensor:
        """Apply the model's soft cap, if it has one, to scores. Add a bias after the cap, as a mask."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @property
    def changes_weights(self) -> bool:
        """Whether weights are something else than the softmax of scores."""
        return bool(self.normaliser or self.score_changes or self.weight_changes)

    def final_scores(self, scores: Tensor) -> Tensor:
        """Return masked scores (B, H, Q, L) as the softmax takes them: changed, and with sinks as one more key."""
        for change in self.score_changes:
            least = torch.finfo(scores.dtype).min
            scores = change(self, scores).masked_fill(scores < least / 2, least)
        if self.sinks is None:
            return scores
        sinks = self.sinks[:, None] if self.sinks.ndim == 1 else self.sinks
        sinks = sinks.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1)

    def normalise(self, scores: Tensor) -> Tensor:
        """Return the attention weights of `final_scores`, of their shape."""
        weights = scores.softmax(-1) if self.normaliser is None else self.normaliser(scores)
        for change in self.weight_changes:
            weights = change(weights)
        return weights

    def weigh(self, scores: Tensor) -> Tensor:
        """Return the attention weights of masked scores (B, H, Q, L). With sinks a row sums to less than 1."""
        weights = self.normalise(self.final_scores(scores))
        return weights if self.sinks is None else weights[..., :-1]

    def products(self) -> Tensor:
        """Return the scores of a widened call without positions, (B, H, Q, L)."""
        return self.cap(self.query @ self.key.mT * self.scaling)
