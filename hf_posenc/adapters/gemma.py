"""Gemma: LLaMA with wide heads; token embeddings are scaled by `sqrt(E)` inside the embedding module."""

from .base import Adapter

ADAPTER = Adapter(
    model_types=("gemma",),
    refuse={
        # Encoder use (EmbeddingGemma): keys after the query are visible, their distances are negative.
        "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False",
    },
)
