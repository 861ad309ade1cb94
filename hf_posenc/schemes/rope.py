"""RoPE: queries and keys rotated by their position."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..registry import register_scheme
from .base import Dims, Native, Scheme, compute_dtype

_LENGTH = "original_max_position_embeddings"

SCALINGS: Mapping[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {_LENGTH}),
    "yarn": (
        {"factor"},
        {_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {_LENGTH, "factor", "attention_factor"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {_LENGTH}),
}
"""`rope_type` values of transformers that are tested here: parameters that each needs, and others that it takes.

transformers itself only logs a warning at an unknown or impossible parameter, and runs without it or with nonsense.
"""


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
            self.check_scaling(self.scaling)

    def check_scaling(self, scaling: dict[str, Any]) -> None:
        """Raise TypeError or ValueError unless transformers has this scaling, with all these parameters."""
        if not isinstance(scaling, dict):
            raise TypeError(f"rope: scaling must be a dict like transformers' rope_parameters, not {scaling!r}")
        kind = scaling.get("rope_type")
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise ValueError(f"rope: scaling['rope_type'] must be one of {', '.join(SCALINGS)}, not {kind!r}")
        if "rope_theta" in scaling or "partial_rotary_factor" in scaling:
            raise ValueError("rope: give rope_theta and partial_rotary_factor beside scaling, not in it")
        needed, taken = SCALINGS[kind]
        given = set(scaling) - {"rope_type"}
        if missing := sorted(needed - given):
            raise ValueError(f"rope: scaling {kind} needs {', '.join(missing)}")
        if unknown := sorted(given - needed - taken):
            known = ", ".join(sorted(needed | taken))
            raise ValueError(f"rope: scaling {kind} has no parameter {', '.join(unknown)}; it has {known}")
        for key in sorted(given - {"truncate"}):
            wants_list = key in ("short_factor", "long_factor")
            values = scaling[key] if wants_list else [scaling[key]]
            if not isinstance(values, list) or not values or not all(map(_positive, values)):
                wanted = "a list of positive numbers, one per rotated pair" if wants_list else "a positive number"
                raise ValueError(f"rope: scaling {kind}: {key} must be {wanted}, not {scaling[key]!r}")
        if scaling.get("factor", 1) < 1:
            raise ValueError(f"rope: scaling {kind}: factor must be at least 1, not {scaling['factor']!r}")
        if kind == "longrope" and len(scaling["short_factor"]) != len(scaling["long_factor"]):
            raise ValueError("rope: scaling longrope: short_factor and long_factor must have the same length")
        if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise ValueError("rope: scaling llama3: high_freq_factor must be above low_freq_factor")

    def resolve(self, native: Native, dims: Dims) -> "Rope":
        """Return the scheme itself; ValueError unless a share of the head that was asked for is a number of pairs."""
        share = self.partial_rotary_factor
        if share is not None and (int(share * dims.head_dim) < 2 or int(share * dims.head_dim) % 2):
            raise ValueError(
                f"rope: partial_rotary_factor={share} leaves {int(share * dims.head_dim)} dimensions of "
                f"{dims.head_dim} to rotate, which are not pairs"
            )
        return self

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


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


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
