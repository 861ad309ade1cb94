"""RoPE: queries and keys rotated by their position."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..registry import register_scheme
from .base import Scheme, compute_dtype

SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""`rope_type` values of transformers that are tested here."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Rope(Scheme):
    """Queries and keys are rotated by their position, pair by pair of dimensions; keys are cached rotated.

    Equation (15): `q'_t = R(t w_u) q_t`, `k'_t = R(t w_u) k_t`, `w_u = rope_theta^(-2u/D)`, so that `q'_i . k'_j`
    depends on `i - j`.
    Beyond the training length: no limit, but pairs that never completed a turn in training meet angles they never saw:
    hence the scalings.
    Deviations: none. Frequencies come from transformers' own rotary modules (`ROPE_INIT_FUNCTIONS`). Where the base
    rotates whole heads, `partial_rotary_factor` below 1 leaves the pairs `(u, u + D/2)` of the lowest frequencies
    still, as transformers' `proportional` type does, with the frequencies of a head of the reduced size.
    Source: Su et al. 2021, arXiv:2104.09864.

    Args:
        rope_theta: base of the frequencies; None means the base model's own, or 10000.
        layout: pairs are `(u, u + D/2)` (`half`: LLaMA, GPT-NeoX) or `(2u, 2u + 1)` (`interleaved`: the paper, GPT-J).
            Bases that rotate by themselves do so by halves and refuse `interleaved`.
        partial_rotary_factor: share of the head that is rotated; None means the base model's own, or 1.
        scaling: a transformers `rope_parameters` dict (`rope_type` one of linear, dynamic, yarn, longrope, llama3, with
            its parameters); None means none.
    """

    name: ClassVar[str] = "rope"
    kind: ClassVar = "rotary"
    rope_theta: float | None = None
    layout: Literal["half", "interleaved"] = "half"
    partial_rotary_factor: float | None = None
    scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        if self.rope_theta is not None:
            self.positive("rope_theta")
        self.one_of("layout", ("half", "interleaved"))
        if self.partial_rotary_factor is not None:
            self.positive("partial_rotary_factor")
            if self.partial_rotary_factor > 1:
                raise ValueError(f"rope: partial_rotary_factor must be at most 1, not {self.partial_rotary_factor}")
        if self.scaling is not None:
            if not isinstance(self.scaling, dict):
                raise TypeError(
                    f"rope: scaling must be a dict like transformers' rope_parameters, not {self.scaling!r}"
                )
            if self.scaling.get("rope_type") not in SCALINGS:
                raise ValueError(
                    f"rope: scaling['rope_type'] must be one of {', '.join(SCALINGS)}, not "
                    f"{self.scaling.get('rope_type')!r}"
                )
            if "rope_theta" in self.scaling or "partial_rotary_factor" in self.scaling:
                raise ValueError("rope: give rope_theta and partial_rotary_factor beside scaling, not in it")

    def with_base(self, rope_theta: float, partial_rotary_factor: float) -> "Rope":
        """Return the scheme with what was None taken from the base model."""
        return replace(
            self,
            rope_theta=self.rope_theta or rope_theta,
            partial_rotary_factor=self.partial_rotary_factor or partial_rotary_factor,
        )

    def rope_parameters(self) -> dict[str, Any]:
        """Return transformers' `rope_parameters` of the resolved scheme."""
        return {
            "rope_type": "default",
            **(self.scaling or {}),
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        }


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first R dimensions of each head.

    Args:
        x: (B, H, T, D) queries or keys.
        cos: (B|1, T, R) cosines of the angles, the R/2 angles given twice in a row: `[angles | angles]`.
        sin: (B|1, T, R) likewise.
        layout: `half` pairs `(u, u + R/2)`, `interleaved` pairs `(2u, 2u + 1)`.

    Returns:
        (B, H, T, D), in the dtype of x.
    """
    size = cos.shape[-1]
    dtype = compute_dtype(x)  # bfloat16 angles would merge neighbouring positions
    cos, sin = (t[:, None, :, : size // 2].to(dtype) for t in (cos, sin))
    turning, still = x[..., :size].to(dtype), x[..., size:]
    if layout == "half":
        first, second = turning.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), still], -1)
