"""Modules that make the angles by which queries and keys are rotated: a base's own class, or LLaMA's."""

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
from ..schemes.base import PROPORTIONAL, by_layer_type
from . import POSITION_IDS, Arguments

ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Key of `rope_parameters`, and attribute of some configs, which transformers prefers to the key."""


def turned_dimensions(rotary: nn.Module) -> int:
    """Return the number of dimensions of a head for which a rotary module makes cosines.

    Args:
        rotary: of transformers, or of this package.
    """
    if isinstance(rotary, PartialRotary):
        return rotary.size
    if isinstance(rotary, Rotation):
        return 2 * len(rotary.frequencies(torch.device("cpu")))
    return 2 * next(b.shape[-1] for name, b in rotary.named_buffers() if name.endswith("inv_freq"))


ROTATION = "position_embeddings"
"""Argument of a decoder layer that holds its cosines and sines."""

COORDINATES = 3
"""Time, height and width, where positions have several coordinates and the config does not say how many."""

Turned = Tensor | tuple[Tensor, Tensor]
"""Output of a rotary module: cosines and sines, or complex numbers."""


def by_pair(turned: Turned, angles: str) -> tuple[Tensor, Tensor]:
    """Return one cosine and sine per pair, (B|1, T, F) each, from a rotary module's; see `RotationFacts.angles`."""
    if isinstance(turned, Tensor):
        return turned.real, turned.imag
    cos, sin = turned
    if angles == "once":
        return cos, sin
    taken = slice(None, None, 2) if angles == "each twice" else slice(cos.shape[-1] // 2)
    return cos[..., taken], sin[..., taken]


def as_given(cos: Tensor, sin: Tensor, angles: str) -> Turned:
    """Return cosines and sines (B|1, T, F) in the form that a family's attention takes; see `RotationFacts.angles`."""
    if angles == "complex":
        wide = torch.promote_types(cos.dtype, torch.float32)  # complex numbers of half precision are hardly supported
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
    """A stand-in for a base's rotary module: cos 1 and sin 0, which rotate nothing, exactly."""

    def __init__(self, native: nn.Module, angles: str = "list twice") -> None:
        """Return as many cosines as the native module would.

        Args:
            native: the base's rotary module. The number of pairs that it rotates is that of its frequencies, for each
                layer type where these differ.
            angles: the form in which it returns them, see `RotationFacts.angles`.
        """
        super().__init__()
        end = "inv_freq"
        found = {name[: -len(end)].rstrip("_"): b.shape[-1] for name, b in native.named_buffers() if name.endswith(end)}
        self.pairs = {name: count for name, count in found.items() if not name.endswith("original")}
        self.angles = angles
        answer_like(self, native)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Turned:
        """Return ones and zeros in the dtype of x and the form of the native module, for (B|1, T) positions.

        Further arguments of families are ignored, but for the layer type.
        """
        kind = args[0] if args else kwargs.get("layer_type")
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids  # a text model's, three times over
        shape = (*position_ids.shape, self.pairs.get(kind or "", max(self.pairs.values())))
        return as_given(x.new_ones(1).expand(shape), x.new_zeros(1).expand(shape), self.angles)


class PartialRotary(nn.Module):
    """A rotary module with cos and sin widened for a base that rotates whole heads; the added pairs stand still."""

    def __init__(self, rotary: nn.Module, size: int, *, takes: str = "list twice", gives: str = "list twice") -> None:
        """Wrap a rotary module.

        Args:
            rotary: a module that returns cos and sin of fewer dimensions.
            size: D.
            takes: the form in which it returns its angles, see `RotationFacts.angles`.
            gives: the form in which the base's attention takes them.
        """
        super().__init__()
        self.rotary = rotary
        self.size = size
        self.takes = takes
        self.gives = gives

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Turned:
        """Return cos and sin of D / 2 pairs, for (B|1, T) positions."""
        cos, sin = by_pair(self.rotary(x, position_ids, *args, **kwargs), self.takes)
        padding = (0, self.size // 2 - cos.shape[-1])
        pad = torch.nn.functional.pad
        return as_given(pad(cos, padding, value=1.0), pad(sin, padding), self.gives)


class RotaryByType(nn.Module):
    """A rotary module for each layer type, where heads of some types are larger."""

    def __init__(self, rotaries: Mapping[str, nn.Module]) -> None:
        """Take the modules.

        Args:
            rotaries: by layer type; each is called with the layer type too.
        """
        super().__init__()
        self.rotaries = nn.ModuleDict(rotaries)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Turned:
        """Return cos and sin for the heads of a layer type, for (B|1, T) positions."""
        turned: Turned = self.rotaries[layer_type](x, position_ids, layer_type)
        return turned


class _Asked(RopeParameters):
    """`rope_parameters` that record the keys which transformers reads. No list of upstream's says which these are."""

    def __init__(self, parameters: RopeParameters) -> None:
        super().__init__(parameters)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"rope: scaling {self.get('rope_type')} needs {key}")

    def get(self, key: str, default: object = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def unread(self) -> set[str]:
        """Return the keys that nobody asked for.

        `partial_rotary_factor` is not among them, since this package applies it where the base does not. `type`, the
        old name of `rope_type`, counts as unread: transformers asks for it, but does not use it beside `rope_type`.
        """
        return set(self) - (self.asked - {"type"}) - {"rope_type", "partial_rotary_factor"}


def turn_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Return the arguments of a decoder layer, with the rotation among them replaced by its scheme's."""
    position_ids, state = handed_down(kwargs), on_layer(layer)
    assert state.rotation is not None
    names = state.arguments[: len(args)]
    if {**dict(zip(names, args, strict=False)), **kwargs}.get(ROTATION) is None or position_ids is None:
        raise ValueError("the rotation did not arrive at the decoder layer by name, so it cannot be replaced")
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if state.coordinates:  # older releases of transformers want all of them from outside the module
        position_ids = position_ids.expand(state.coordinates, -1, -1)
    turned = state.rotation()(hidden_states, position_ids, *state.rotation_arguments)
    if ROTATION in names:
        at = names.index(ROTATION)
        return (*args[:at], turned, *args[at + 1 :]), kwargs
    return args, {**kwargs, ROTATION: turned}


def handed_down(kwargs: Arguments) -> Tensor | None:
    """Return the position ids (B|1, T) that a decoder layer is called with, or None."""
    found = kwargs.get(POSITION_IDS)
    return kwargs.get("position_ids") if found is None else found


def own_rotation(
    config: PreTrainedConfig, dims: Dims, native: nn.Module | None, slices_rotary: bool, sizes: Mapping[str, int]
) -> RopeParameters:
    """Return the base's own `rope_parameters`, as far as transformers reads them.

    Args:
        config: of the base model.
        dims: of its attention.
        native: its rotary module, or None.
        slices_rotary: whether its attention turns as many dimensions as there are cosines; otherwise it turns all.
        sizes: of its heads by layer type, where they differ.

    Returns:
        One dict, or one by layer type; empty if the config has none.
    """
    own = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    if not own:
        return {}
    for each in by_layer_type(own).values():
        each.setdefault("rope_type", each.get("type", "default"))
        if native is not None and not slices_rotary and each["rope_type"] != PROPORTIONAL:
            each.pop("partial_rotary_factor", None)
    _, asked = _rotary(own, config, dims, native, slices_rotary, sizes)
    for kind, read in asked.items():
        for key in read.unread():
            del by_layer_type(own)[kind][key]
    return own


def scaling_types() -> tuple[str, ...]:
    """Return the `rope_type` values that the installed transformers can compute, beside none."""
    return tuple(ROPE_INIT_FUNCTIONS)


def _of_share(made: type[nn.Module], config: PreTrainedConfig, head_dim: int, share: float) -> nn.Module:
    """Return a rotary module of whole heads of one size, which turns a share of each."""
    alike = copy.copy(config)
    alike.per_layer_config = None  # all layers have the smaller heads that it is shown
    alike.head_dim = int(head_dim * share)
    return PartialRotary(made(alike), head_dim)


def make_rotary(
    parameters: RopeParameters,
    config: PreTrainedConfig,
    dims: Dims,
    native: nn.Module | None,
    slices_rotary: bool,
    sizes: Mapping[str, int] | None = None,
) -> nn.Module:
    """Return a rotary module with these parameters: the base's own class where it has one, else LLaMA's.

    Args:
        parameters: transformers' `rope_parameters`.
        config: of the base model, left as it is.
        dims: of its attention.
        native: its rotary module, or None.
        slices_rotary: whether its attention turns as many dimensions as there are cosines; otherwise it turns all.
        sizes: of its heads by layer type, where they differ.

    Returns:
        A module (x, position_ids (B|1, T), ...) -> cos, sin (B|1, T, R).

    Raises:
        ValueError: where transformers finds the parameters wrong or missing, or would not read one of them.
    """
    rotary, asked = _rotary(parameters, config, dims, native, slices_rotary, sizes or {})
    for each in asked.values():
        if unread := sorted(each.unread()):
            known = ", ".join(sorted(each.asked - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}))
            raise ValueError(
                f"rope: scaling {each['rope_type']} has no parameter {', '.join(unread)}; it has {known or 'none'}"
            )
    return rotary


def _rotary(
    parameters: RopeParameters,
    config: PreTrainedConfig,
    dims: Dims,
    native: nn.Module | None,
    slices_rotary: bool,
    sizes: Mapping[str, int],
) -> tuple[nn.Module, dict[str | None, _Asked]]:
    """Return the module of `make_rotary` without its last check, and the parameters that were asked, by layer type."""
    length = config.max_position_embeddings
    config = copy.deepcopy(config) if native is not None else LlamaConfig(max_position_embeddings=length)
    parameters = copy.deepcopy(parameters)
    types = by_layer_type(parameters)
    size = dims.head_dim
    if not slices_rotary:  # these classes know whole heads only: show them a smaller head
        shares = {
            kind: 1.0 if each["rope_type"] == PROPORTIONAL else each.pop("partial_rotary_factor", 1.0)
            for kind, each in types.items()
        }
        if len(set(shares.values())) > 1 and not sizes:
            raise ValueError("rope: this base turns whole heads, so partial_rotary_factor is one for all layer types")
        share = shares[next(iter(types))]
        # Latent attention rotates a part of each head, and Mistral 4's config says the size of the whole.
        if native is None or (not sizes and (share != 1 or dims.head_dim != getattr(config, "head_dim", None))):
            config.head_dim = size = int(dims.head_dim * share)
    if None in types and hasattr(config, ORIGINAL_LENGTH) and ORIGINAL_LENGTH in parameters:
        setattr(config, ORIGINAL_LENGTH, parameters[ORIGINAL_LENGTH])  # the config's own would be taken instead
    asked = {kind: _Asked(each) for kind, each in types.items()}
    config.rope_parameters = asked[None] if None in types else asked
    made = LlamaRotaryEmbedding if native is None else type(native)
    try:
        rotary = made(config)
        if sizes and not slices_rotary and set(shares.values()) != {1.0}:
            rotary = RotaryByType({kind: _of_share(made, config, sizes[kind], shares[kind]) for kind in types})
        config.rope_parameters = parameters
        config.validate_rope()
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"rope: transformers cannot compute {parameters}: {type(error).__name__} {error}") from error
    there = getattr(config, "layer_types", None) or ()
    judged = {kind: each for kind, each in asked.items() if kind is None or kind in there}
    return rotary if native is None or size == dims.head_dim else PartialRotary(rotary, dims.head_dim), judged
