"""QK norm: queries and keys of one size, so that scores depend on their directions alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.errors import UnsupportedModelError
from ..core.modules import QueryModule, parameter
from ..core.registry import register_scheme
from .base import QueryScheme, Scheme, init

if TYPE_CHECKING:
    from ..model.base_model import BaseModel

HEAD, ALL_HEADS = "head", "all_heads"

OVER = (HEAD, ALL_HEADS)
"""Values of `over`."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class QKNorm(QueryScheme):
    """Queries and keys divided by a power of their norm, beside a layer's positions. The trained exponent starts at 0.

    Equation: `q_i -> g_h q_i (ms(q_i) + eps)^(-a_h / 2)` and `k_j -> k_j (ms(k_j) + eps)^(-b_k / 2)`, where `ms` is the
    mean square over a head, or over all heads. With `a = b = 1` this is the root mean square norm of Qwen3 (over a
    head) or of OLMo 2 (over all heads).
    Neutral start: with `a = b = 0` and `g = 1`, the default, queries and keys keep every bit. Logits then differ by 0
    from those of the model without the norm, if both attend by the same engine. Training moves all three.
    Place: it acts after the rotation, on all keys that the cache holds, and the cache keeps the keys as they were. So a
    cached key and a recomputed one are the same. A rotation keeps the mean square, so the norm is the same before it
    and after it. It acts before a `temperature`, in whatever order both are given.
    Beyond the training length: no limit; it does not depend on positions. DroPE norms queries and keys when it trains
    a model whose positions were dropped.
    Deviations: `g` is one number per query head. Qwen3 and OLMo 2 have one for each dimension, of queries and of keys,
    and multiply by them before the rotation; only equal ones commute with it. The norm divides the attention factor of
    YaRN and longrope out. The exponents are this package's own, for the neutral start. A layer whose queries the base
    norms itself is refused: there a second norm would change next to nothing.
    Source: Henry, Dachapally, Pawar, Chen 2020, arXiv:2010.04245; Team OLMo 2024, arXiv:2501.00656 (over all heads);
    Yang et al. 2025, arXiv:2505.09388 (Qwen3: over a head); Gelberg et al. 2025, arXiv:2512.12167 (DroPE).

    Args:
        over: `head` or `all_heads`: what the mean square is taken over.
        exponent: start of `a` and `b`, from 0 (nothing changes) to 1 (the norm).
        gain: start of `g`, positive. Qwen3's weights are `g_q g_k` here.
        eps: added to the mean square, positive.
        trainable: train `a`, `b` and `g`, for each head.
    """

    name: ClassVar[str] = "qk_norm"
    place = "on the sizes of queries and keys"
    put_order = 0  # a norm would divide out a factor that comes before it
    over: str = HEAD
    exponent: float = 0.0
    gain: float = 1.0
    eps: float = 1e-6
    trainable: bool = True

    def __post_init__(self) -> None:
        self.one_of("over", OVER)
        self.flags("trainable")
        self.positive("gain")
        self.positive("eps")
        self.number("exponent", lambda exponent: 0 <= exponent <= 1, "from 0 to 1")
        if not self.trainable and self.exponent == 0:
            raise ValueError(
                "qk_norm: exponent=0 norms nothing if it is not trained: give exponent=1, or trainable=True"
            )

    def fit(self, base: BaseModel) -> Scheme:
        """Refuse layers in which the base itself norms queries and keys."""
        if both := sorted(set(base.normed).intersection(base.layers_of(self))):
            raise UnsupportedModelError(
                f"{self.name}: {base.name} itself norms the queries and keys of layer {', '.join(map(str, both))}, "
                "and a second norm of the same vectors would change next to nothing: name other layers"
            )
        return super().fit(base)

    def answers(self, layer: int, base: BaseModel) -> bool:
        return False

    def build(self, dims: Dims) -> QueryModule:
        return Norm(self, dims.num_heads, dims.num_key_value_heads)


class Norm(QueryModule):
    """The module of `qk_norm`. If trained: `query_exponent` (H,), `key_exponent` (K,) and `gain` (H,)."""

    def __init__(self, scheme: QKNorm, num_heads: int, num_key_value_heads: int) -> None:
        """Store the start values.

        Args:
            scheme: the hyper-parameters.
            num_heads: H.
            num_key_value_heads: K.
        """
        super().__init__()
        self.scheme = scheme
        trainable = scheme.trainable
        self.query_exponent = parameter(num_heads) if trainable else None
        self.key_exponent = parameter(num_key_value_heads) if trainable else None
        self.gain = parameter(num_heads) if trainable else None

    def reset_parameters(self) -> None:
        """Start at the exponent and the gain of the scheme."""
        for numbers, start in (
            (self.query_exponent, self.scheme.exponent),
            (self.key_exponent, self.scheme.exponent),
            (self.gain, self.scheme.gain),
        ):
            if numbers is not None:
                init.constant_(numbers, start)

    def forward(self, call: Call) -> Call:
        # Some bases scale queries before attention: their size is that without the scale.
        query = self._normed(call.query, self.query_exponent, call.ratio) * self._by_head(self.gain, self.scheme.gain)
        key = self._normed(call.key, self.key_exponent)
        return replace(call, query=query.to(call.query.dtype), key=key.to(call.key.dtype))

    def _normed(self, vectors: Tensor, exponent: Tensor | None, scale: float = 1.0) -> Tensor:
        """Return vectors (B, H|K, T, D) divided by a power of their size, in float32, or float64 if they are.

        Args:
            vectors: queries or keys.
            exponent: (H|K,), or None for the scheme's.
            scale: factor that the vectors already have, and that is no part of their size.
        """
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        axes = (-1,) if self.scheme.over == HEAD else (1, -1)
        mean_square = wide.square().mean(axes, keepdim=True) / scale**2
        power = self._by_head(exponent, self.scheme.exponent) / -2
        return wide * (mean_square + self.scheme.eps) ** power

    @staticmethod
    def _by_head(numbers: Tensor | None, otherwise: float) -> Tensor | float:
        """Return numbers (H,) as (H, 1, 1), or the number of the scheme if there are none."""
        return otherwise if numbers is None else numbers.view(-1, 1, 1)
