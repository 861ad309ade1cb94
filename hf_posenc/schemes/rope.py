"""RoPE: queries and keys rotated by their position."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..registry import register_scheme
from ..spelling import did_you_mean
from .base import Dims, RotaryScheme, by_layer_type, compute_dtype

_LENGTH = "original_max_position_embeddings"

WITH_LENGTH = ("yarn", "longrope", "llama3")
"""The `rope_type` values of transformers that know the length which a model was trained for, and need it."""

_EXAMPLES = {kind: f'scaling={{"rope_type": "{kind}", "factor": 2.0}}' for kind in ("linear", "dynamic", "yarn")}
"""Scalings that need no more than a factor -> how to ask for them."""

_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are hyper-parameters of their own here."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Rope(RotaryScheme):
    """Queries and keys are rotated by their position, pair by pair of dimensions; keys are cached rotated.

    Equation (15): `q'_t = R(t w_u) q_t`, `k'_t = R(t w_u) k_t`, `w_u = rope_theta^(-2u/D)`, so that `q'_i . k'_j`
    depends on `i - j`.
    Beyond the training length: no limit, but pairs that never completed a turn in training meet angles they never saw:
    hence the scalings.
    Deviations: none. Frequencies come from transformers' own rotary modules (`ROPE_INIT_FUNCTIONS`). Where the base
    rotates whole heads, `partial_rotary_factor` below 1 leaves the pairs `(u, u + D/2)` of the lowest frequencies
    still, as transformers' `proportional` type does, with the frequencies of a head of the reduced size.
    Source: Su et al. 2021, arXiv:2104.09864.

    Everything that is None is the base model's own: its base of frequencies, its share of the head, its scaling with
    all parameters, and per layer type where it has several (Gemma 3). So `rope` without hyper-parameters is the base.
    Layers that the base leaves unrotated (SmolLM3's `no_rope_layers`) stay so, whatever is given.

    Args:
        rope_theta: base of the frequencies; None means the base model's own, or 10000. A dict names it by layer type.
        layout: pairs are `(u, u + D/2)` (`half`: LLaMA, GPT-NeoX) or `(2u, 2u + 1)` (`interleaved`: the paper, GPT-J).
            None means the base model's own, or `half`. Bases that rotate by themselves refuse the other one.
        partial_rotary_factor: share of the head that is rotated; None means the base model's own, or 1. A dict names
            it by layer type.
        scaling: a transformers `rope_parameters` dict: `rope_type` (linear, dynamic, yarn, longrope, llama3 or
            proportional, as far as the installed version has them) with its parameters. `none` means no scaling, None
            the base model's own. A dict of those by layer type gives each its own.
    """

    name: ClassVar[str] = "rope"
    known_as: ClassVar[Mapping[str, str]] = {"rotary": "rope"} | {
        kind: f"rope with {example}" for kind, example in _EXAMPLES.items()
    }
    rope_theta: float | dict[str, float] | None = None
    layout: Literal["half", "interleaved"] | None = None
    partial_rotary_factor: float | dict[str, float] | None = None
    scaling: dict[str, Any] | Literal["none"] | None = None

    @property
    def pairs(self) -> str | None:
        """Which dimensions are a pair, or None for the base's own."""
        return self.layout

    def __post_init__(self) -> None:
        """Check the hyper-parameters. Which types of scaling there are, and what each takes, transformers says."""
        if self.layout is not None:
            self.one_of("layout", ("half", "interleaved"))
        for field in _BESIDE:
            for value in self._each(field):
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError(f"rope: {field} must be a number or one by layer type, not {value!r}")
                if not _positive(value):
                    raise ValueError(f"rope: {field} must be positive and finite, not {value!r}")
                if field == "partial_rotary_factor" and value > 1:
                    raise ValueError(f"rope: partial_rotary_factor must be at most 1, not {value}")
        for scaling in self.scalings():
            self.check_scaling(scaling)

    def check_scaling(self, scaling: Any) -> None:
        """Raise TypeError or ValueError for what transformers would only log a warning about, and run with nonsense."""
        if not isinstance(scaling, dict):
            raise TypeError(
                f"rope: scaling must be a dict like transformers' rope_parameters, 'none' or None, not {scaling!r}"
                f"{did_you_mean(scaling, _EXAMPLES)}"
            )
        kind = scaling.get("rope_type")
        if beside := sorted(set(_BESIDE) & set(scaling)):
            raise ValueError(f"rope: give {' and '.join(beside)} beside scaling, not in it")
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
            said = f"needs {', '.join(needed)}" if needed else "needs as many in short_factor as in long_factor"
            raise ValueError(f"rope: scaling longrope {said}")
        low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
        if low is not None and high is not None and high <= low:
            raise ValueError(f"rope: scaling {kind}: high_freq_factor must be above low_freq_factor")

    def check(self, dims: Dims) -> None:
        """Raise ValueError for a share of the head that is no number of pairs, or a parameter that another replaces."""
        for share in self._each("partial_rotary_factor"):
            turned = int(share * dims.head_dim)
            if turned < 2 or turned % 2:
                raise ValueError(
                    f"rope: partial_rotary_factor={share} leaves {turned} dimensions of {dims.head_dim} to rotate, "
                    "which are not pairs"
                )
        for scaling in self.scalings():
            if unused := _unused(scaling):
                raise ValueError(
                    f"rope: scaling {scaling['rope_type']}: {', '.join(unused)} would not be read: attention_factor "
                    "replaces what it is computed from, and mscale counts only beside mscale_all_dim"
                )

    def with_base(
        self, rotation: dict[str, Any], length: int | None, types: tuple[str, ...], pairs: str = "half"
    ) -> "Rope":
        """Return the scheme with everything that was None taken from the base, see `RotaryScheme.with_base`.

        Raises:
            ValueError: if a scaling or a layer type is named that there is not.
        """
        for scaling in self.scalings():
            if (kind := scaling.get("rope_type")) not in types:
                raise ValueError(
                    f"rope: scaling['rope_type'] must be one of {', '.join(types)}, not {kind!r}; "
                    f"scaling='none' switches scaling off{did_you_mean(kind, types)}"
                )
        if self.layout is None:
            own: Any = {"layout": pairs}
            return replace(self, **own).with_base(rotation, length, types, pairs)
        own_types = by_layer_type(rotation)
        for field in (*_BESIDE, "scaling"):
            value = getattr(self, field)
            named = set(value) if _names_types(field, value) else set()
            if unknown := sorted(named - set(own_types)):
                has = ", ".join(map(str, own_types))
                there = "all its layers rotate alike" if None in own_types else f"it has {has}"
                raise ValueError(f"rope: {field} names {', '.join(unknown)}, which this base does not have: {there}")
        if None in own_types:
            return replace(self, **self._filled(None, rotation, length))
        filled = {kind: self._filled(kind, own, length) for kind, own in own_types.items()}
        values: dict[str, Any] = {
            field: {kind: filled[kind][field] for kind in own_types} for field in (*_BESIDE, "scaling")
        }
        return replace(self, **values)

    def _filled(self, layer_type: str | None, own: Mapping[str, Any], length: int | None) -> dict[str, Any]:
        given = {field: self._of(field, layer_type) for field in (*_BESIDE, "scaling")}
        scaling = given["scaling"]
        if scaling is None:
            scaling = {key: value for key, value in own.items() if key not in (*_BESIDE, "type")}
            if scaling.get("rope_type", "default") == "default":
                scaling = "none"
            else:
                scaling = {key: value for key, value in scaling.items() if key not in _unused(scaling)}
        elif scaling != "none" and scaling.get("rope_type") in WITH_LENGTH:
            scaling = {_LENGTH: own.get(_LENGTH) or length, **scaling}
        return {
            "rope_theta": given["rope_theta"] or own.get("rope_theta") or 10000.0,
            "partial_rotary_factor": given["partial_rotary_factor"] or own.get("partial_rotary_factor") or 1.0,
            "scaling": scaling,
        }

    def _of(self, field: str, layer_type: str | None) -> Any:
        """Return what was given for one layer type."""
        value = getattr(self, field)
        return value.get(layer_type) if _names_types(field, value) else value

    def without_scaling(self) -> "Rope":
        """Return the scheme with the frequencies of its base, see `Scheme.without_scaling`."""
        return replace(self, scaling="none")

    def scalings(self) -> list[dict[str, Any]]:
        """Return the scalings that were given, each as transformers' `rope_parameters`."""
        return [scaling for scaling in self._each("scaling") if scaling != "none"]

    def _each(self, field: str) -> list[Any]:
        """Return every value that was given for a field: one, or one by layer type."""
        value = getattr(self, field)
        values = value.values() if _names_types(field, value) else [value]
        return [each for each in values if each is not None]

    def rope_parameters(self) -> dict[str, Any]:
        """Return transformers' `rope_parameters` of the resolved scheme, by layer type where the base has several."""
        if isinstance(self.rope_theta, dict):
            return {kind: self._parameters(kind) for kind in self.rope_theta}
        return self._parameters(None)

    def _parameters(self, layer_type: str | None) -> dict[str, Any]:
        scaling = self._of("scaling", layer_type)
        own = {"rope_type": "default"} if scaling == "none" else scaling
        return {**own, **{field: self._of(field, layer_type) for field in _BESIDE}}


def _unused(scaling: Mapping[str, Any]) -> list[str]:
    """Return the parameters of a scaling that transformers asks for and then does not use, because of the others.

    `mscale_all_dim` is not among them: latent attention reads it too, beside whatever else.
    """
    given = {key for key, value in scaling.items() if value is not None}
    fixed = "attention_factor" in given
    unused = {"mscale"} & set(scaling) if fixed or "mscale_all_dim" not in given else set()
    if fixed and scaling.get("rope_type") == "longrope":
        unused |= {"factor"} & set(scaling)
    return sorted(unused)


def _names_types(field: str, value: Any) -> bool:
    """Return whether a hyper-parameter is given by layer type; one scaling is a dict too, with a `rope_type`."""
    if field != "scaling":
        return isinstance(value, dict)
    whole = isinstance(value, dict) and bool(value) and "rope_type" not in value
    return whole and all(each is None or each == "none" or isinstance(each, dict) for each in value.values())


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
