"""A live model as its family describes it: sizes, windows, tables, token vectors. Its rotation is in `rotation.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import families
from ..errors import UnsupportedModelError
from ..families.base import Family, Resolved, base_model_type, resolve
from ..modules import Native, WithoutPositions
from ..registry import family_for
from ..schemes.base import Dims, RotaryScheme, Scheme
from ..upstream.attention import SPLIT_HEADS
from .eval_mode import evaluation
from .layer_config import LayerConfig
from .rotation import BaseRotation
from .state import language_model, patch_of
from .watch import entering

SAMPLE = 4096
"""Number of tokens, from all over the vocabulary, by which the size of token vectors is measured."""


@dataclass(frozen=True)
class BaseModel:
    """A live model as its family describes it. Placements ask it questions, see `hf_posenc.placement.Base`.

    Attributes:
        model: with or without head.
        family: what is known of its architecture.
        found: its modules.
        sizes: of the attention of each layer that has one, by the layer's index.
        keeps_table: whether its own table of positions stays, because some layers keep what the base has.
    """

    model: PreTrainedModel
    family: Family
    found: Resolved
    sizes: Mapping[int, Dims]
    keeps_table: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """Describe a model; of a multimodal one, the language model inside.

        Raises:
            UnsupportedModelError: if its family is not known, or refuses a setting of it.
        """
        model = language_model(model)
        config = model.config
        family = family_for(base_model_type(config))
        found = resolve(family, model)
        count = len(found.layers)
        sizes = {index: _sizes(family, config, module, count) for index, module in found.attention_of.items()}
        return cls(model, family, found, sizes)

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def configs(self) -> list[Any]:
        """The model's config, and those of its attentions: a layer that was copied (copy.deepcopy) has its own."""
        own = (module.config for module in self.found.attentions if "config" in module.__dict__)
        of_attentions = (each.whole if isinstance(each, LayerConfig) else each for each in own)
        return list({id(config): config for config in (self.config, *of_attentions)}.values())

    @property
    def name(self) -> str:
        """Stock model type."""
        return base_model_type(self.config)

    @property
    def length(self) -> int | None:
        """The length the base was made for, in tokens, or None if its config does not say."""
        return getattr(self.config, self.family.names.config_length, None)

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""
        return next(iter(self.sizes.values()))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, with and without attention."""
        return len(self.found.layers)

    @property
    def rotation(self) -> BaseRotation:
        """How the base turns queries and keys."""
        return BaseRotation(self.family, self.found, self.config, self.dims)

    @property
    def rotated(self) -> tuple[bool, ...]:
        """For each layer, whether the base turns its queries and keys."""
        return self.found.rotated

    @property
    def has_temperature(self) -> bool:
        """Whether queries of all layers are multiplied by a factor that grows with the position."""
        keys = self.family.rotation.parameter_temperature
        return bool(keys) and bool(self.config.rope_parameters.get(keys[0]))

    @property
    def hides_attention(self) -> bool:
        """Whether nobody sees its queries and keys: a stock model that never calls transformers' interface."""
        return self.family.always_replaced and patch_of(self.model) is None

    @property
    def has_table(self) -> bool:
        """Whether positions enter at the input, from a table."""
        return self.found.position_table is not None

    @property
    def positions_in_mask(self) -> bool:
        """Whether layers can only take their positions from the mask of our attention function."""
        return self.family.positions_in_mask

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of a fitted scheme's layers; without a selection those in which it can act."""
        assert not isinstance(scheme.layers, str)
        return scheme.acts_on.possible_layers(self) if scheme.layers is None else scheme.layers

    def layers_with_scores(self) -> tuple[int, ...]:
        """Return the layers of a patched model that have a scheme on their attention scores."""
        modules = {index: attention._modules.get("posenc") for index, attention in self.found.attention_of.items()}
        return tuple(index for index, module in modules.items() if not isinstance(module, WithoutPositions | None))

    def fit_rotation(self, scheme: RotaryScheme) -> RotaryScheme:
        """Return a rotary scheme with all that was not given taken from the base, see `BaseRotation.fit`."""
        return self.rotation.fit(scheme, self.layers_of(scheme))

    def has_own_rotation(self, scheme: RotaryScheme) -> bool:
        """Return whether a fitted rotary scheme is what the base does by itself."""
        return self.rotation.is_own(scheme)

    def turns_like_stock(self, scheme: RotaryScheme) -> bool:
        """Return whether a stock class would turn the scheme's layers as the patched model does."""
        return self.rotation.is_stock(scheme, self.layers_of(scheme))

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window that the base gives a layer, in tokens, or None."""
        own = self.family.attention
        if own is not None and (window := own.window(self.found.attention_of.get(layer))) is not None:
            return window
        types = getattr(self.config, "layer_types", None)
        if types is not None and types[layer] != "sliding_attention":
            return None
        return getattr(self.config, "sliding_window", None)

    def require_own_attention(self, scheme: str) -> None:
        """Raise UnsupportedModelError if the attention function of this package cannot compute the attention."""
        if (self.model.tp_size or 1) > 1:
            raise UnsupportedModelError(f"{scheme}: {SPLIT_HEADS}")
        backend = self.config._attn_implementation or "eager"
        if "flash" in backend or "paged" in backend:
            raise UnsupportedModelError(
                f"{scheme} changes attention scores, which {backend} cannot carry: load the model with "
                'attn_implementation="sdpa" or "eager" first'
            )

    def native(self) -> Native:
        """Return what the base uses for positions; the table is detached, without the rows before position 0."""
        table = None
        if isinstance(self.found.position_table, nn.Embedding):
            table = self.found.position_table.weight.detach()[self.family.table_offset :]
        return Native(table, self._token_rms(), self.length)

    def _token_rms(self) -> float:
        """Return the root mean square of what enters the first layer, without positions; 0 on the meta device."""
        embedding: Any = self.found.token_embedding
        if embedding.weight.is_meta:
            return 0.0
        size = embedding.weight.shape[0]
        tokens = torch.arange(0, size, max(1, size // SAMPLE), device=embedding.weight.device)
        if self.has_table:
            vectors = embedding(tokens)
        else:  # a forward pass, because many families scale their embeddings on the way
            with evaluation(self.found.decoder):  # without dropout, which would change their size
                vectors = entering(self.found.decoder, self.found.layers[0], tokens[:, None])
        return vectors.detach().double().square().mean().sqrt().item()


def _sizes(family: Family, config: Any, attention: Any, num_layers: int) -> Dims:
    """Return the sizes of one attention."""
    names = family.names
    heads = config.num_attention_heads if names.attention_heads is None else getattr(attention, names.attention_heads)
    keys = names.attention_key_value_heads
    own = None if keys is None else int(getattr(attention, keys))
    dim = names.attention_head_dim
    size = config.hidden_size // heads if dim is None else getattr(attention, dim)
    return Dims(
        num_heads=heads,
        num_key_value_heads=own or getattr(config, "num_key_value_heads", None) or heads,
        head_dim=size,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        value_dim=size if names.attention_value_dim is None else getattr(attention, names.attention_value_dim),
    )


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that owns the layers of a model of a known family."""
    model = language_model(model)
    return families.base.decoder_of(family_for(base_model_type(model.config)), model)
