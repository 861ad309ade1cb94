"""A live model as its family describes it: sizes, windows, tables, token vectors. `rotation.py` has its rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from .. import families
from ..dims import Dims
from ..errors import UnsupportedModelError
from ..families.base import Family, Resolved, base_model_type, resolve
from ..families.lookup import family_of
from ..modules import Native, WithoutPositions
from ..placement import Placed
from ..schemes.alibi import Alibi, alibi_slopes
from ..schemes.base import RotaryScheme, Scheme
from ..schemes.far_rope import BaseAngles
from ..schemes.rope import Rope
from ..upstream.attention import SPLIT_HEADS
from ..upstream.token_numbers import cache_argument
from .eval_mode import evaluation
from .layer_config import LayerConfig
from .patch_record import language_model, patch_of
from .rotation import BaseRotation
from .watch import entering

RMS_SAMPLE = 4096
"""Number of tokens, spread over the vocabulary, from which the RMS of token vectors is computed."""


@dataclass(frozen=True)
class BaseModel:
    """A live model as its family describes it. Implements `hf_posenc.placement.Base`.

    Attributes:
        model: the model, with or without head.
        family: facts about its architecture.
        modules: those modules of the model that the family names.
        sizes: layer index -> sizes of the layer's attention, for the layers that have attention.
        keeps_table: whether the base's table of positions stays, because some layers keep the base's positions.
    """

    model: PreTrainedModel
    family: Family
    modules: Resolved
    sizes: Mapping[int, Dims]
    keeps_table: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """Describe a model, or the language model inside a multimodal model.

        Raises:
            UnsupportedModelError: if no family serves the model, or its family refuses a setting.
        """
        model = language_model(model)
        config = model.config
        family = family_of(config)
        found = resolve(family, model)
        count = len(found.layers)
        sizes = {index: _sizes(family, config, module, count) for index, module in found.attention_of.items()}
        return cls(model, family, found, sizes)

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        return self.model.config

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The configs of the model and its attentions, without repetition.

        An attention that was deep-copied has a config of its own.
        """
        attention_configs = (module.config for module in self.modules.attentions if "config" in module.__dict__)
        model_configs = (config.whole if isinstance(config, LayerConfig) else config for config in attention_configs)
        return list({id(config): config for config in (self.config, *model_configs)}.values())

    @property
    def name(self) -> str:
        """The stock model type."""
        return base_model_type(self.config)

    @property
    def length(self) -> int | None:
        """The length in tokens that the base was trained at, or None if the config does not say it."""
        return getattr(self.config, self.family.names.config_length, None)

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""
        return next(iter(self.sizes.values()))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, with and without attention."""
        return len(self.modules.layers)

    @property
    def token_weight(self) -> Tensor:
        """The token vectors, (vocabulary, E)."""
        embedding: Any = self.modules.token_embedding  # PEFT's wrappers also have the attribute
        weight: Tensor = embedding.weight
        return weight

    @property
    def rotation(self) -> BaseRotation:
        """The base's rotation of queries and keys."""
        return BaseRotation(self.family, self.modules, self.config, self.sizes)

    @property
    def rotated(self) -> tuple[bool, ...]:
        """For each layer, whether the base rotates its queries and keys."""
        return self.modules.rotated

    @property
    def lenders(self) -> dict[int, int]:
        """Index of a layer that borrows keys and values -> index of the layer that lends them."""
        borrows_attribute = self.family.names.attention_borrows
        if borrows_attribute is None:
            return {}
        types = self.config.layer_types
        borrowers, lender_of_type = [], {}
        for layer, attention in self.modules.attention_of.items():
            if getattr(attention, borrows_attribute):
                borrowers.append(layer)
            else:
                lender_of_type[types[layer]] = layer
        return {layer: lender_of_type[types[layer]] for layer in borrowers}

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
        switches = self.family.rotation.attention_temperature
        return tuple(  # such a switch acts in unrotated layers only
            index
            for index, attention in self.modules.attention_of.items()
            if not self.rotated[index] and any(getattr(attention, name) for name in switches)
        )

    @property
    def hides_attention(self) -> bool:
        """Whether queries and keys cannot be recorded, because the stock model bypasses the attention interface."""
        return self.family.always_replaced and patch_of(self.model) is None

    @property
    def has_table(self) -> bool:
        """Whether the base adds positions to its input, from a table."""
        return self.modules.position_table is not None

    @property
    def positions_in_mask(self) -> bool:
        """Whether layers get positions only through the mask of our attention function."""
        return self.family.positions_in_mask

    def layers_of(self, scheme: Placed) -> tuple[int, ...]:
        """Return the indices of a fitted scheme's layers.

        If the scheme names no layers, these are all layers in which it can act.
        """
        assert not isinstance(scheme.layers, str)
        return scheme.acts_on.possible_layers(self) if scheme.layers is None else scheme.layers

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
        return self.fit_rotation(Rope(layers=layers)) if attention.rope_parameters(self.config) else None

    def fit_rotation(self, scheme: RotaryScheme) -> RotaryScheme:
        """Return a rotary scheme, with unset hyper-parameters taken from the base. See `BaseRotation.fit`."""
        return self.rotation.fit(scheme, self.layers_of(scheme))

    def own_angles(self, scheme: Scheme) -> dict[int, BaseAngles | None]:
        """Return how the base rotates each layer of a scheme, see `BaseRotation.angles`."""
        layers = self.layers_of(scheme)
        if both := sorted(set(self.scaled_by_position).intersection(layers)):
            raise UnsupportedModelError(
                f"{scheme.name}: {self.name} itself multiplies the queries of layer {', '.join(map(str, both))} by a "
                "factor that grows with the position, which would be lost: name other layers"
            )
        return self.rotation.angles(scheme.name, layers)

    def has_own_rotation(self, scheme: RotaryScheme) -> bool:
        """Return whether a fitted rotary scheme is the base's own rotation."""
        return self.rotation.is_own(scheme)

    def turns_like_stock(self, scheme: RotaryScheme) -> bool:
        """Return whether a stock class would rotate the scheme's layers as the patched model does."""
        return self.rotation.is_stock(scheme, self.layers_of(scheme))

    @property
    def windows(self) -> dict[int, int]:
        """Layer index -> the base's sliding window in tokens, for the layers that have one."""
        pieces, types = self.family.attention, getattr(self.config, "layer_types", None)
        windows = {}
        for layer, attention in self.modules.attention_of.items():
            window = None if pieces is None else pieces.window(attention)
            if window is None and (types is None or types[layer] == "sliding_attention"):
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
        backend = self.config._attn_implementation or "eager"
        if not keeps_kernel and ("flash" in backend or "paged" in backend):
            raise UnsupportedModelError(
                f"{scheme} changes attention scores, which {backend} cannot carry: load the model with "
                'attn_implementation="sdpa" or "eager" first'
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

    def native(self) -> Native:
        """Return the base's own positions, from which schemes can start.

        The table is detached, and its first row is position 0.
        """
        table = None
        if isinstance(self.modules.position_table, nn.Embedding):
            table = self.modules.position_table.weight.detach()[self.family.table_offset :]
        return Native(table, self._token_rms(), self.length)

    def _token_rms(self) -> float:
        """Return the RMS of the token vectors that enter the first layer, without positions; 0 on the meta device."""
        weight = self.token_weight
        if weight.is_meta:
            return 0.0
        tokens = torch.arange(0, len(weight), max(1, len(weight) // RMS_SAMPLE), device=weight.device)
        if self.has_table:
            vectors: Tensor = self.modules.token_embedding(tokens)
        else:  # a forward pass, because many families scale their embeddings
            with evaluation(self.modules.decoder):  # dropout would change the RMS
                vectors = entering(self.modules.decoder, self.modules.layers[0], tokens[:, None])
        return vectors.detach().double().square().mean().sqrt().item()


def _sizes(family: Family, config: PreTrainedConfig, attention: nn.Module, num_layers: int) -> Dims:
    """Return the sizes of one attention."""
    names = family.names
    heads = config.num_attention_heads if names.attention_heads is None else getattr(attention, names.attention_heads)
    key_value_heads = None
    if (attribute := names.attention_key_value_heads) is not None:
        key_value_heads = int(getattr(attention, attribute))
    if (attribute := names.attention_key_value_groups) is not None:
        key_value_heads = heads // getattr(attention, attribute)
    head_dim_attribute = names.attention_head_dim
    head_dim = config.hidden_size // heads if head_dim_attribute is None else getattr(attention, head_dim_attribute)
    return Dims(
        num_heads=heads,
        num_key_value_heads=key_value_heads or getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        value_dim=head_dim if names.attention_value_dim is None else getattr(attention, names.attention_value_dim),
    )


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that owns the layers of a model."""
    model = language_model(model)
    return families.base.decoder_of(family_of(model.config), model)
