"""BioGPT: learned positions with two spare rows."""

from . import heads
from .base import Family

FAMILY = Family(
    model_types=("biogpt",),
    rotary=None,
    position_table="embed_positions",
    table_offset=2,
    split_heads=heads.split,
    merge_heads=heads.merge,
    attention_dropout=heads.dropout,
)
