"""XGLM: sinusoids at the input, queries scaled before their product with keys."""

from . import heads
from .base import Family

FAMILY = Family(
    model_types=("xglm",),
    rotary=None,
    position_table="embed_positions",
    own_positions="sinusoids at the input",
    query_is_scaled=True,
    refuse={
        # The keys of cross attention have no position relative to the query.
        "add_cross_attention": "positions of encoder states relative to decoder states are not defined; "
        "only decoder-only models can be patched",
    },
    split_heads=heads.split_scaled,
    merge_heads=heads.merge,
    attention_dropout=heads.dropout,
    bypasses_interface=True,
    without_positions=heads.as_they_are,
    sized_by_length=True,  # the table of sinusoids
    positions_in_mask=True,
)
