"""Families that are data alone: one row each. A family that brings code of its own has a file beside this one."""

from .base import Family

_ENCODER_USE = {
    # EmbeddingGemma: keys after the query are visible, their distances are negative.
    "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False",
}

FAMILIES = (
    # The plain rotary decoder; every field has its default. Its layers and those of SmolLM3 compute the same, and
    # SmolLM3 can leave some of them unrotated.
    Family(model_types=("llama",), unrotated_twin="smollm3"),
    Family(model_types=("mistral",)),
    Family(model_types=("qwen2",)),
    # Queries and keys are normalised per head before they are rotated.
    Family(model_types=("qwen3",)),
    # Norms after the sub-layers; queries and keys are normalised over all heads at once before rotation.
    Family(model_types=("olmo2",)),
    Family(model_types=("starcoder2",)),
    # Every fourth layer is left unrotated as a rule (`config.no_rope_layers`: 1 means rotated).
    Family(
        model_types=("smollm3",),
        unrotated_twin="smollm3",
        use_rope_flag="use_rope",
        rotated_layers="no_rope_layers",
    ),
    # Wide heads; the decoder scales the token embeddings by sqrt(E).
    Family(model_types=("gemma",), refuse=_ENCODER_USE),
    # Soft-capped scores, `scaling` from `query_pre_attn_scalar`, every other layer with a sliding window.
    Family(model_types=("gemma2",), refuse=_ENCODER_USE),
    # The rotary module has frequencies per layer type and is called once for each, with its name. "gemma3" is the
    # multimodal model; it is listed so that a user is told why it is refused.
    Family(
        model_types=("gemma3_text", "gemma3"),
        refuse={
            "vision_config": "image tokens see each other in both directions, and every scheme is defined for keys at "
            "or before the query; copy its language model into a Gemma3ForCausalLM(config.text_config) and patch that "
            "(Gemma3ForCausalLM.from_pretrained would not find the weights in this checkpoint)",
            **_ENCODER_USE,
        },
    ),
    # Partial rotation, sliced by each attention's own number and not by the width of cos; one norm feeds attention and
    # MLP in parallel.
    Family(model_types=("phi",), slices_rotary=True, rotary_size="rotary_ndims"),
    # Fused projections, partial rotation, and LongRoPE, whose factors change with the length: `generate` drops the
    # cache when it crosses `config.original_max_position_embeddings`, since keys that were rotated by the short factors
    # are useless from there on.
    Family(model_types=("phi3",), slices_rotary=True),
    # GPT-NeoX and Pythia: partial rotation; layers take the cache as `layer_past`.
    Family(model_types=("gpt_neox",), attention="attention", token_embedding="embed_in", slices_rotary=True),
)
