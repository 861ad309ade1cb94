"""Gemma 2: soft-capped scores, `scaling` from `query_pre_attn_scalar`, every other layer with a sliding window."""

from .base import Adapter

ADAPTER = Adapter(
    model_types=("gemma2",),
    refuse={
        # Encoder use (EmbeddingGemma): keys after the query are visible, their distances are negative.
        "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False",
    },
)
