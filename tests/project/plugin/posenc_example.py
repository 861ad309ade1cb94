"""One scheme and one family for hf_posenc, in a package of their own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_posenc import Bias, Dims, Family, ScoreModule, ScoreScheme, register_scheme

# A rotary decoder whose names are all LLaMA's, as the fields of a Family have them by default.
CLOVAX = Family(model_types=("hyperclovax",))


@register_scheme
@dataclass(frozen=True, kw_only=True)
class RootPenalty(ScoreScheme):
    """A penalty that grows with the root of the distance, `q . k - m_h sqrt(d)`, with a trained `m` per head."""

    name: ClassVar[str] = "root_penalty"
    start: float = 0.5

    def __post_init__(self) -> None:
        self.positive("start")

    def build(self, dims: Dims) -> ScoreModule:
        return Penalty(dims.num_heads, self.start)


class Penalty(ScoreModule):
    """Parameter `slopes` (H,)."""

    def __init__(self, num_heads: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.slopes = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self) -> None:
        init.constant_(self.slopes, self.start)

    def form(self, like: Tensor) -> Bias:
        slopes = self.slopes.to(torch.promote_types(like.dtype, torch.float32))

        def values(distance: Tensor) -> Tensor:
            return -slopes.view(-1, *[1] * distance.ndim) * distance.to(slopes.dtype).sqrt()

        return Bias(values, slopes.device)
