"""RoPE: queries and keys rotated by their position."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..did_you_mean import did_you_mean
from ..dims import Dims
from ..placement import RopeParameters
from ..registry import register_scheme
from ..sinusoids import compute_dtype
from .base import RotaryScheme, by_layer_type

_LENGTH = "original_max_position_embeddings"
"""Key of `rope_parameters` for the length at which the model was trained."""

WITH_LENGTH = ("yarn", "longrope", "llama3")
"""The `rope_type` values of transformers that need the length at which the model was trained."""

_EXAMPLES = {kind: f'scaling={{"rope_type": "{kind}", "factor": 2.0}}' for kind in ("linear", "dynamic", "yarn")}
"""`rope_type` of a scaling that needs only a factor -> how to ask for it."""

_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are hyper-parameters of `rope` beside `scaling`."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Rope(RotaryScheme):
    """Queries and keys are rotated by their position, pair by pair of dimensions; keys are cached rotated.

    Equation (15): `q'_t = R(t w_u) q_t`, `k'_t = R(t w_u) k_t`, `w_u = rope_theta^(-2u/D)`, so that `q'_i . k'_j`
    depends on `i - j`.
    Beyond the training length: no limit, but pairs that did not complete a circle in training get angles they never
    saw. The scalings are for that.
    Deviations: none. Frequencies come from transformers' rotary modules (`ROPE_INIT_FUNCTIONS`). Where the base rotates
    whole heads, `partial_rotary_factor` below 1 leaves the pairs `(u, u + D/2)` of the lowest frequencies unrotated, as
    transformers' `proportional` type does. The rotated pairs have the frequencies of a head of the reduced size.
    Source: Su et al. 2021, arXiv:2104.09864.

    A hyper-parameter that is None is taken from the base model, for every layer type if the base has several (Gemma 3).
    So `rope` without hyper-parameters gives the base's positions.
    Layers that the base does not rotate (SmolLM3's `no_rope_layers`) stay unrotated.

    Args:
        rope_theta: base of the frequencies; None means the base model's, or 10000. A dict gives it by layer type.
        layout: pairs are `(u, u + D/2)` (`half`: LLaMA, GPT-NeoX) or `(2u, 2u + 1)` (`interleaved`: the paper, GPT-J).
            None means the base model's layout, or `half`. A base with a rotary module refuses the other layout.
        partial_rotary_factor: share of the head that is rotated; None means the base model's, or 1. A dict gives it by
            layer type.
        scaling: a transformers `rope_parameters` dict: `rope_type` (linear, dynamic, yarn, longrope, llama3 or
            proportional, if the installed version has it) with its parameters. `none` means no scaling, None the base
            model's scaling. A dict of such dicts gives it by layer type.
    """

    name: ClassVar[str] = "rope"
    known_as: ClassVar[Mapping[str, str]] = {"rotary": "rope"} | {
        kind: f"rope with {example}" for kind, example in _EXAMPLES.items()
    }
    rope_theta: float | dict[str, float] | None = None
    layout: Literal["half", "interleaved"] | None = None
    partial_rotary_factor: float | dict[str, float] | None = None
    scaling: RopeParameters | Literal["none"] | None = None

    @property
    def pairs(self) -> str | None:
        """Which dimensions are a pair, or None for the base's pairs."""
        return self.layout

    def __post_init__(self) -> None:
        """Check the hyper-parameters. transformers checks the types of scaling and their parameters later."""
        if self.layout is not None:
            self.one_of("layout", ("half", "interleaved"))
        for field in _BESIDE:
            for value in self._values(field):
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError(f"rope: {field} must be a number or one by layer type, not {value!r}")
                if not _positive(value):
                    raise ValueError(f"rope: {field} must be positive and finite, not {value!r}")
                if field == "partial_rotary_factor" and value > 1:
                    raise ValueError(f"rope: partial_rotary_factor must be at most 1, not {value}")
        for scaling in self.scalings():
            self.check_scaling(scaling)

    def check_scaling(self, scaling: object) -> None:
        """Raise TypeError or ValueError for values with which transformers would run, logging only a warning."""
        if not isinstance(scaling, dict):
            raise TypeError(
                f"rope: scaling must be a dict like transformers' rope_parameters, 'none' or None, not {scaling!r}"
                f"{did_you_mean(scaling, _EXAMPLES)}"
            )
        kind = scaling.get("rope_type")
        if misplaced := sorted(set(_BESIDE) & set(scaling)):
            raise ValueError(f"rope: give {' and '.join(misplaced)} beside scaling, not in it")
        for key, value in scaling.items():
            if key in ("short_factor", "long_factor"):
                if not isinstance(value, list) or not value or not all(map(_positive, value)):
                    raise ValueError(
                        f"rope: scaling {kind}: {key} must be a list of positive numbers, one per rotated pair, not "
                        f"{value!r}"
                    )
            elif key == "truncate":
                if not isinstance(value, bool):
                    raise ValueError(f"rope: scaling {kind}: truncate must be True or False, not {value!r}")
            elif key not in ("rope_type", "type") and value is not None and not _positive(value):
                raise ValueError(f"rope: scaling {kind}: {key} must be a positive number, not {value!r}")
        if (scaling.get("factor") or 1) < 1:
            raise ValueError(f"rope: scaling {kind}: factor must be at least 1, not {scaling['factor']!r}")
        if len(scaling.get("short_factor", ())) != len(scaling.get("long_factor", ())) and kind == "longrope":
            needed = [key for key in ("short_factor", "long_factor") if key not in scaling]
            problem = f"needs {', '.join(needed)}" if needed else "needs as many in short_factor as in long_factor"
            raise ValueError(f"rope: scaling longrope {problem}")
        low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
        if low is not None and high is not None and high <= low:
            raise ValueError(f"rope: scaling {kind}: high_freq_factor must be above low_freq_factor")

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the rotated share of a head is not made of pairs, or a parameter would not be read."""
        for share in self._values("partial_rotary_factor"):
            rotated = int(share * dims.head_dim)
            if rotated < 2 or rotated % 2:
                raise ValueError(
                    f"rope: partial_rotary_factor={share} leaves {rotated} dimensions of {dims.head_dim} to rotate, "
                    "which are not pairs"
                )
        for scaling in self.scalings():
            if unused := _unused(scaling):
                raise ValueError(
                    f"rope: scaling {scaling['rope_type']}: {', '.join(unused)} would not be read: attention_factor "
                    "replaces what it is computed from, and mscale counts only beside mscale_all_dim"
                )

    def with_base(
        self, rotation: RopeParameters, length: int | None, types: tuple[str, ...], pairs: str = "half"
    ) -> "Rope":
        """Return the scheme with everything that was None taken from the base, see `RotaryScheme.with_base`.

        Raises:
            ValueError: if transformers has no such scaling, or the base no such layer type.
        """
        for scaling in self.scalings():
            if (kind := scaling.get("rope_type")) not in types:
                raise ValueError(
                    f"rope: scaling['rope_type'] must be one of {', '.join(types)}, not {kind!r}; "
                    f"scaling='none' switches scaling off{did_you_mean(kind, types)}"
                )
        if self.layout is None:
            layout: Any = {"layout": pairs}
            return replace(self, **layout).with_base(rotation, length, types, pairs)
        base_types = by_layer_type(rotation)
        for field in (*_BESIDE, "scaling"):
            value = getattr(self, field)
            named = set(value) if _is_by_type(field, value) else set()
            if unknown := sorted(named - set(base_types)):
                names = ", ".join(map(str, base_types))
                reason = "all its layers rotate alike" if None in base_types else f"it has {names}"
                raise ValueError(f"rope: {field} names {', '.join(unknown)}, which this base does not have: {reason}")
        if None in base_types:
            return replace(self, **self._filled(None, rotation, length))
        filled = {kind: self._filled(kind, parameters, length) for kind, parameters in base_types.items()}
        values: dict[str, Any] = {
            field: {kind: filled[kind][field] for kind in base_types} for field in (*_BESIDE, "scaling")
        }
        return replace(self, **values)

    def _filled(self, layer_type: str | None, base: RopeParameters, length: int | None) -> dict[str, Any]:
        """Return the fields for one layer type, with everything that was None taken from the base."""
        chosen = {field: self._of_type(field, layer_type) for field in (*_BESIDE, "scaling")}
        scaling = chosen["scaling"]
        if scaling is None:
            scaling = {key: value for key, value in base.items() if key not in (*_BESIDE, "type")}
            if scaling.get("rope_type", "default") == "default":
                scaling = "none"
            else:
                scaling = {key: value for key, value in scaling.items() if key not in _unused(scaling)}
        elif scaling != "none" and scaling.get("rope_type") in WITH_LENGTH:
            scaling = {_LENGTH: base.get(_LENGTH) or length, **scaling}
        return {
            "rope_theta": chosen["rope_theta"] or base.get("rope_theta") or 10000.0,
            "partial_rotary_factor": chosen["partial_rotary_factor"] or base.get("partial_rotary_factor") or 1.0,
            "scaling": scaling,
        }

    def _of_type(self, field: str, layer_type: str | None) -> Any:
        """Return the value of a field for one layer type."""
        value = getattr(self, field)
        return value.get(layer_type) if _is_by_type(field, value) else value

    def without_scaling(self) -> "Rope":
        """Return the scheme without scaling, see `Scheme.without_scaling`."""
        return replace(self, scaling="none")

    def scalings(self) -> list[RopeParameters]:
        """Return every scaling of the scheme, as `rope_parameters` of transformers."""
        return [scaling for scaling in self._values("scaling") if scaling != "none"]

    def _values(self, field: str) -> list[Any]:
        """Return the values of a field, one or one per layer type, without None."""
        value = getattr(self, field)
        values = value.values() if _is_by_type(field, value) else [value]
        return [each for each in values if each is not None]

    def rope_parameters(self) -> RopeParameters:
        """Return the `rope_parameters` of the resolved scheme, by layer type where the base has several types."""
        if isinstance(self.rope_theta, dict):
            return {kind: self._parameters(kind) for kind in self.rope_theta}
        return self._parameters(None)

    def _parameters(self, layer_type: str | None) -> RopeParameters:
        scaling = self._of_type("scaling", layer_type)
        parameters = {"rope_type": "default"} if scaling == "none" else scaling
        return {**parameters, **{field: self._of_type(field, layer_type) for field in _BESIDE}}


def _unused(scaling: RopeParameters) -> list[str]:
    """Return the parameters of a scaling that transformers ignores because of its other parameters.

    `mscale_all_dim` is never ignored, because latent attention reads it as well.
    """
    set_keys = {key for key, value in scaling.items() if value is not None}
    has_factor = "attention_factor" in set_keys
    unused = {"mscale"} & set(scaling) if has_factor or "mscale_all_dim" not in set_keys else set()
    if has_factor and scaling.get("rope_type") == "longrope":
        unused |= {"factor"} & set(scaling)
    return sorted(unused)


def _is_by_type(field: str, value: Any) -> bool:
    """Return whether the value of a field is a dict by layer type. A single scaling is a dict with `rope_type`."""
    if field != "scaling":
        return isinstance(value, dict)
    may_be = isinstance(value, dict) and bool(value) and "rope_type" not in value
    return may_be and all(each is None or each == "none" or isinstance(each, dict) for each in value.values())


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first R dimensions of each head.

    Args:
        x: (B, H, T, D) queries or keys.
        cos: (B|1, T, R) cosines of the R/2 angles, written twice: `[angles | angles]`.
        sin: (B|1, T, R) sines, in the same order.
        layout: `half` pairs `(u, u + R/2)`, `interleaved` pairs `(2u, 2u + 1)`.

    Returns:
        (B, H, T, D), in the dtype of x.
    """
    size = cos.shape[-1]
    dtype = compute_dtype(x)  # bfloat16 angles would merge neighbouring positions
    cos, sin = (t[:, None, :, : size // 2].to(dtype) for t in (cos, sin))
    to_rotate, unrotated = x[..., :size].to(dtype), x[..., size:]
    if layout == "half":
        first, second = to_rotate.chunk(2, -1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    else:
        first, second = to_rotate[..., ::2], to_rotate[..., 1::2]
        rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), unrotated], -1)
