"""NoPE: no positions."""

from dataclasses import dataclass
from typing import ClassVar

from ..placement import Nowhere, Placement
from ..registry import register_scheme
from .base import Scheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Nope(Scheme):
    """No positions at all: the causal mask is the only order.

    A model with causal attention can still count tokens, because the first layer's average over `t` keys depends on `t`
    (Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466, theorem 1).

    Equation: `p_ij = softmax_j(q_i . k_j / sqrt(D))` over `j <= i`.
    Beyond the training length: no limit; quality falls as attention spreads over more keys than were seen in training.
    Deviations: none.
    Source: Kazemnejad et al. 2023, arXiv:2305.19466.
    """

    name: ClassVar[str] = "nope"

    @property
    def acts_on(self) -> Placement:
        return Nowhere()
