"""OPT: learned positions with two spare rows, queries scaled before the attention function."""

from . import heads
from .base import Family

FAMILY = Family(
    model_types=("opt",),
    note="documents packed into one row see each other",
    # OPTForCausalLM.model is an OPTModel, whose only child is the decoder.
    decoder="decoder",
    rotary=None,
    position_table="embed_positions",
    # Rows 0 and 1 are left over from fairseq; position p reads row p + 2, and padding (position -1) reads row 1.
    table_offset=2,
    query_is_scaled=True,
    split_heads=heads.split_scaled,
    merge_heads=heads.merge,
    attention_dropout=heads.dropout,
)
