"""RoPE: queries and keys rotated by their position."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.did_you_mean import did_you_mean
from ..core.dims import Dims
from ..core.dtypes import compute_dtype
from ..core.frequency_edits import EDITS, apply_edit, check_edit
from ..core.registry import register_scheme
from .base import PROPORTIONAL, ReadFrequencies, ReadRotation, RopeParameters, RotaryScheme, by_layer_type

_LENGTH = "original_max_position_embeddings"
"""Key of `rope_parameters` for the length at which the model was trained."""

WITH_LENGTH = ("yarn", "longrope", "llama3")
"""The `rope_type` values of transformers that need the length at which the model was trained."""

_EXAMPLES = {kind: f'scaling={{"rope_type": "{kind}", "factor": 2.0}}' for kind in ("linear", "dynamic", "yarn")}
"""`rope_type` of a scaling that needs only a factor -> how to ask for it."""

_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are hyper-parameters of `rope` beside `scaling`."""

_FIELDS = (*_BESIDE, "scaling", "frequencies")
"""Hyper-parameters that can be given by layer type."""

_EDIT_EXAMPLES = {
    name: f'frequencies={{"name": "{name}"' + (f', "{edit.takes}": 4.0}}' if edit.stretch else "}")
    for name, edit in EDITS.items()
}
"""Name of an edit of the frequencies -> how to ask for it."""

UNROTATED = 1e30
"""Factor of `longrope` with which a pair does not rotate: transformers divides its frequency by this number."""


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
    Own frequencies are given to transformers as the factors of its `longrope`.
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
            proportional, if the installed version has it) with its parameters. If the base's own scaling has this type,
            parameters that are not named stay the base's. `none` means no scaling, None the base model's scaling. A
            dict of such dicts gives it by layer type. `proportional` is no scaling of a base that has it, but its
            rotation, and stays.
        frequencies: angle per token of each rotated pair, in radians from 0 to pi. They take the place of `scaling`.
            Or an edit of the frequencies that the other hyper-parameters give: `{"name": "soft_clip", "pairs": n}`
            (None: 5/16 of the pairs), `{"name": "hope", "length": L}` (None: the length at which the base was trained),
            `{"name": "abf", "factor": s}`, `{"name": "ntk", "factor": s}`. Edits are made at once: the patched model's
            scheme has the numbers, or for `abf` and `ntk` the larger `rope_theta`. None edits nothing. A dict with
            layer types as keys gives them by layer type.
    """

    name: ClassVar[str] = "rope"
    known_as: ClassVar[Mapping[str, str]] = {"rotary": "rope"} | {
        kind: f"rope with {example}" for kind, example in (_EXAMPLES | _EDIT_EXAMPLES).items()
    }
    rope_theta: float | dict[str, float] | None = None
    layout: Literal["half", "interleaved"] | None = None
    partial_rotary_factor: float | dict[str, float] | None = None
    scaling: RopeParameters | Literal["none"] | None = None
    frequencies: tuple[float, ...] | dict[str, Any] | None = None

    @property
    def pairs(self) -> str | None:
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
        if isinstance(self.frequencies, list):
            object.__setattr__(self, "frequencies", tuple(self.frequencies))
        for frequencies in self._values("frequencies"):
            _check_frequencies(frequencies)

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
            holds, wanted = value is None or _positive(value), "a positive number"
            if key in ("short_factor", "long_factor"):
                holds = isinstance(value, list) and bool(value) and all(map(_positive, value))
                wanted = "a list of positive numbers, one per rotated pair"
            elif key == "truncate":
                holds, wanted = isinstance(value, bool), "True or False"
            if not holds and key not in ("rope_type", "type"):
                raise ValueError(f"rope: scaling {kind}: {key} must be {wanted}, not {value!r}")
        if (scaling.get("factor") or 1) < 1:
            raise ValueError(f"rope: scaling {kind}: factor must be at least 1, not {scaling['factor']!r}")
        short, long = (scaling.get(key, []) for key in ("short_factor", "long_factor"))
        if kind == "longrope" and len(short) != len(long):
            raise ValueError(f"rope: scaling longrope needs long_factor, {len(short)} numbers as in short_factor")
        low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
        if low is not None and high is not None and high <= low:
            raise ValueError(f"rope: scaling {kind}: high_freq_factor must be above low_freq_factor")

    def check(self, dims: Dims) -> None:
        """Raise ValueError if the rotated share of a head is not made of pairs."""
        for share in self._values("partial_rotary_factor"):
            rotated = int(share * dims.head_dim)
            if rotated < 2 or rotated % 2:
                raise ValueError(
                    f"rope: partial_rotary_factor={share} leaves {rotated} dimensions of {dims.head_dim} to rotate, "
                    "which are not pairs"
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
        for field in _FIELDS:
            value = getattr(self, field)
            named = set(value) if _is_by_type(field, value) else set()
            if unknown := sorted(named - set(base_types)):
                names = ", ".join(map(str, base_types))
                reason = "all its layers rotate alike" if None in base_types else f"it has {names}"
                raise ValueError(f"rope: {field} names {', '.join(unknown)}, which this base does not have: {reason}")
        if None not in base_types and isinstance(self.frequencies, tuple):
            raise ValueError(
                f"rope: the layer types of this base have frequencies of their own: give frequencies as a dict with "
                f"{', '.join(map(str, base_types))}"
            )
        return self._by_type({kind: self._filled(kind, each, length) for kind, each in base_types.items()})

    def _filled(self, layer_type: str | None, base: RopeParameters, length: int | None) -> tuple[Any, ...]:
        """Return the fields `_FIELDS` of one layer type, with everything that was None taken from the base."""
        chosen = {field: self._of_type(field, layer_type) for field in _FIELDS}
        scaling, frequencies = chosen["scaling"], chosen["frequencies"]
        own = {key: value for key, value in base.items() if key not in (*_BESIDE, "type")}
        own = {key: value for key, value in own.items() if key not in _unused(own)}
        if _are_numbers(frequencies):
            if scaling != "none":
                self._check_beside_numbers(chosen, base)
            scaling = "none"
        elif scaling is None:
            scaling = own if own.get("rope_type", "default") != "default" else "none"
        elif own.get("rope_type") == PROPORTIONAL and scaling != "none" and scaling["rope_type"] != PROPORTIONAL:
            where = "" if layer_type is None else f" in layers of the type {layer_type}"
            example: Any = {"rope_type": PROPORTIONAL, "factor": scaling.get("factor", 2.0)}
            raise ValueError(
                f"rope: this base rotates by the type proportional{where}, and scaling {scaling['rope_type']} would "
                "rotate other pairs by other frequencies: divide all its frequencies by a factor, scaling="
                f"{example if layer_type is None else {layer_type: example}}, or change rope_theta"
            )
        elif own.get("rope_type") == PROPORTIONAL and scaling == "none":
            scaling = {"rope_type": PROPORTIONAL}
        elif scaling != "none":
            scaling = self._scaling_of(scaling, own, length)
        theta, share = (chosen[field] or base.get(field) for field in _BESIDE)
        return theta or 10000.0, share or 1.0, scaling, frequencies

    @staticmethod
    def _scaling_of(given: RopeParameters, own: RopeParameters, length: int | None) -> RopeParameters:
        """Return a scaling with what it does not say: of the base's own type, all the base's own parameters."""
        kind = given["rope_type"]
        start = {_LENGTH: own.get(_LENGTH) or length} if kind in WITH_LENGTH else {}
        scaling = {**start, **(own if kind == own.get("rope_type") else {}), **given}
        if unused := sorted(_unused(scaling) & set(given)):
            raise ValueError(
                f"rope: scaling {kind}: {', '.join(unused)} would not be read: attention_factor replaces what it is "
                "computed from (attention_factor=None takes the base's away), and mscale counts only beside "
                "mscale_all_dim"
            )
        return {key: value for key, value in scaling.items() if key not in _unused(scaling)}

    def _check_beside_numbers(self, chosen: Mapping[str, object], base: RopeParameters) -> None:
        """Raise ValueError if frequencies would replace what the caller or the base says beside them."""
        for field in ("scaling", "rope_theta"):
            if chosen[field] is not None:
                raise ValueError(f"rope: frequencies are the angles themselves, so {field} would not be read")
        if (kind := base.get("rope_type", "default")) != "default":
            raise ValueError(
                f"rope: frequencies are the angles themselves, and this base has a scaling of type {kind}: give "
                "scaling='none' as well, which says that they replace it with all that it does"
            )

    def overridden(self, rotation: RopeParameters) -> str | None:
        """Return a warning, see `RotaryScheme.overridden`. Who names layers has said where a value is for."""
        own = by_layer_type(rotation)
        thetas = {each.get("rope_theta") for each in own.values()}
        for field, differ in (("rope_theta", thetas), ("scaling", set(map(str, own.values())))):
            value: Any = getattr(self, field)
            flat = value not in (None, "none") and not _is_by_type(field, value)
            if flat and self.layers is None and len(differ) > 1:
                return (
                    f"rope: {field} is one value for the layer types {', '.join(own)}, which this base rotates "
                    f"differently: to change one of them only, give {field}={ {[*own][-1]: value} }"
                )
        return None

    def with_frequencies(self, read: ReadFrequencies, length: int | None) -> "Rope":
        """Return the scheme with edits of the frequencies made, see `RotaryScheme.with_frequencies`.

        Raises:
            ValueError: if an edit is impossible, or if there are not as many frequencies as rotated pairs.
        """
        if self.frequencies is None:
            return self
        before = replace(self, frequencies=None)
        edited = {
            layer_type: self._edited(layer_type, length, found)
            for layer_type, found in read(before.rope_parameters()).items()
        }
        return self._by_type(edited)

    def _by_type(self, found: Mapping[Any, Sequence[Any]]) -> "Rope":
        """Return the scheme with the values of `_FIELDS` of each layer type; the type None stands for all layers."""
        values: dict[str, Any] = {
            field: {kind: each[i] for kind, each in found.items()} for i, field in enumerate(_FIELDS)
        }
        if None in found:
            return replace(self, **{field: of_types[None] for field, of_types in values.items()})
        if not any(values["frequencies"].values()):
            values["frequencies"] = None
        return replace(self, **values)

    def _edited(self, layer_type: str | None, length: int | None, found: ReadRotation) -> tuple[Any, ...]:
        """Return the fields `_FIELDS` of one layer type, after its edit.

        Args:
            layer_type: the layer type, or None if all layers share their frequencies.
            length: length in tokens at which the base was trained.
            found: the rotation without the edit.
        """
        unedited, obstacle, kept, _ = found
        theta, share, scaling, frequencies = (self._of_type(field, layer_type) for field in _FIELDS)
        if frequencies is None or not (unedited or _are_numbers(frequencies)):  # an edit, for a type that no layer has
            return theta, share, scaling, None
        if isinstance(frequencies, dict) and (stretch := EDITS[frequencies["name"]].stretch) is not None:
            if frequencies["factor"] == 1 or len(unedited) < 2:
                raise ValueError(f"rope: {frequencies} would change nothing: {len(unedited)} pairs are rotated")
            return theta * stretch(frequencies["factor"], len(unedited)), share, scaling, None
        if _are_numbers(frequencies):
            kept = {}
        else:
            if obstacle is not None:
                raise ValueError(
                    f"rope: frequencies cannot be edited here, because {obstacle}: give scaling='none', with "
                    "frequencies as numbers too, or another scaling"
                )
            frequencies = apply_edit(frequencies, unedited, length, layer_type)
        if len(frequencies) != len(unedited):
            reason = f"{len(unedited)} pairs of each head are rotated" if unedited else obstacle
            raise ValueError(f"rope: {len(frequencies)} frequencies were given, and {reason}")
        if scaling != "none" and scaling["rope_type"] == PROPORTIONAL:
            share = 1.0  # whose frequencies are those of the whole head
        if kept:
            longrope = longrope_factors(frequencies, theta)
            return theta, share, {"rope_type": "longrope", **longrope, "attention_factor": 1.0, **kept}, None
        return theta, share, "none", (list if layer_type else tuple)(frequencies)

    def _of_type(self, field: str, layer_type: str | None) -> Any:
        """Return the value of a field for one layer type."""
        value = getattr(self, field)
        return value.get(layer_type) if _is_by_type(field, value) else value

    def without_scaling(self) -> "Rope":
        """Return the scheme without scaling and frequencies, see `Scheme.without_scaling`."""
        return replace(self, scaling="none", frequencies=None)

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
        beside = {field: self._of_type(field, layer_type) for field in _BESIDE}
        if _are_numbers(frequencies := self._of_type("frequencies", layer_type)):
            factors = longrope_factors(frequencies, beside["rope_theta"])
            # without factor transformers warns
            parameters = {"rope_type": "longrope", **factors, "attention_factor": 1.0, "factor": 1.0}
        return {**parameters, **beside}


def longrope_factors(frequencies: Sequence[float], theta: float) -> RopeParameters:
    """Return the factors of a `longrope` that rotates by these frequencies, in contexts of any length."""
    count = len(frequencies)
    factors = [theta ** (-u / count) / w if w else UNROTATED for u, w in enumerate(frequencies)]
    return {"short_factor": factors, "long_factor": [*factors]}


def _are_numbers(frequencies: object) -> bool:
    return isinstance(frequencies, (list, tuple))


def _check_frequencies(frequencies: object) -> None:
    """Raise TypeError or ValueError unless these are frequencies of one layer type, or an edit of them."""
    if isinstance(frequencies, dict):
        check_edit(frequencies)
        return
    if not isinstance(frequencies, (list, tuple)):
        example = ", ".join(_EDIT_EXAMPLES.values())
        raise TypeError(f"rope: frequencies must be a list of numbers, or a dict ({example}), not {frequencies!r}")
    wrong = [w for w in frequencies if isinstance(w, bool) or not isinstance(w, (int, float)) or not 0 <= w <= math.pi]
    if wrong or not any(frequencies):
        found = repr(wrong[0]) if wrong else "none above 0"
        raise ValueError(f"rope: frequencies must be radians per token from 0 to pi, not all 0; found {found}")


def _unused(scaling: RopeParameters) -> set[str]:
    """Return the parameters of a scaling that transformers ignores because of its other parameters.

    `mscale_all_dim` is never ignored, because latent attention reads it as well, together with `factor`.
    """
    set_keys = {key for key, value in scaling.items() if value is not None}
    has_factor = "attention_factor" in set_keys
    unused = {"mscale"} & set(scaling) if has_factor or "mscale_all_dim" not in set_keys else set()
    if has_factor and scaling.get("rope_type") == "longrope" and "mscale_all_dim" not in set_keys:
        unused |= {"factor"} & set(scaling)
    return unused


def _is_by_type(field: str, value: Any) -> bool:
    """Return whether the value of a field is a dict by layer type. A single scaling is a dict with `rope_type`."""
    if field == "frequencies":
        return isinstance(value, dict) and "name" not in value
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
