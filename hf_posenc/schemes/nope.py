"""NoPE: no positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..core.errors import UnsupportedModelError
from ..core.registry import register_scheme
from .base import Scheme, StockForm

if TYPE_CHECKING:
    from ..model.base_model import BaseModel
    from ..patching.changes import ModelSite


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

    place = "nowhere (the causal mask is the only order)"

    def fit(self, base: BaseModel) -> Scheme:
        """Refuse layers without positions, where the scheme would change nothing."""
        if self.layers is None or self.window is not None:
            return self
        if any(base.rotated) and not any(base.rotated[layer] for layer in base.layers_of(self)):
            raise UnsupportedModelError(
                f"{self.name} would change nothing here: {base.name} leaves layer "
                f"{', '.join(map(str, self.layers))} unrotated by itself. It rotates layers "
                f"{', '.join(str(layer) for layer, rotated in enumerate(base.rotated) if rotated)}"
            )
        if base.keeps_table:
            raise UnsupportedModelError(
                f"{self.name} in some layers would change nothing here: the positions of {base.name} enter at the "
                "input and reach every layer while some layers have no scheme. Give every layer a scheme"
            )
        return self

    def put(self, site: ModelSite) -> None:
        """Do nothing: `silence` has switched off the base's positions."""

    def needs_one_coordinate(self, base: BaseModel) -> bool:
        return False

    def answers(self, layer: int, base: BaseModel) -> bool:
        return False

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm | None:
        """Return the form with the scheme's layers unrotated."""
        return form.unturned(base.layers_of(self))
