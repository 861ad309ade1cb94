"""Rotary modules, which make the cosines and sines that rotate queries and keys: the base's own class, or LLaMA's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..core.dims import Dims
from ..core.errors import UnsupportedModelError
from ..core.modules import Rotation
from ..families.base import RotationFacts, base_model_type
from ..schemes.base import PROPORTIONAL, ReadRotation, RopeParameters, by_layer_type, depends_on_length

ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Key of `rope_parameters`. Some configs have an attribute of that name, which transformers prefers to the key."""


def turned_dimensions(rotary: nn.Module) -> int:
    """Return how many dimensions of a head a rotary module rotates.

    Args:
        rotary: a rotary module of transformers or of this package.
    """
    if isinstance(rotary, PartialRotary):
        return rotary.size
    if isinstance(rotary, Rotation):
        return 2 * len(rotary.frequencies(torch.device("cpu")))
    return 2 * next(b.shape[-1] for name, b in rotary.named_buffers() if name.endswith("inv_freq"))


COORDINATES = 3
"""Number of coordinates of a position (time, height and width) where the config does not say how many there are."""

Angles = Tensor | tuple[Tensor, Tensor]
"""Output of a rotary module: cosines and sines, or complex numbers `e^ia`."""


def by_pair(output: Angles, angles: str) -> tuple[Tensor, Tensor]:
    """Return one cosine and one sine per pair, both (B|1, T, F), from a rotary module's output in the form `angles`.

    The forms are those of `RotationFacts.angles`.
    """
    if isinstance(output, Tensor):
        return output.real, output.imag
    cos, sin = output
    if angles == "once":
        return cos, sin
    taken = slice(None, None, 2) if angles == "each twice" else slice(cos.shape[-1] // 2)
    return cos[..., taken], sin[..., taken]


def steady_rotation(rotary: nn.Module, angles: str, length: int | None, size: int) -> tuple[Tensor, float]:
    """Return the frequencies by which a rotary module turns pairs, in radians per token, and its factor on cos and sin.

    Args:
        rotary: a rotary module of transformers or of this package.
        angles: the form of its output, see `RotationFacts.angles`.
        length: what it was trained at, in tokens; None means 4096.
        size: D.

    Returns:
        (D / 2,) float64 on the CPU, and a number.

    Raises:
        ValueError: with the reason, if these are not the same at all lengths of the text, or not for whole heads.
    """
    rotary = copy.deepcopy(rotary).cpu()  # some keep the frequencies of the last call
    short, long = (
        by_pair(rotary(torch.zeros(1), torch.tensor([[1, last - 1]])), angles) for last in (2, 16 * (length or 4096))
    )
    cos, sin = (each[0, 0].double() for each in short)
    if not all(torch.equal(one[0, 0], other[0, 0]) for one, other in zip(short, long, strict=True)):
        raise ValueError("its angles depend on the length of the text")
    if 2 * len(cos) != size:
        raise ValueError("it rotates a part of each head")
    strength = torch.hypot(cos, sin)
    if not torch.allclose(strength, strength[:1], rtol=1e-5):
        raise ValueError("it scales pairs differently")
    mean = float(strength.mean())
    return torch.atan2(sin, cos), round(mean, 6) if abs(mean - 1) > 1e-6 else 1.0


def from_pairs(cos: Tensor, sin: Tensor, angles: str) -> Angles:
    """Return one cosine and one sine per pair, both (B|1, T, F), in the form `angles`; the inverse of `by_pair`."""
    if angles == "complex":
        wide = torch.promote_types(cos.dtype, torch.float32)  # torch hardly supports complex half precision
        return torch.complex(cos.to(wide), sin.to(wide))
    if angles == "once":
        return cos, sin
    if angles == "each twice":
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def answer_like(rotary: nn.Module, native: nn.Module | None) -> None:
    """Give a rotary module what decoders read of their own one: types of layers, and the pairs of each coordinate."""
    for asked in ("layer_types", "mrope_section"):
        if hasattr(native, asked):
            setattr(rotary, asked, getattr(native, asked))


class IdentityRotary(nn.Module):
    """A stand-in for a base's rotary module that rotates nothing: cos is 1 and sin is 0."""

    def __init__(self, native: nn.Module, angles: str = "list twice") -> None:
        """Count the pairs that the native module rotates, by layer type where they differ.

        Args:
            native: the base's rotary module. It has one frequency per pair.
            angles: the form of its output, see `RotationFacts.angles`.
        """
        super().__init__()
        end = "inv_freq"
        sizes = {name[: -len(end)].rstrip("_"): b.shape[-1] for name, b in native.named_buffers() if name.endswith(end)}
        self.pairs = {name: count for name, count in sizes.items() if not name.endswith("original")}
        self.angles = angles
        answer_like(self, native)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Angles:
        """Return ones and zeros in the dtype of x and the form of the native module, for (B|1, T) positions.

        Of the other arguments only the layer type is read.
        """
        layer_type = args[0] if args else kwargs.get("layer_type")
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids  # coordinates: the first is enough
        shape = (*position_ids.shape, self.pairs.get(layer_type or "", max(self.pairs.values())))
        return from_pairs(x.new_ones(1).expand(shape), x.new_zeros(1).expand(shape), self.angles)


class PartialRotary(nn.Module):
    """A rotary module of part of a head, for a base that rotates whole heads. The other pairs get the angle 0."""

    def __init__(self, rotary: nn.Module, size: int, *, takes: str = "list twice", gives: str = "list twice") -> None:
        """Wrap a rotary module.

        Args:
            rotary: a module that returns cos and sin of fewer dimensions.
            size: D.
            takes: the form of the wrapped module's output, see `RotationFacts.angles`.
            gives: the form of this module's output, which the base's attention takes.
        """
        super().__init__()
        self.rotary = rotary
        self.size = size
        self.takes = takes
        self.gives = gives

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> Angles:
        """Return cos and sin of D / 2 pairs, for (B|1, T) positions."""
        cos, sin = by_pair(self.rotary(x, position_ids, *args, **kwargs), self.takes)
        padding = (0, self.size // 2 - cos.shape[-1])
        pad = torch.nn.functional.pad
        return from_pairs(pad(cos, padding, value=1.0), pad(sin, padding), self.gives)


class _RecordedParameters(RopeParameters):
    """`rope_parameters` that record which keys transformers reads. transformers publishes no list of them.

    Attributes:
        keys_read: keys that a rotary module or the config's own check read.
        keys_used: keys that the module read.
    """

    def __init__(self, parameters: RopeParameters) -> None:
        super().__init__(parameters)
        self.keys_read: set[str] = set()
        self.keys_used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"rope: scaling {self.get('rope_type')} needs {key}")

    def get(self, key: str, default: object = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def unread(self, read: set[str]) -> set[str]:
        """Return the keys that are not among those that were read.

        `partial_rotary_factor` counts as read, since this package applies it where the base does not. `type`, the old
        name of `rope_type`, counts as unread: beside `rope_type` transformers looks it up without using it.
        """
        return set(self) - (read - {"type"}) - {"rope_type", "partial_rotary_factor"}


class RotarySource(NamedTuple):
    """What rotary modules are made from.

    Attributes:
        config: config of the base model. It is not changed.
        dims: sizes of its attention.
        native: its rotary module, whose class is taken; None for LLaMA's.
        facts: how it rotates.
        sizes: layer type -> head size, where it differs.
    """

    config: PreTrainedConfig
    dims: Dims
    native: nn.Module | None
    facts: RotationFacts
    sizes: Mapping[str, int] = MappingProxyType({})


def own_rotation(source: RotarySource) -> RopeParameters:
    """Return the base's `rope_parameters` without the keys that nobody reads.

    Returns:
        One dict, or layer type -> dict; empty if the base rotates nothing.

    Raises:
        UnsupportedModelError: if the config does not describe the rotary module.
    """
    config, _, native, facts, _ = source
    rope_parameters = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    if not rope_parameters:
        if native is not None and _module_with(native, "inv_freq") is not None:  # not one of this package
            raise UnsupportedModelError(f"the config of {config.model_type} has no rope_parameters: set them")
        return {}
    for each in by_layer_type(rope_parameters).values():
        each.setdefault("rope_type", each.get("type", "default"))
        if native is not None and not facts.slices_rotary and each["rope_type"] != PROPORTIONAL:
            each.pop("partial_rotary_factor", None)
    _, recorded = _rotary(rope_parameters, source)
    for layer_type, parameters in recorded.items():
        for key in parameters.unread(parameters.keys_read) - facts.parameters_read:
            del by_layer_type(rope_parameters)[layer_type][key]
    return rope_parameters


def read_frequencies(
    rotary: nn.Module, parameters: RopeParameters, facts: RotationFacts, position_ids: Tensor | None = None
) -> dict[Any, ReadRotation]:
    """Return the frequencies of a rotary module, see `schemes.base.ReadFrequencies`.

    transformers has them in float32. Those of the type `default` are returned in float64.

    Args:
        rotary: a module of `make_rotary`, which changes if its frequencies depend on the length.
        parameters: its `rope_parameters`.
        facts: how the base rotates.
        position_ids: the last position of the context, (1, 1), or (coordinates, 1, 1). None means any short context.
    """
    found: dict[Any, ReadRotation] = {}
    for layer_type, each in by_layer_type(parameters).items():
        prefix = "" if layer_type is None else f"{layer_type}_"
        module = _module_with(rotary, f"{prefix}inv_freq")
        if module is None:
            found[layer_type] = ReadRotation((), f"no layer of this base has the type {layer_type}", {})
            continue
        if position_ids is not None and depends_on_length(each):
            rotary(torch.zeros(1), position_ids, *([] if layer_type is None else [layer_type]))
        frequencies, factor = frequency_table(rotary, layer_type)
        exact = each["rope_theta"] ** (-torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies))
        if each["rope_type"] == "default" and torch.allclose(exact.new_tensor(frequencies), exact, rtol=1e-6, atol=0):
            frequencies = tuple(exact.tolist())
        obstacle = None
        kind: Any = getattr(module, "rope_type", None)  # what the module itself makes of the type in the config
        kind = kind[layer_type] if isinstance(kind, dict) else kind or each["rope_type"]
        if depends_on_length({**each, "rope_type": kind}):
            obstacle = f"those of the scaling {each['rope_type']} depend on the length of the context"
        elif factor != 1:
            obstacle = f"the scaling {each['rope_type']} multiplies cosines and sines as well"
        found[layer_type] = ReadRotation(frequencies, obstacle, facts.kept(each), factor)
    return found


def frequency_table(rotary: nn.Module, layer_type: str | None) -> tuple[tuple[float, ...], float]:
    """Return the frequencies of a rotary module as it has them, and its factor on cosines and sines.

    Args:
        rotary: a module of `make_rotary`.
        layer_type: the layer's type, where the module has frequencies for several.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    module = _module_with(rotary, f"{prefix}inv_freq")
    frequencies: Tensor = getattr(module, f"{prefix}inv_freq")
    return tuple(frequencies.double().tolist()), float(getattr(module, f"{prefix}attention_scaling", 1.0))


def _module_with(rotary: nn.Module, attribute: str) -> nn.Module | None:
    """Return the part of a rotary module that has an attribute, or None."""
    return next((module for module in rotary.modules() if hasattr(module, attribute)), None)


def make_rotary(parameters: RopeParameters, source: RotarySource) -> nn.Module:
    """Make a rotary module with these `rope_parameters` of transformers.

    Returns:
        A module (x, position_ids (B|1, T), ...) -> cos, sin (B|1, T, R).

    Raises:
        ValueError: if transformers calls a parameter wrong or missing, or nobody would read one of them, unless the
            base has it so.
    """
    rotary, recorded = _rotary(parameters, source)
    own = by_layer_type(getattr(source.config, "rope_parameters", None) or {})
    for layer_type, each in recorded.items():
        stray = {key for key, value in each.items() if own.get(layer_type, {}).get(key) == value}
        if unread := sorted(each.unread(each.keys_used) - source.facts.parameters_read - stray):
            known = sorted(each.keys_used - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
            raise ValueError(
                f"rope: scaling {each['rope_type']} has no parameter {', '.join(unread)}; it has "
                f"{', '.join(known) or 'none'}"
            )
    return rotary


def _rotary(
    parameters: RopeParameters, source: RotarySource
) -> tuple[nn.Module, dict[str | None, _RecordedParameters]]:
    """Return the module of `make_rotary`, unchecked, and layer type -> parameters with the keys that were read."""
    config, dims, native, facts, sizes = source
    length = config.max_position_embeddings
    config = copy.deepcopy(config) if native is not None else LlamaConfig(max_position_embeddings=length)
    parameters = copy.deepcopy(parameters)
    types = by_layer_type(parameters)
    size = dims.head_dim
    if not facts.slices_rotary:  # these classes only compute whole heads, so they get a config with smaller heads
        shares = {
            1.0 if each["rope_type"] == PROPORTIONAL else each.pop("partial_rotary_factor", 1.0)
            for each in types.values()
        }
        if len(shares) > 1 or (sizes and shares != {1.0}):
            raise ValueError("rope: this base turns whole heads, so partial_rotary_factor is one for all layers")
        (share,) = shares
        # Latent attention rotates a part of each head, and Mistral 4's config says the size of the whole.
        if native is None or (not sizes and (share != 1 or dims.head_dim != getattr(config, "head_dim", None))):
            config.head_dim = size = int(dims.head_dim * share)
    if None in types and hasattr(config, ORIGINAL_LENGTH) and ORIGINAL_LENGTH in parameters:
        setattr(config, ORIGINAL_LENGTH, parameters[ORIGINAL_LENGTH])  # transformers prefers this attribute
    recorded = {layer_type: _RecordedParameters(each) for layer_type, each in types.items()}
    config.rope_parameters = recorded[None] if None in types else recorded
    try:
        rotary = (LlamaRotaryEmbedding if native is None else type(native))(config)
        for each in recorded.values():
            each.keys_used = set(each.keys_read)
        config.validate_rope()
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        if str(error).startswith("rope: "):
            raise
        kinds = " and ".join(sorted({each["rope_type"] for each in types.values()}))
        raise ValueError(
            f"rope: {base_model_type(config)} cannot rotate by {kinds}: {error}. Give a scaling that it takes (a "
            "longrope has one number for each rotated pair of a head), or only another rope_theta, as frequencies by "
            "the names abf and ntk do; all other frequencies become a longrope"
        ) from error
    config.rope_parameters = parameters
    used = (None, *(getattr(config, "layer_types", None) or ()))
    to_check = {layer_type: each for layer_type, each in recorded.items() if layer_type in used}
    return rotary if native is None or size == dims.head_dim else PartialRotary(rotary, dims.head_dim), to_check
