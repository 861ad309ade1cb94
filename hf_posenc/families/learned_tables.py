"""Families whose positions are vectors from a table, added at the input: learned vectors, and XGLM's sinusoids."""

from dataclasses import replace

from torch import Tensor

from .base import NO_ROTARY, Family, Names
from .gguf_blocks import GPT2_BLOCK
from .own_attention import DroppingAttention, Heads, OwnAttention, Stock, split_fused

# In cross attention a key has no distance from the query.
_CROSS_ATTENTION = {
    "add_cross_attention": "positions of encoder states relative to decoder states are not defined; "
    "only decoder-only models can be patched"
}


class _Gpt2(DroppingAttention):
    output_projection = "c_proj"

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        shape = (*hidden_states.shape[:-1], attention.num_heads, attention.head_dim)
        fused = attention.c_attn(hidden_states).split(attention.split_size, dim=2)
        query, key, value = (each.view(shape).transpose(1, 2) for each in fused)
        return query, key, value


class _GptBigcode(_Gpt2):
    cache = "layer_past"
    positions_in_mask = True

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        """Return the heads of the fused projection: all queries, one key, one value; or head by head without MQA."""
        fused = attention.c_attn(hidden_states)
        if not attention.multi_query:
            return split_fused(fused, attention.num_heads, attention.head_dim)
        heads = fused.view(*fused.shape[:-1], attention.num_heads + 2, attention.head_dim).transpose(1, 2)
        query, key, value = heads.split((attention.num_heads, 1, 1), dim=1)
        return query, key, value

    def dropout(self, attention: Stock) -> float:
        return attention.attn_dropout


class _GptNeo(DroppingAttention):
    bypasses_interface = True
    cache = "layer_past"
    positions_in_mask = True

    def scaling(self, attention: Stock) -> float:
        return 1.0

    def window(self, attention: Stock) -> int | None:
        return attention.config.window_size if attention.attention_type == "local" else None


class _OpenaiGpt(DroppingAttention):
    bypasses_interface = True
    output_projection = "c_proj"
    positions_in_mask = True
    mask_as_bool = True

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        fused = attention.c_attn(hidden_states).split(attention.split_size, dim=2)
        query, key, value = (each.unflatten(-1, (attention.n_head, -1)).transpose(1, 2) for each in fused)
        return query, key, value

    def scaling(self, attention: Stock) -> float:
        return (attention.split_size // attention.n_head) ** -0.5 if attention.scale else 1.0

    def outputs(self, attention: Stock, output: Tensor, weights: Tensor | None) -> object:
        return [output, weights]  # the layer concatenates lists


class _Opt(OwnAttention):
    query_is_scaled = True


class _Xglm(_Opt):
    bypasses_interface = True
    positions_in_mask = True
    positions = "sinusoids at the input"


_NAMES = Names(position_table="embed_positions")
_GPT2_NAMES = Names(layers="h", attention="attn", token_embedding="wte", position_table="wpe")

FAMILIES = (
    Family(
        model_types=("gpt2",),
        names=_GPT2_NAMES,
        rotation=NO_ROTARY,
        attention=_Gpt2(),
        gguf=GPT2_BLOCK,
        refuse={
            # This code path adds the mask as a float bias and never calls the attention interface.
            "reorder_and_upcast_attn": "this path bypasses the attention interface, so a scheme would be ignored; "
            "set it to False (only the numerical precision of the scores differs)",
            **_CROSS_ATTENTION,
        },
    ),
    # SantaCoder and StarCoder. In most of them all query heads share one key and one value.
    Family(
        model_types=("gpt_bigcode",),
        names=replace(_GPT2_NAMES, attention_key_value_heads="kv_heads"),
        rotation=NO_ROTARY,
        attention=_GptBigcode(),
        refuse=_CROSS_ATTENTION,
        sized_by_length=True,  # the decoder has a square causal mask
    ),
    # GPT-Neo does not scale scores, and every second layer makes its own sliding window.
    Family(
        model_types=("gpt_neo",),
        names=replace(_GPT2_NAMES, attention="attn.attention", attention_layer_index="layer_id"),
        rotation=NO_ROTARY,
        attention=_GptNeo(),
        sized_by_length=True,  # each layer has a square causal mask
    ),
    # The first GPT. It has no cache.
    Family(
        model_types=("openai-gpt",),
        keeps_no_numbers="has no cache",
        names=replace(
            _GPT2_NAMES,
            token_embedding="tokens_embed",
            position_table="positions_embed",
            attention_head_dim=None,
            attention_layer_index=None,
        ),
        rotation=NO_ROTARY,
        attention=_OpenaiGpt(),
        sized_by_length=True,  # each layer has a square causal mask
        joins_documents=True,
        note="no cache; for texts longer than its own length you must pass `position_ids`",
    ),
    # OPTForCausalLM.model is an OPTModel, whose only child is the decoder. As in fairseq, position p reads row p + 2 of
    # the table, and padding (position -1) reads row 1.
    Family(
        model_types=("opt",),
        names=replace(_NAMES, decoder="decoder"),
        rotation=NO_ROTARY,
        attention=_Opt(),
        table_offset=2,
        joins_documents=True,
    ),
    Family(
        model_types=("biogpt",),
        names=_NAMES,
        rotation=NO_ROTARY,
        attention=OwnAttention(),
        table_offset=2,
        joins_documents=True,
    ),
    Family(
        model_types=("xglm",),
        names=_NAMES,
        rotation=NO_ROTARY,
        attention=_Xglm(),
        refuse=_CROSS_ATTENTION,
        sized_by_length=True,  # the table of sinusoids
        joins_documents=True,
    ),
)
