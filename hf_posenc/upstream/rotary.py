"""Rotary modules, which make the cosines and sines that rotate queries and keys: the base's own class, or LLaMA's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..dims import Dims
from ..layer_state import on_layer
from ..modules import Rotation
from ..placement import RopeParameters
from ..schemes.base import PROPORTIONAL, by_layer_type, depends_on_length
from . import POSITION_IDS, Arguments

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


ROTATION = "position_embeddings"
"""Name of the decoder layer's argument that carries cosines and sines."""

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


class RotaryByType(nn.Module):
    """One rotary module per layer type, for a base whose heads are larger in some layer types."""

    def __init__(self, rotaries: Mapping[str, nn.Module]) -> None:
        """Register the modules.

        Args:
            rotaries: layer type -> rotary module, which is called with the layer type as third argument.
        """
        super().__init__()
        self.rotaries = nn.ModuleDict(rotaries)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Angles:
        """Return cos and sin for the heads of a layer type, for (B|1, T) positions."""
        turned: Angles = self.rotaries[layer_type](x, position_ids, layer_type)
        return turned


class _RecordedParameters(RopeParameters):
    """`rope_parameters` that record which keys transformers reads. transformers publishes no list of them."""

    def __init__(self, parameters: RopeParameters) -> None:
        super().__init__(parameters)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"rope: scaling {self.get('rope_type')} needs {key}")

    def get(self, key: str, default: object = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def unread(self) -> set[str]:
        """Return the keys that transformers did not read.

        `partial_rotary_factor` counts as read, since this package applies it where the base does not. `type`, the old
        name of `rope_type`, counts as unread: beside `rope_type` transformers looks it up without using it.
        """
        return set(self) - (self.keys_read - {"type"}) - {"rope_type", "partial_rotary_factor"}


def turn_layer(layer: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Return the arguments of a decoder layer with its cosines and sines replaced by those of its scheme."""
    position_ids, state = handed_down(kwargs), on_layer(layer)
    assert state.rotation is not None
    names = state.arguments[: len(args)]
    if {**dict(zip(names, args, strict=False)), **kwargs}.get(ROTATION) is None or position_ids is None:
        raise ValueError("the rotation did not arrive at the decoder layer by name, so it cannot be replaced")
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if state.coordinates:  # rotary modules of older releases of transformers take one id per coordinate
        position_ids = position_ids.expand(state.coordinates, -1, -1)
    angles = state.rotation()(hidden_states, position_ids, *state.rotation_arguments)
    if ROTATION in names:
        index = names.index(ROTATION)
        return (*args[:index], angles, *args[index + 1 :]), kwargs
    return args, {**kwargs, ROTATION: angles}


def handed_down(kwargs: Arguments) -> Tensor | None:
    """Return the position ids (B|1, T) among the arguments of a decoder layer, or None."""
    position_ids = kwargs.get(POSITION_IDS)
    return kwargs.get("position_ids") if position_ids is None else position_ids


def own_rotation(
    config: PreTrainedConfig, dims: Dims, native: nn.Module | None, slices_rotary: bool, sizes: Mapping[str, int]
) -> RopeParameters:
    """Return the base's `rope_parameters` without the keys that transformers does not read.

    Args:
        config: config of the base model.
        dims: sizes of its attention.
        native: its rotary module, or None.
        slices_rotary: whether its attention rotates as many dimensions as cos has, instead of whole heads.
        sizes: layer type -> head size, where it differs.

    Returns:
        One dict, or layer type -> dict; empty if the config has no `rope_parameters`.
    """
    rope_parameters = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    if not rope_parameters:
        return {}
    for each in by_layer_type(rope_parameters).values():
        each.setdefault("rope_type", each.get("type", "default"))
        if native is not None and not slices_rotary and each["rope_type"] != PROPORTIONAL:
            each.pop("partial_rotary_factor", None)
    _, recorded = _rotary(rope_parameters, config, dims, native, slices_rotary, sizes)
    for layer_type, parameters in recorded.items():
        for key in parameters.unread():
            del by_layer_type(rope_parameters)[layer_type][key]
    return rope_parameters


def read_frequencies(rotary: nn.Module, parameters: RopeParameters) -> dict[Any, tuple[tuple[float, ...], str | None]]:
    """Return the frequencies of a rotary module, see `schemes.base.ReadFrequencies`.

    transformers has them in float32. Those of the type `default` are returned in float64.

    Args:
        rotary: a module of `make_rotary`.
        parameters: its `rope_parameters`.
    """
    found: dict[Any, tuple[tuple[float, ...], str | None]] = {}
    for layer_type, each in by_layer_type(parameters).items():
        prefix = "" if layer_type is None else f"{layer_type}_"
        module = _module_with(rotary, f"{prefix}inv_freq")
        if module is None:  # no layer has this type
            found[layer_type] = (), f"no layer of this base has the type {layer_type}"
            continue
        buffer: Tensor = getattr(module, f"{prefix}inv_freq")
        frequencies = buffer.double().cpu()
        count = len(frequencies)
        exact = each["rope_theta"] ** (-torch.arange(count, dtype=torch.float64) / count)
        if each["rope_type"] == "default" and torch.allclose(frequencies, exact, rtol=1e-6, atol=0):
            frequencies = exact
        obstacle = None
        if depends_on_length(each):
            obstacle = f"those of the scaling {each['rope_type']} depend on the length of the context"
        elif getattr(module, f"{prefix}attention_scaling", 1.0) != 1:
            obstacle = f"the scaling {each['rope_type']} multiplies cosines and sines as well"
        found[layer_type] = tuple(frequencies.tolist()), obstacle
    return found


def frequency_table(rotary: nn.Module, layer_type: str | None) -> tuple[tuple[float, ...], float]:
    """Return the frequencies of a rotary module as it has them, and its factor on cosines and sines.

    Args:
        rotary: a module of `make_rotary`.
        layer_type: the layer's type, where the module has frequencies for several.
    """
    if isinstance(rotary, RotaryByType) and layer_type is not None:
        rotary = rotary.rotaries[layer_type]
    prefix = "" if layer_type is None else f"{layer_type}_"
    module = _module_with(rotary, f"{prefix}inv_freq")
    frequencies: Tensor = getattr(module, f"{prefix}inv_freq")
    return tuple(frequencies.double().tolist()), float(getattr(module, f"{prefix}attention_scaling", 1.0))


def _module_with(rotary: nn.Module, attribute: str) -> nn.Module | None:
    """Return the part of a rotary module that has an attribute, or None."""
    return next((module for module in rotary.modules() if hasattr(module, attribute)), None)


@torch.no_grad()
def read_rotation(
    rotary: nn.Module, parameters: RopeParameters, position_ids: Tensor
) -> dict[Any, tuple[tuple[float, ...], float]]:
    """Return layer type -> frequencies and attention factor of a new rotary module in a context of some length.

    Args:
        rotary: a module of `make_rotary`, which changes if its frequencies depend on the length.
        parameters: its `rope_parameters`.
        position_ids: the last position of the context, (1, 1), or (coordinates, 1, 1).

    Returns:
        As `read_frequencies`, with the factor on cosines and sines in place of the obstacle.
    """
    for layer_type, each in by_layer_type(parameters).items():
        if depends_on_length(each):
            rotary(torch.zeros(1), position_ids, *([] if layer_type is None else [layer_type]))
    found = {}
    for layer_type, (frequencies, _) in read_frequencies(rotary, parameters).items():
        name = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
        found[layer_type] = frequencies, float(getattr(_module_with(rotary, name), name, 1.0))
    return found


def scaling_types() -> tuple[str, ...]:
    """Return the `rope_type` values that the installed transformers can compute, apart from `default`."""
    return tuple(ROPE_INIT_FUNCTIONS)


def _partial_rotary(rotary_class: type[nn.Module], config: PreTrainedConfig, head_dim: int, share: float) -> nn.Module:
    """Return a rotary module that rotates a share of heads of one size, for a base that rotates whole heads."""
    smaller = copy.copy(config)
    smaller.per_layer_config = None  # the smaller head size is that of all layers
    smaller.head_dim = int(head_dim * share)
    return PartialRotary(rotary_class(smaller), head_dim)


def make_rotary(
    parameters: RopeParameters,
    config: PreTrainedConfig,
    dims: Dims,
    native: nn.Module | None,
    slices_rotary: bool,
    sizes: Mapping[str, int] | None = None,
) -> nn.Module:
    """Make a rotary module with these parameters, of the base's rotary class if it has one, otherwise of LLaMA's.

    Args:
        parameters: transformers' `rope_parameters`.
        config: config of the base model. It is not changed.
        dims: sizes of its attention.
        native: its rotary module, or None.
        slices_rotary: whether its attention rotates as many dimensions as cos has, instead of whole heads.
        sizes: layer type -> head size, where it differs.

    Returns:
        A module (x, position_ids (B|1, T), ...) -> cos, sin (B|1, T, R).

    Raises:
        ValueError: if transformers calls a parameter wrong or missing, or would not read one of them.
    """
    rotary, recorded = _rotary(parameters, config, dims, native, slices_rotary, sizes or {})
    for each in recorded.values():
        if unread := sorted(each.unread()):
            known_keys = ", ".join(
                sorted(each.keys_read - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
            )
            raise ValueError(
                f"rope: scaling {each['rope_type']} has no parameter {', '.join(unread)}; it has {known_keys or 'none'}"
            )
    return rotary


def _rotary(
    parameters: RopeParameters,
    config: PreTrainedConfig,
    dims: Dims,
    native: nn.Module | None,
    slices_rotary: bool,
    sizes: Mapping[str, int],
) -> tuple[nn.Module, dict[str | None, _RecordedParameters]]:
    """Return the module of `make_rotary`, unchecked, and layer type -> parameters with the keys that were read."""
    length = config.max_position_embeddings
    config = copy.deepcopy(config) if native is not None else LlamaConfig(max_position_embeddings=length)
    parameters = copy.deepcopy(parameters)
    types = by_layer_type(parameters)
    size = dims.head_dim
    if not slices_rotary:  # these classes only compute whole heads, so they get a config with smaller heads
        shares = {
            layer_type: 1.0 if each["rope_type"] == PROPORTIONAL else each.pop("partial_rotary_factor", 1.0)
            for layer_type, each in types.items()
        }
        if len(set(shares.values())) > 1 and not sizes:
            raise ValueError("rope: this base turns whole heads, so partial_rotary_factor is one for all layer types")
        share = shares[next(iter(types))]
        # Latent attention rotates a part of each head, and Mistral 4's config says the size of the whole.
        if native is None or (not sizes and (share != 1 or dims.head_dim != getattr(config, "head_dim", None))):
            config.head_dim = size = int(dims.head_dim * share)
    if None in types and hasattr(config, ORIGINAL_LENGTH) and ORIGINAL_LENGTH in parameters:
        setattr(config, ORIGINAL_LENGTH, parameters[ORIGINAL_LENGTH])  # transformers prefers this attribute
    recorded = {layer_type: _RecordedParameters(each) for layer_type, each in types.items()}
    config.rope_parameters = recorded[None] if None in types else recorded
    rotary_class = LlamaRotaryEmbedding if native is None else type(native)
    try:
        rotary = rotary_class(config)
        if sizes and not slices_rotary and set(shares.values()) != {1.0}:
            rotary = RotaryByType(
                {
                    layer_type: _partial_rotary(rotary_class, config, sizes[layer_type], shares[layer_type])
                    for layer_type in types
                }
            )
        config.rope_parameters = parameters
        config.validate_rope()
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"rope: transformers cannot compute {parameters}: {type(error).__name__} {error}") from error
    layer_types = getattr(config, "layer_types", None) or ()
    to_check = {
        layer_type: each for layer_type, each in recorded.items() if layer_type is None or layer_type in layer_types
    }
    return rotary if native is None or size == dims.head_dim else PartialRotary(rotary, dims.head_dim), to_check
