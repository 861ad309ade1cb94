"""Facts about a model family: names of modules, rotation, what to refuse. `resolve` looks the names up in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, cast

from torch import nn

from ..core.errors import UnsupportedModelError
from ..core.registry import family_for, reason_against
from .gguf_blocks import GgufBlock
from .own_attention import OwnAttention
from .refused import DECODER_HALF, missing_release


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of a family's modules and attributes. The defaults are LLaMA's.

    Fields that begin with `attention_` hold names of attributes of the attention module, and those with `config_`
    attributes of the config. All other fields hold dotted paths to modules.

    Attributes:
        decoder: path from the base model (`model.base_model`) to the module that owns the layers. `""` means the base
            model itself. A model without a head that has the layers itself ignores this path.
        layers: path from the decoder to the `nn.ModuleList` of decoder layers.
        attention: path from a layer to its self-attention module.
        token_embedding: path from the decoder to the token embedding.
        position_table: path from the decoder to the native table of positions, as a rule an `nn.Embedding`. `None`
            means that the family has no table.
        attention_head_dim: head size of queries and keys; `None` means the hidden size divided by the heads.
        attention_value_dim: head size of values; `None` means that of queries.
        attention_heads: number of query heads, where it differs by layer; `None` means the config's.
        attention_key_value_heads: number of key heads; `None` means the config's.
        attention_key_value_groups: number of query heads per key head, where the number of key heads differs by layer.
            `None` means that it does not differ.
        attention_borrows: true in a layer that borrows keys and values from an earlier layer: the last layer of its
            type that computes them. `None` means that no layer borrows.
        layer_lends: argument of a layer that carries keys and values to the layers that borrow them.
        attention_norms: modules that norm queries, by any name that families use; an attention has at most one of them.
        attention_layer_index: index of the layer; `None` in a family without a cache, where nothing reads it.
        config_length: length in tokens at which the base was trained. A config may lack it.
    """

    decoder: str = ""
    layers: str = "layers"
    attention: str = "self_attn"
    token_embedding: str = "embed_tokens"
    position_table: str | None = None
    attention_head_dim: str | None = "head_dim"
    attention_value_dim: str | None = None
    attention_heads: str | None = None
    attention_key_value_heads: str | None = None
    attention_key_value_groups: str | None = None
    attention_borrows: str | None = None
    layer_lends: str | None = None
    attention_norms: tuple[str, ...] = ("q_norm", "q_layernorm", "query_layernorm", "qk_norm")
    attention_layer_index: str | None = "layer_idx"
    config_length: str = "max_position_embeddings"


KEYS_OF_4 = {key: key for key in ("rope_theta", "partial_rotary_factor", "rope_scaling")}
"""`RotationFacts.keys_of_4` of most model types."""


@dataclass(frozen=True, kw_only=True)
class RotationFacts:
    """How a base rotates queries and keys. The defaults are LLaMA's.

    Fields that begin with `attention_` hold names of attributes of the attention module, those with `config_`
    attributes of the config, and those with `parameter_` keys of the config's `rope_parameters`.

    Attributes:
        rotary: path from the decoder to the module that makes cos and sin for all layers. `None` means that there is no
            such module: the base rotates nothing, or the attention's own code rotates.
        pairs: which dimensions of a head are rotated together: `half`, `(u, u + R/2)`, or `interleaved`,
            `(2u, 2u + 1)`.
        config_interleaved: if the config has it true, neighbouring dimensions are rotated together, whatever `pairs`
            says.
        backwards: pairs turn by minus their angles.
        lists_halves: where `pairs` are interleaved, the attention lists the first dimensions of all pairs before the
            second ones, also where the angles are 0.
        norms_after: what the attention does to queries and keys after their rotation, if that depends on the angles.
            `None` means nothing.
        angles: what the rotary module returns for the angles `a, b, ...` of the pairs: `list twice`, cosines and sines
            `[a, b, ..., a, b, ...]`; `each twice`, `[a, a, b, b, ...]`; `once`, `[a, b, ...]`; `complex`, one tensor
            `[e^ia, e^ib, ...]`.
        slices_rotary: the attention rotates the first `cos.shape[-1]` dimensions of a head, so that a narrower cos
            rotates a part. Otherwise cos must be as wide as the attention expects.
        attention_size: number of rotated dimensions of a head, where the attention slices by this number instead of the
            width of cos.
        attention_part: size of the part of a head that is set apart for rotation (latent attention, MLA). `None` means
            that rotation begins at the first dimension of a head.
        attention_switch: truthy in layers that rotate. `None` means that all layers rotate, or that `rotates` decides.
        config_switches: list with one number per layer, 1 where the layer rotates. It goes with `attention_switch`.
        config_thetas: list with the base of frequencies of each layer, 0 where the layer does not rotate. The decoder
            then makes cosines and sines from this list, not by `rotary`.
        rotates: function (attention) -> whether its layer rotates, where the family's code decides.
        config_layers: lists the layers that `rotary` serves. A model with other layers, which another module serves, is
            refused. `None` means that it serves all.
        parameter_coordinates: divides the pairs of a head among the coordinates of a position. Position ids are then
            (3, B, T), or (4, B, T) with those of the text first. `None` means that a position is one number.
        parameter_temperature: keys of a factor on queries that grows with the position. The first key is the strength
            of the factor; 0 means no factor.
        parameter_rescales: keys of a factor by which the constructor of an attention multiplies `scaling`. Without the
            first key there is no factor.
        parameter_magnitudes: factors on cosines and sines that `rotary` reads in place of transformers' own.
        parameter_frequencies: what `rotary` itself computes frequencies from, under a `rope_type` of transformers.
        attention_temperature: attribute of an attention with such a factor -> the value that switches the factor off.
        config_temperature: the same for a factor of layers without a sliding window, by attributes of the config.
        attention_bias: module that makes the base's own positions, a bias on scores. The attention hands the bias to
            transformers' attention interface as `position_bias`. `None` means that there is none.
        bias_parameters: names of the two parameters that make the bias, if it is what the scheme `inkling` computes by
            its map of hidden states and its profiles. `None` means that the base has no such bias.
        unrotated_twin: model type that computes the same and can leave layers unrotated; it may be this type. A model
            with some unrotated layers is exported as this type. `None` means that no such type exists.
        windowed_twin: model type that computes the same in a sliding window, the same in every layer. `None` means that
            no such type exists.
        wide_twin: model type that computes the same and has biases of queries and keys: with wider heads it holds a
            scheme whose scores are waves of the distance. Such a model is exported as this type if its own type cannot
            hold it. `None` means that no other type computes the same.
        keys_of_4: what a rotation consists of -> the setting in which transformers 4 reads it: `rope_theta`,
            `windowed_theta` (of layers with a sliding window), `partial_rotary_factor`, `rope_scaling`. What is not
            here transformers 4 does not know for this type.
    """

    rotary: str | None = "rotary_emb"
    pairs: Literal["half", "interleaved"] = "half"
    config_interleaved: str | None = None
    backwards: bool = False
    lists_halves: bool = False
    norms_after: str | None = None
    angles: Literal["list twice", "each twice", "once", "complex"] = "list twice"
    slices_rotary: bool = False
    attention_size: str | None = None
    attention_part: str | None = None
    attention_switch: str | None = None
    config_switches: str | None = None
    config_thetas: str | None = None
    rotates: Callable[[nn.Module], bool] | None = None
    config_layers: str | None = None
    parameter_coordinates: str | None = None
    parameter_temperature: tuple[str, ...] = ()
    parameter_rescales: tuple[str, ...] = ()
    parameter_magnitudes: tuple[str, ...] = ()
    parameter_frequencies: tuple[str, ...] = ()
    attention_temperature: Mapping[str, Any] = field(default_factory=dict)
    config_temperature: Mapping[str, Any] = field(default_factory=dict)
    attention_bias: str | None = None
    bias_parameters: tuple[str, str] | None = None
    unrotated_twin: str | None = None
    windowed_twin: str | None = None
    wide_twin: str | None = None
    keys_of_4: Mapping[str, str] = field(default_factory=lambda: dict(KEYS_OF_4))

    @property
    def parameters_read(self) -> frozenset[str]:
        """Keys of `rope_parameters` that the family's own code reads, beside transformers' functions."""
        fields = (self.parameter_temperature, self.parameter_rescales, self.parameter_magnitudes)
        coordinates = () if self.parameter_coordinates is None else (self.parameter_coordinates,)
        return frozenset(coordinates).union(*fields, self.parameter_frequencies)

    def kept(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return what other frequencies leave as it is: the `rope_parameters` of factors that its code computes."""
        if parameters.get("rope_type") == "default":
            return {}
        factors = (
            keys for keys in (self.parameter_rescales, self.parameter_magnitudes) if keys and parameters.get(keys[0])
        )
        return {key: parameters[key] for keys in factors for key in keys if key in parameters}


NO_ROTARY = RotationFacts(rotary=None)
"""Facts of a family without a rotary module."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a family of architectures has its layers and its positions, and which of its settings are refused.

    Nothing is guessed: `resolve` looks every name up before a model is changed.

    Attributes:
        model_types: the `config.model_type` values that the family serves.
        names: names of its modules and attributes.
        rotation: how it rotates queries and keys.
        attention: the pieces of its attention, for a family without a rotary module. `None` means that its attention
            cannot be replaced. It must then call transformers' attention interface, and schemes can rotate only through
            a rotary module.
        refuse: attribute of the config that must be absent or falsy -> the reason that a user is told.
        decoder_attributes: attribute of the decoder -> the value under which every layer sees all tokens.
        table_offset: number of rows of the native table before the row of position 0.
        hybrid: some layers have no attention. In these `names.attention` leads to no module with `scaling`.
        undivided: why its sequences cannot be divided over processes. `None` means that they can, unless it is
            `hybrid`.
        drops_position_ids: `position_ids` do not reach its attention, or its layers.
        joins_documents: documents that are packed into one row see each other in the stock model, because its masks get
            no `position_ids`. So do those of every `hybrid` family.
        sized_by_length: its modules hold a matrix or table of the config's length. The package therefore does not
            raise that length for a scheme without a limit.
        keeps_no_numbers: why numbers beside the cached keys would not reach attention. `None` means that attention gets
            the keys as they are cached. Latent attention need not say it.
        gguf: where its weights go in a GGUF file. `None` means that none can be written.
        note: a clause for the list of families: what else a user of schemes has to know.
    """

    model_types: tuple[str, ...]
    names: Names = Names()
    rotation: RotationFacts = RotationFacts()
    attention: OwnAttention | None = None
    refuse: Mapping[str, str] = field(default_factory=dict)
    decoder_attributes: Mapping[str, Any] = field(default_factory=dict)
    table_offset: int = 0
    hybrid: bool = False
    undivided: str | None = None
    drops_position_ids: bool = False
    joins_documents: bool = False
    sized_by_length: bool = False
    keeps_no_numbers: str | None = None
    gguf: GgufBlock | None = None
    note: str = ""

    @property
    def has_table(self) -> bool:
        """Whether the base adds positions from a table at the input."""
        return self.names.position_table is not None

    @property
    def always_replaced(self) -> bool:
        """Whether every scheme replaces the attention, because it never calls transformers' attention interface."""
        return self.attention is not None and self.attention.bypasses_interface

    @property
    def positions_in_mask(self) -> bool:
        """Whether `position_ids` do not reach its layers, so that the package puts them into the position channel."""
        return self.attention is not None and self.attention.positions_in_mask

    @property
    def mask_as_bool(self) -> bool:
        """Whether its decoder converts the mask to bool, or to two numbers that stand for True and False."""
        return self.attention is not None and self.attention.mask_as_bool

    @property
    def convolves_keys(self) -> bool:
        """Whether its attention convolves keys, which then hold the tokens before theirs, too."""
        return self.rotation.attention_bias is not None

    @property
    def has_latent_attention(self) -> bool:
        """Whether its layers compute keys and values of all heads from one vector per token (MLA)."""
        return self.names.attention_head_dim == "qk_head_dim"

    @property
    def loses_numbers(self) -> str | None:
        """Why numbers that are cached beside its keys would not reach attention, or None if they do."""
        if self.has_latent_attention:
            return "caches one vector for the keys of all heads (latent attention)"
        return self.keeps_no_numbers

    def own_attention(self) -> OwnAttention:
        """Return the pieces of its attention; UnsupportedModelError if it names none."""
        if self.attention is None:
            raise UnsupportedModelError(
                f"the family for {', '.join(self.model_types)} names no pieces of its attention, which therefore "
                "cannot be replaced"
            )
        return self.attention


@dataclass(frozen=True)
class Resolved:
    """The modules of one live model that a family names.

    Attributes:
        decoder: the module that owns the layers.
        layers: the decoder layers, first to last.
        attention_of: layer index -> its self-attention module, in order, for the layers that have one.
        token_embedding: the token embedding.
        rotary: the module that makes cos and sin, or `None`.
        position_table: the native table of learned positions, or `None`.
        rotated: for each layer, whether the base rotates its queries and keys.
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


def language_config(config: Any) -> Any:
    """Return the config of the language model inside a multimodal model's config; any other config as it is.

    One that lies deeper belongs to a part that is a multimodal model of its own.
    """
    if config.is_encoder_decoder:
        return config
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # it has several language models
        return config
    return text if any(part is text for part in vars(config).values()) else config


def base_model_type(config: Any) -> str:
    """Return the stock model type of a config, also for a config class of this package (`posenc_gpt2` -> `gpt2`).

    For a multimodal model it is the type of the language model inside. The class of the config tells the type: the
    attribute may come from a file, with another name of the same type (`gpt-sw3`).
    """
    config = language_config(config)
    return str(type(config).model_type or config.model_type).removeprefix("posenc_")


def family_of(config: Any) -> Family:
    """Return the family that serves the models of a config, or the language model inside them.

    Args:
        config: stock or ours. Checkpoints of one multimodal type may have different language models inside.

    Raises:
        UnsupportedModelError: if no family does.
    """
    model_type, inside = str(type(config).model_type).removeprefix("posenc_"), base_model_type(config)
    try:
        return family_for(inside)
    except UnsupportedModelError as error:
        if reason_against(model_type) is not None or (inside == model_type and not config.is_encoder_decoder):
            raise
        half = f"it is an encoder-decoder, {DECODER_HALF.partition(', ')[2]}"
        reason = half if config.is_encoder_decoder else f"of the language model inside it is said: {error}"
        raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}") from None


def resolve(family: Family, model: nn.Module) -> Resolved:
    """Look up everything that a family names in a live model, and change nothing.

    Args:
        family: the family of the model's type.
        model: a transformers model, with or without a head.

    Returns:
        The modules.

    Raises:
        UnsupportedModelError: if the config has a setting that the family refuses, or a name leads nowhere. The message
            then has the family's field, the dotted path, and the class of the module where the path starts.
    """
    _check_config(family, model)
    names, path = family.names, family.rotation.rotary
    decoder = decoder_of(family, model)
    module_list: Any = _module(family, "layers", names.layers, decoder)
    layers = [getattr(layer, "_orig_mod", layer) for layer in module_list]  # hooks belong inside torch.compile(layer)
    attentions = {
        index: _module(family, "attention", names.attention, layer)
        for index, layer in enumerate(layers)
        if not family.hybrid or hasattr(_follow(names.attention, layer), "scaling")
    }
    if not attentions:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be patched: none of its layers has attention")
    for attention in attentions.values():
        _check_attributes(family, attention)
    # Some families set the attribute to None in models that rotate nothing.
    is_unset = path is None or getattr(decoder, path, decoder) is None
    rotary = None if is_unset else _module(family, "rotary", path, decoder)
    return Resolved(
        decoder=decoder,
        layers=layers,
        attention_of=attentions,
        token_embedding=_module(family, "token_embedding", names.token_embedding, decoder),
        rotary=rotary,
        position_table=_module(family, "position_table", names.position_table, decoder) if family.has_table else None,
        rotated=tuple(
            rotary is not None and index in attentions and _rotates(family.rotation, attentions[index])
            for index in range(len(layers))
        ),
    )


def decoder_of(family: Family, model: nn.Module) -> nn.Module:
    """Return the module that owns the layers. In some families this is the model itself if it has no head.

    Raises:
        UnsupportedModelError: if the path leads nowhere.
    """
    base: Any = model.base_model
    owns_layers = base is model and hasattr(base, family.names.layers)
    return model if owns_layers else _module(family, "decoder", family.names.decoder, base)


def _check_config(family: Family, model: Any) -> None:
    """Raise UnsupportedModelError if the config has a setting that the family refuses."""
    model_type = base_model_type(model.config)
    if (release := missing_release(model_type)) is not None:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be patched with this release: install transformers {release} or newer"
        )
    refused = {setting: reason for setting, reason in family.refuse.items() if getattr(model.config, setting, None)}
    served = family.rotation.config_layers
    if served is not None and set(getattr(model.config, served)) != set(range(model.config.num_hidden_layers)):
        refused[served] = "the other layers take their angles from a rotary module of their own"
    # With is_causal=False transformers makes bidirectional masks, which turns any decoder into an encoder.
    if not getattr(model.config, "is_causal", True):
        refused["is_causal"] = "every scheme is defined for keys at or before the query; set it to True"
    for setting, reason in refused.items():
        value = f"{getattr(model.config, setting)!r:.80}"
        raise UnsupportedModelError(f"{type(model).__name__} cannot be patched: config.{setting} = {value}; {reason}")


def _check_attributes(family: Family, attention: nn.Module) -> None:
    """Raise UnsupportedModelError if an attention module lacks an attribute that the family names."""
    facts = {**vars(family.names), **vars(family.rotation)}
    named = [name for field, name in facts.items() if field.startswith("attention_") and isinstance(name, str)]
    scaling = () if family.always_replaced else ("scaling",)
    for attribute in (*scaling, *named, *family.rotation.attention_temperature):
        if not hasattr(attention, attribute):
            raise UnsupportedModelError(
                f"family for {', '.join(family.model_types)}: attention={family.names.attention!r} is a "
                f"{type(attention).__name__}, which has no attribute {attribute!r}"
            )


def _rotates(rotation: RotationFacts, attention: nn.Module) -> bool:
    """Return whether a base rotates in the layer of this attention."""
    if rotation.rotates is not None:
        return rotation.rotates(attention)
    return rotation.attention_switch is None or bool(getattr(attention, rotation.attention_switch))


def _follow(path: str | None, parent: nn.Module) -> object:
    """Return the object at a dotted path from a module, or `None` if the path leads nowhere."""
    names = path.split(".") if path else []
    return reduce(lambda current, name: getattr(current, name, None), names, cast(Any, parent))


def _module(family: Family, name_of_field: str, path: str | None, parent: nn.Module) -> nn.Module:
    """Return the module at a dotted path; UnsupportedModelError names the family's field that holds the path."""
    found = _follow(path, parent)
    if not isinstance(found, nn.Module):
        raise UnsupportedModelError(
            f"family for {', '.join(family.model_types)}: {name_of_field}={path!r} is no module of "
            f"{type(parent).__name__}; its modules are {', '.join(name for name, _ in parent.named_children())}"
        )
    return found
