"""Gemma 3, text: the rotary module has frequencies per layer type and is called once for each, with its name."""

from .base import Adapter

ADAPTER = Adapter(
    # "gemma3" is the multimodal model; it is listed so that a user is told why it is refused.
    model_types=("gemma3_text", "gemma3"),
    refuse={
        "vision_config": "image tokens see each other in both directions, and every scheme is defined for keys at or "
        "before the query; copy its language model into a Gemma3ForCausalLM(config.text_config) and patch that "
        "(Gemma3ForCausalLM.from_pretrained would not find the weights in this checkpoint)",
        # Encoder use (EmbeddingGemma): keys after the query are visible, their distances are negative.
        "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False",
    },
)
