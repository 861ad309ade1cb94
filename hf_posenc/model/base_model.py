"""A live model as its family describes it: sizes, windows, tables, token vectors. `rotation.py` has its rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from .. import families
from ..core.dims import Dims
from ..core.errors import UnsupportedModelError
from ..core.modules import Native, WithoutPositions
from ..families.base import Family, Resolved, base_model_type, family_of, resolve
from ..schemes.alibi import Alibi, alibi_slopes
from ..schemes.base import Scheme
from ..schemes.far_rope import BaseAngles
from ..schemes.rope import Rope
from ..transformers_glue import NAME
from ..transformers_glue.attention import KEEPING, SPLIT_HEADS
from ..transformers_glue.flash import is_flash, is_plain
from ..transformers_glue.token_numbers import cache_argument
from .eval_mode import evaluation
from .patch_record import language_model, patch_of
from .rotation import BaseRotation
from .watch import entering

RMS_SAMPLE = 4096
"""Number of tokens, spread over the vocabulary, from which the RMS of token vectors is computed."""


class LayerConfig:
    """A view of a model's config for one attention. Only some attributes or `rope_parameters` differ."""

    def __init__(self, whole: object, own: Mapping[str, object] | None = None, /, **parameters: object) -> None:
        """Make a view of a config.

        Args:
            whole: the model's config. Later changes of it show in the view.
            own: attributes with this attention's values.
            **parameters: keys of `rope_parameters`, with this attention's values.
        """
        self.__dict__.update(own or {}, whole=whole, parameters=parameters)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The model's `rope_parameters`, with this attention's values."""
        return {**self.whole.rope_parameters, **self.parameters}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's config."""
        if name in ("whole", "parameters"):  # a copy that is being made lacks them
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the model's config."""
        setattr(self.whole, name, value)


@dataclass(frozen=True)
class BaseModel:
    """A live model as its family describes it.

    Attributes:
        model: the model, with or without head.
        config: its config.
        family: facts about its architecture.
        modules: those modules of the model that the family names.
        sizes: layer index -> sizes of the layer's attention, for the layers that have attention.
        name: the stock model type.
        length: the length in tokens that the base was trained at, or None if the config does not say it.
        dims: sizes of the attention, in the first layer that has one.
        num_layers: number of decoder layers, with and without attention.
        rotated: for each layer, whether the base rotates its queries and keys.
        has_table: whether the base adds positions to its input, from a table.
        rotation: the base's rotation of queries and keys.
        keeps_table: whether the base's table of positions stays, because some layers keep the base's positions.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    family: Family
    modules: Resolved
    sizes: Mapping[int, Dims]
    name: str
    length: int | None
    dims: Dims
    num_layers: int
    rotated: tuple[bool, ...]
    has_table: bool
    rotation: BaseRotation
    keeps_table: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """Describe a model, or the language model inside a multimodal model.

        Raises:
            UnsupportedModelError: if no family serves the model, or its family refuses a setting.
        """
        family = family_of(model.config)  # of the whole, which its message names
        model = language_model(model)
        config = model.config
        found = resolve(family, model)
        count, name = len(found.layers), base_model_type(config)
        sizes = {index: _sizes(family, config, module, count, index) for index, module in found.attention_of.items()}
        length: int | None = getattr(config, family.names.config_length, None)
        dims, has_table = next(iter(sizes.values())), found.position_table is not None
        rotation = BaseRotation(family, found, config, sizes, length, name)
        return cls(model, config, family, found, sizes, name, length, dims, count, found.rotated, has_table, rotation)

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The configs of the model and its attentions, without repetition.

        An attention that was deep-copied has a config of its own.
        """
        found = {id(self.config): self.config}
        for module in self.modules.attentions:
            config: Any = module.__dict__.get("config", self.config)
            config = config.whole if isinstance(config, LayerConfig) else config
            found[id(config)] = config
        return list(found.values())

    @property
    def token_weight(self) -> Tensor:
        """The token vectors, (vocabulary, E)."""
        embedding: Any = self.modules.token_embedding  # PEFT's wrappers also have the attribute
        weight: Tensor = embedding.weight
        return weight

    @property
    def lenders(self) -> dict[int, int]:
        """Index of a layer that borrows keys and values -> index of the layer that lends them."""
        borrows_attribute = self.family.names.attention_borrows
        if borrows_attribute is None:
            return {}
        types = self.config.layer_types
        borrows = {i: bool(getattr(each, borrows_attribute)) for i, each in self.modules.attention_of.items()}
        lender_of_type = {types[layer]: layer for layer, borrowing in borrows.items() if not borrowing}
        return {layer: lender_of_type[types[layer]] for layer, borrowing in borrows.items() if borrowing}

    @property
    def has_temperature(self) -> bool:
        """Whether the base multiplies the queries of all layers by a factor that grows with the position."""
        keys = self.family.rotation.parameter_temperature
        return bool(keys) and bool(self.config.rope_parameters.get(keys[0]))

    @property
    def normed(self) -> tuple[int, ...]:
        """Indices of the layers in which the base norms queries and keys, beside their rotation."""
        return tuple(
            index
            for index, attention in self.modules.attention_of.items()
            for name in self.family.names.attention_norms
            if not isinstance(attention._modules.get(name), (type(None), nn.Identity))
        )

    @property
    def scaled_by_position(self) -> tuple[int, ...]:
        """Indices of the layers whose queries the base multiplies by a factor that grows with the position."""
        if self.has_temperature:
            return tuple(self.sizes)
        facts = self.family.rotation
        attentions: Mapping[int, Any] = self.modules.attention_of
        windows = self.windows if facts.config_temperature else {}
        return tuple(  # such a switch acts in unrotated layers only
            index
            for index, attention in attentions.items()
            if not self.rotated[index] and index not in windows
            if any(getattr(attention, name) for name in facts.attention_temperature)
            or any(getattr(attention.config, name) != off for name, off in facts.config_temperature.items())
        )

    @property
    def hides_attention(self) -> bool:
        """Whether queries and keys cannot be recorded, because the stock model bypasses the attention interface."""
        return self.family.always_replaced and patch_of(self.model) is None

    @property
    def positions_in_mask(self) -> bool:
        """Whether layers get positions only through the mask of our attention function."""
        return self.family.positions_in_mask

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of a fitted scheme's layers.

        If the scheme names no layers, these are all layers in which it can act.
        """
        assert not isinstance(scheme.layers, str)
        return scheme.possible_layers(self) if scheme.layers is None else scheme.layers

    def layers_with_scores(self) -> tuple[int, ...]:
        """Return the indices of a patched model's layers that have a scheme on their attention scores."""
        modules = {index: attention._modules.get("posenc") for index, attention in self.modules.attention_of.items()}
        return tuple(index for index, module in modules.items() if not isinstance(module, WithoutPositions | None))

    def own_scheme(self, layers: tuple[int, ...]) -> Scheme | None:
        """Return a scheme that computes the positions of a base without a rotary module, for some of its layers.

        Return None if the base's attention code encodes no positions by itself.
        """
        attention = self.family.attention
        if attention is None:
            return None
        if (factor := attention.alibi(self.modules.attentions[0])) is not None:
            slopes = tuple(factor * slope for slope in alibi_slopes(self.dims.num_heads))
            return Alibi(slopes=slopes, layers=layers)
        return self.rotation.fit(Rope(layers=layers), layers) if attention.rope_parameters(self.config) else None

    def own_angles(self, scheme: Scheme) -> dict[int, BaseAngles | None]:
        """Return how the base rotates each layer of a scheme, see `BaseRotation.angles`."""
        layers = self.layers_of(scheme)
        # Without a rotation of its own the factor is replaced with the rest of the base's positions.
        if self.modules.rotary is not None and (both := sorted(set(self.scaled_by_position).intersection(layers))):
            raise UnsupportedModelError(
                f"{scheme.name}: {self.name} itself multiplies the queries of layer {', '.join(map(str, both))} by a "
                "factor that grows with the position, which would be lost: name other layers"
            )
        return self.rotation.angles(scheme.name, layers)

    @property
    def windows(self) -> dict[int, int]:
        """Layer index -> the base's sliding window in tokens, for the layers that have one."""
        pieces, types = self.family.attention, getattr(self.config, "layer_types", None)
        windows = {}
        for layer, attention in self.modules.attention_of.items():
            window = None if pieces is None else pieces.window(attention)
            if window is None and (types is None or types[layer] in ("sliding_attention", "hybrid_sliding")):
                window = getattr(self.config, "sliding_window", None)
            if window is not None:
                windows[layer] = window
        return windows

    @property
    def layers_that_forget(self) -> set[int]:
        """Layers whose caches in transformers hold the last keys only, for sliding windows and chunks."""
        slides = DynamicCache(config=self.config).is_sliding
        return {*self.windows, *(layer for layer, forgets in enumerate(slides) if forgets)}

    def require_our_attention(self, scheme: str, *, keeps_kernel: bool = False) -> None:
        """Raise UnsupportedModelError if the model cannot use the attention function of this package.

        Args:
            scheme: name of the scheme that needs it, for messages.
            keeps_kernel: whether our attention function hands its calls to the model's flash attention.
        """
        if (self.model.tp_size or 1) > 1:
            raise UnsupportedModelError(f"{scheme}: {SPLIT_HEADS}")
        keeping = "" if self.family.always_replaced else f", or take a scheme that keeps the attention: {KEEPING}"
        reason = f"{scheme} changes attention scores, which {{}} cannot carry"
        self._refuse_other_attention(reason, keeping, flash=keeps_kernel)

    def require_equal_attention(self, action: str) -> None:
        """Raise UnsupportedModelError if the model attends by a function that another one cannot stand in for.

        Args:
            action: what the caller is about to do by other functions, as in "observe its scores".
        """
        reason = f"this {type(self.model).__name__} attends by {{}}, by which hf_posenc cannot {action}"
        self._refuse_other_attention(reason, flash=True)

    def _refuse_other_attention(self, reason: str, keeping: str = "", *, flash: bool) -> None:
        """Raise UnsupportedModelError for an attention implementation of the model that ours would not equal.

        Args:
            reason: the reason, with {} in place of its name.
            keeping: what else can be done.
            flash: whether transformers' own flash attention counts as equal.
        """
        for attention in self.modules.attentions:
            for config in (self.config, getattr(attention, "config", self.config)):
                backend: str = config._attn_implementation
                if backend != NAME and not is_plain(backend, attention) and not (flash and is_flash(backend)):
                    raise UnsupportedModelError(
                        f'{reason.format(backend)}: load the model with attn_implementation="sdpa" or "eager" first, '
                        f"if they compute what {backend} does{keeping}"
                    )

    def require_token_numbers(self, scheme: str, layers: Sequence[int]) -> None:
        """Raise UnsupportedModelError if numbers of tokens cannot be cached beside the keys of these layers.

        Args:
            scheme: name of the scheme that makes the numbers, for messages.
            layers: indices of its layers.
        """
        reason = self.family.loses_numbers
        if reason is None and any(cache_argument(self.modules.attention_of[layer]) is None for layer in layers):
            reason = "hands its attention no cache"
        if shared := sorted({*self.lenders, *self.lenders.values()}.intersection(layers)):
            reason = f"shares the keys of layer {', '.join(map(str, shared))} with other layers"
        if reason is not None:
            raise UnsupportedModelError(
                f"{scheme} keeps numbers of each token beside the keys in the cache, and {self.name} {reason}"
            )

    def require_query_numbers(self, scheme: str, layers: Sequence[int]) -> None:
        """Raise UnsupportedModelError if numbers of the queries cannot reach the attention function of these layers.

        Args:
            scheme: name of the scheme that makes the numbers, for messages.
            layers: indices of its layers.
        """
        for attention in (self.modules.attention_of[layer] for layer in layers):
            kinds = {each.kind for each in signature(type(attention).forward).parameters.values()}
            if Parameter.VAR_KEYWORD not in kinds and not self.family.always_replaced:
                raise UnsupportedModelError(
                    f"{scheme} makes numbers of the queries from hidden states, and the attention of {self.name} hands "
                    "its attention function no further arguments"
                )

    @cached_property
    def native(self) -> Native:
        """The base's own positions, from which schemes can start.

        The table is detached, and its first row is position 0.
        """
        table = None
        if isinstance(self.modules.position_table, nn.Embedding):
            table = self.modules.position_table.weight.detach()[self.family.table_offset :]
        return Native(table, self._token_rms, self.length)

    def _token_rms(self) -> float:
        """Return the RMS of the token vectors that enter the first layer, without positions; 0 on the meta device."""
        weight, modules = self.token_weight, self.modules
        if weight.is_meta:
            return 0.0
        tokens = torch.arange(0, len(weight), max(1, len(weight) // RMS_SAMPLE), device=weight.device)
        if self.has_table:
            vectors: Tensor = modules.token_embedding(tokens)
        else:  # a forward pass, because many families scale their embeddings
            with evaluation(modules.decoder):  # dropout would change the RMS
                vectors = entering(modules.decoder, modules.layers[0], tokens[:, None])
        return vectors.detach().double().square().mean().sqrt().item()


def _sizes(family: Family, config: PreTrainedConfig, attention: nn.Module, num_layers: int, layer: int) -> Dims:
    """Return the sizes of one attention."""
    attributes = {field: attribute for field, attribute in vars(family.names).items() if isinstance(attribute, str)}
    own = {field: getattr(attention, attributes[field]) for field in attributes if field.startswith("attention_")}
    heads = own.get("attention_heads") or config.num_attention_heads  # which some configs refuse where layers differ
    groups = own.get("attention_key_value_groups")
    key_value_heads = own.get("attention_key_value_heads") or (groups and heads // groups)
    head_dim = own.get("attention_head_dim") or config.hidden_size // heads
    return Dims(
        num_heads=heads,
        num_key_value_heads=int(key_value_heads or getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        value_dim=own.get("attention_value_dim", head_dim),
        layer=layer,
    )


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that owns the layers of a model."""
    model = language_model(model)
    return families.base.decoder_of(family_of(model.config), model)
