"""What the package has to know about a model family, as data, and its resolution against a live model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a family of architectures keeps its layers and its native positions, and what of it cannot be patched.

    Names are dotted attribute paths. Nothing is guessed: `resolve` looks every name up before a model is changed.

    Attributes:
        model_types: the `config.model_type` values the family serves.
        decoder: from the base model (`model.base_model`) to the module that owns the layers; `""`: the base itself,
            as it is in any case for a model without a head that has layers.
        layers: from the decoder to the `nn.ModuleList` of decoder layers.
        attention: from a layer to its self-attention module. That module calls transformers' attention interface, or
            the family says `bypasses_interface`; it has `scaling` and `layer_idx`, or the family says how to get them.
        token_embedding: from the decoder to the token embedding.
        rotary: from the decoder to the module that makes cos and sin for all layers; `None`: the family has none.
        position_table: from the decoder to the native table of learned positions, an `nn.Embedding`; `None`: the family
            has none.
        table_offset: rows of the native table that precede the row of position 0.
        slices_rotary: the family rotates only the first `cos.shape[-1]` dimensions of each head, so that a narrower
            cos means partial rotation; otherwise the width of cos must be what the attention expects.
        rotary_size: attribute of the attention module that holds how many dimensions of a head it rotates, where it
            slices by that and not by the width of cos.
        pairs: which dimensions of a head the family turns together: `half`, `(u, u + R/2)`, or `interleaved`,
            `(2u, 2u + 1)`.
        interleaved_if: config attribute that, where it is true, has neighbouring dimensions turned together; `None`:
            `pairs` says it for all models.
        angles: what its rotary module gives for the angles `a, b, ...` of the pairs: `list twice`, cosines and sines
            `[a, b, ..., a, b, ...]`; `each twice`, `[a, a, b, b, ...]`; `once`, `[a, b, ...]`; `complex`, one tensor
            `[e^ia, e^ib, ...]`.
        rotary_part: attribute of the attention that holds the size of the part of each head which is set apart for
            rotation (latent attention, MLA); `None`: rotation begins at the first dimension of a head.
        rescales: its attention, when it is made, takes a factor of `scaling` from `rope_parameters` (YaRN's
            `mscale_all_dim`).
        query_is_scaled: queries reach the attention function already multiplied by `attention.scaling`, and it is
            called with `scaling=1.0`.
        refuse: config attributes that must be absent or falsy, each with the reason a user is told.
        split_heads: `(attention, hidden_states (B, T, E))` -> query, key, value, each `(B, H, T, D)`, as the family's
            own attention makes them. Only for families without rotary embedding, whose attention is replaced by one
            that rotates; together with the next two.
        merge_heads: `(attention, output (B, T, H, D))` -> `(B, T, E)`, output projection and residual dropout included.
        attention_dropout: `(attention)` -> dropout probability of the attention weights while training.
        use_rope_flag: attribute of the attention module that switches rotation on (truthy) or off for that layer;
            `None`: every layer rotates, or `rotates` says which.
        rotates: `(attention)` -> whether the family's code rotates in that layer, where it decides by itself.
        rotated_layers: config attribute that holds one number per layer, 1 where it rotates; goes with `use_rope_flag`.
        hybrid: some layers have no attention; they are those in which `attention` leads to no module with `scaling`.
        undivided: why its sequences cannot be divided over processes; `None`: they can, unless it is `hybrid`.
        heads: attribute of the attention that holds its number of query heads, where it differs by layer.
        drops_position_ids: its `position_ids` do not reach the attention, or the layers.
        coordinates: key of `rope_parameters` that divides the pairs of a head among several coordinates of a position,
            (3, B, T), or (4, B, T) behind those of the text; `None`: a position is one number.
        temperature: attributes of the attention by which queries are multiplied with a factor that grows with the
            position, and the values that switch that off.
        temperature_keys: keys of `rope_parameters` that do the same; the first is the strength of the factor, 0 for
            none.
        unrotated_twin: model type of the family, perhaps this one, that computes the same and can leave layers
            unrotated: what a model whose layers are partly unrotated is exported as; `None`: there is none.
        bypasses_interface: its attention never calls transformers' attention interface. Whatever the scheme, it is
            replaced by one that does, in every layer; so there are no layers that keep what the base has, and
            `without_positions` is needed beside the three functions above.
        without_positions: `(attention, arguments)` -> the arguments of the stock forward, by name and without the
            hidden states, changed so that its own positions do nothing; `attention_mask` is a float mask that is added
            to scores. What the replaced attention leaves out is found by comparing with this.
        add_residual: `(attention, merged (B, T, E), residual (B, T, E))` -> (B, T, E), where the attention itself adds
            the residual that it is called with.
        scaling: `(attention)` -> factor of the scores, where the attention has no attribute `scaling`.
        layer_index: attribute of the attention that numbers the layers.
        key_value_heads: attribute of the attention that holds how many heads keys and values have; `None`: the config
            says it.
        cache: argument of the attention that holds the key-value cache.
        also_returns: attribute of the attention that it returns behind its output and its weights; `None`: nothing.
        own_rotation: `(config)` -> the base's own rotation as transformers' `rope_parameters`, where the config does
            not have them; empty if it rotates nothing.
        idle_rotary: module of the decoder that makes cos and sin which nobody reads once the attention is replaced.
        own_window: `(attention)` -> sliding window of the layer in tokens or `None`, where it is not in the mask.
        length: attribute of the config that holds the length the base was made for; a config may lack it.
        sized_by_length: modules of the family hold a matrix or table of that length, so that it is not raised where a
            scheme has no limit.
        positions_in_mask: position ids do not reach the layers; they are put into the position channel instead.
        mask_as_bool: the decoder turns its mask into bools.
        own_positions: what the base has for positions, in a few words for the list of families, where the other fields
            do not say it.
        note: what a user of schemes has to know of it beside the other fields, a clause for the list of families.
        decoder_attributes: attributes of the decoder, and what they are set to in order to switch off positions that
            the decoder makes itself.
    """

    model_types: tuple[str, ...]
    decoder: str = ""
    layers: str = "layers"
    attention: str = "self_attn"
    token_embedding: str = "embed_tokens"
    rotary: str | None = "rotary_emb"
    position_table: str | None = None
    table_offset: int = 0
    slices_rotary: bool = False
    rotary_size: str | None = None
    pairs: str = "half"
    interleaved_if: str | None = None
    angles: str = "list twice"
    rotary_part: str | None = None
    rescales: bool = False
    query_is_scaled: bool = False
    refuse: Mapping[str, str] = field(default_factory=dict)
    split_heads: Callable[[nn.Module, torch.Tensor], Heads] | None = None
    merge_heads: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    attention_dropout: Callable[[nn.Module], float] | None = None
    use_rope_flag: str | None = None
    rotated_layers: str | None = None
    rotates: Callable[[nn.Module], bool] | None = None
    hybrid: bool = False
    undivided: str | None = None
    heads: str | None = None
    drops_position_ids: bool = False
    coordinates: str | None = None
    temperature: Mapping[str, Any] = field(default_factory=dict)
    temperature_keys: tuple[str, ...] = ()
    unrotated_twin: str | None = None
    bypasses_interface: bool = False
    without_positions: Callable[[nn.Module, dict[str, Any]], dict[str, Any]] | None = None
    add_residual: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    scaling: Callable[[nn.Module], float] | None = None
    layer_index: str = "layer_idx"
    key_value_heads: str | None = None
    cache: str = "past_key_values"
    also_returns: str | None = None
    own_rotation: Callable[[Any], dict[str, Any]] | None = None
    idle_rotary: str | None = None
    own_window: Callable[[nn.Module], int | None] | None = None
    length: str = "max_position_embeddings"
    sized_by_length: bool = False
    positions_in_mask: bool = False
    mask_as_bool: bool = False
    own_positions: str | None = None
    note: str = ""
    decoder_attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_table(self) -> bool:
        """Whether positions enter at the input, from a table."""
        return self.position_table is not None


@dataclass(frozen=True)
class Resolved:
    """The modules of one live model that a family names.

    Attributes:
        decoder: the module that owns the layers.
        layers: the decoder layers, first to last.
        attention_of: the self-attention module of each layer that has one, by the layer's index, in order.
        token_embedding: the token embedding.
        rotary: the module that makes cos and sin, or `None`.
        position_table: the native table of learned positions, or `None`.
        rotated: for each layer, whether the base turns its queries and keys.
    """

    decoder: nn.Module
    layers: list[nn.Module]
    attention_of: dict[int, nn.Module]
    token_embedding: nn.Module
    rotary: nn.Module | None
    position_table: nn.Module | None
    rotated: tuple[bool, ...]

    @property
    def attentions(self) -> list[nn.Module]:
        """The self-attention modules, first to last."""
        return list(self.attention_of.values())


def base_model_type(config: Any) -> str:
    """Return the stock model type of a config, also of one of our own (`posenc_gpt2` -> `gpt2`).

    It is that of the config's class: a config that was read from a file repeats what the file says, which may be
    another name of the same type (`gpt-sw3`).
    """
    return str(type(config).model_type or config.model_type).removeprefix("posenc_")


def resolve(family: Family, model: nn.Module) -> Resolved:
    """Looks up everything an family names in a live model, and changes nothing.

    Args:
        family: the family of the model's family.
        model: a transformers model, with or without a head.

    Returns:
        The modules found.

    Raises:
        UnsupportedModelError: the config has a setting the family refuses, or a name leads nowhere; the message has
            the family's field, the dotted name and the class of the module it was looked up in.
    """
    config = model.config
    for attribute, reason in family.refuse.items():
        value = getattr(config, attribute, None)
        if value:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be patched: config.{attribute} = {_shown(value)}; {reason}"
            )
    # Upstream's own switch for turning any decoder into an encoder: the "causal" mask is then bidirectional.
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be patched: config.is_causal = {config.is_causal}; "
            "every scheme is defined for keys at or before the query; set it to True"
        )

    decoder = decoder_of(family, model)
    found = _module(family, "layers", decoder)
    if not isinstance(found, nn.ModuleList) or len(found) == 0:
        raise UnsupportedModelError(
            f"family for {', '.join(family.model_types)}: layers={family.layers!r} of {type(decoder).__name__} is "
            f"no ModuleList with at least one layer, but {_shown(found)}"
        )
    layers = [getattr(layer, "_orig_mod", layer) for layer in found]  # torch.compile(layer) wraps one, and hides hooks
    attentions = {
        index: _module(family, "attention", layer)
        for index, layer in enumerate(layers)
        if not family.hybrid or _attends(family, layer)
    }
    if not attentions:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be patched: none of its layers has attention")
    named = (family.layer_index, family.use_rope_flag, family.rotary_size, family.rotary_part, family.heads)
    for attention in attentions.values():
        for needed in ("scaling" if family.scaling is None else None, *named, family.key_value_heads):
            if needed is not None and not hasattr(attention, needed):
                raise UnsupportedModelError(
                    f"family for {', '.join(family.model_types)}: attention={family.attention!r} is a "
                    f"{type(attention).__name__}, which has no attribute {needed!r}"
                )
    # Set to None, it says that this model rotates nothing, as some settings of some families do.
    unset = family.rotary is not None and getattr(decoder, family.rotary, decoder) is None
    rotary = None if family.rotary is None or unset else _module(family, "rotary", decoder)
    return Resolved(
        decoder=decoder,
        layers=layers,
        attention_of=attentions,
        token_embedding=_module(family, "token_embedding", decoder),
        rotary=rotary,
        position_table=_module(family, "position_table", decoder) if family.position_table is not None else None,
        rotated=tuple(
            rotary is not None and index in attentions and _rotates(family, attentions[index])
            for index in range(len(layers))
        ),
    )


def decoder_of(family: Family, model: nn.Module) -> nn.Module:
    """Return the module that owns the layers; a model of some families is that itself when it has no head.

    Raises:
        UnsupportedModelError: if the name leads nowhere.
    """
    base: Any = model.base_model
    return base if base is model and hasattr(base, family.layers) else _module(family, "decoder", base)


def _attends(family: Family, layer: nn.Module) -> bool:
    found: Any = layer
    for attribute in family.attention.split("."):
        found = getattr(found, attribute, None)
    return hasattr(found, "scaling")


def _rotates(family: Family, attention: nn.Module) -> bool:
    if family.rotates is not None:
        return family.rotates(attention)
    return family.use_rope_flag is None or bool(getattr(attention, family.use_rope_flag))


def _module(family: Family, name_of_field: str, parent: nn.Module) -> nn.Module:
    """The module that the dotted name in one of the family's fields leads to from `parent`."""
    path: str = getattr(family, name_of_field)
    found: Any = parent
    for attribute in path.split(".") if path else ():
        found = getattr(found, attribute, None)
    if not isinstance(found, nn.Module):
        raise UnsupportedModelError(
            f"family for {', '.join(family.model_types)}: {name_of_field}={path!r} is no module of "
            f"{type(parent).__name__}; its modules are {', '.join(name for name, _ in parent.named_children())}"
        )
    return found


def _shown(value: object) -> str:
    """A value for a message: itself when short, otherwise its type."""
    text = repr(value)
    return text if len(text) <= 80 else f"<{type(value).__name__}>"
