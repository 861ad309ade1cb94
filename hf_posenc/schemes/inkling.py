"""Inkling's bias: each query mixes learned profiles over the distance, by its hidden state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.forms import ClippedVectors
from ..core.modules import ON_ATTENTION, ScoreModule, parameter
from ..core.registry import register_scheme
from .base import HiddenNumbers, ScoreScheme, StockForm, init

if TYPE_CHECKING:
    from ..model.base_model import BaseModel


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Inkling(ScoreScheme):
    """A bias by distance that each query mixes from learned profiles, beside the base's rotation. It starts at 0.

    Equation: `softmax_j(s_ij + (r_i . P)[h, i - j])`, where `r_i` are `rank` numbers for each head, a linear map of the
    hidden state that enters the attention, and `P` has `rank` profiles over the distances below `extent`. From there on
    the bias is 0. Inkling has it in place of a rotation: with `nope` beside it, so has any base.
    Neutral start: the map starts at 0, and the profiles at random.
    Beyond the training length: no limit of its own; keys at `extent` tokens or further look alike.
    Deviations: Inkling multiplies the bias by its temperature, too, and a `temperature` multiplies only queries. A soft
    cap on scores (Gemma 2) caps the sum.
    Source: Thinking Machines Lab 2026, https://huggingface.co/thinkingmachines/Inkling, and its code in transformers.

    Args:
        rank: number of profiles.
        extent: number of distances that have a bias.
    """

    name: ClassVar[str] = "inkling"
    joins = True
    uses_queries = True
    rank: int = 16
    extent: int = 1024

    def __post_init__(self) -> None:
        self.positive("rank", int)
        self.positive("extent", int)

    def build(self, dims: Dims) -> ScoreModule:
        return RelativeProfiles(dims, self.rank, self.extent)

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm | None:
        """Return a form with the bias, if the base's layers have one with as many profiles and distances."""
        names, found = base.family.rotation.bias_parameters, dict(form.biases)
        for layer in base.layers_of(self):
            attention: Any = base.modules.attention_of[layer]
            if names is None or attention.get_parameter(names[1]).shape != (self.rank, self.extent):
                return None
            found[layer] = attention.posenc.queries.weight, attention.posenc.profiles
        return replace(form, biases=found)


class RelativeProfiles(ScoreModule):
    """The module of `inkling`, with the parameters `queries.weight` (H rank, E) and `profiles` (rank, extent)."""

    def __init__(self, dims: Dims, rank: int, extent: int) -> None:
        """Make the parameters.

        Args:
            dims: sizes of the layer's attention.
            rank: number of profiles.
            extent: number of distances.
        """
        super().__init__()
        self.queries = HiddenNumbers(dims, rank)
        self.profiles = parameter(rank, extent)

    def reset_parameters(self) -> None:
        """Draw the profiles, as Inkling does."""
        init.normal_(self.profiles, std=0.02)

    def prepared(self, call: Call) -> Call:
        """Return a call over wider heads, to which the bias is a vector for each distance."""
        size, dtype = call.query.shape[-1], torch.promote_types(call.query.dtype, torch.float32)
        numbers = (call.by_module[ON_ATTENTION] / call.scaling).to(call.query.dtype)
        query, key = torch.cat([call.query, numbers], -1), F.pad(call.key, (0, len(self.profiles)))
        vectors = F.pad(self.profiles.T.to(dtype), (size, 0, 0, 1))
        return replace(call, query=query, key=key, module=self, form=ClippedVectors(vectors, None))

    def scores(self, call: Call) -> Tensor:
        return (prepared := self.prepared(call)).form.scores(prepared)
