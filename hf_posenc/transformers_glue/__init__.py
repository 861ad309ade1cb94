"""Code that depends on transformers' internals: attention, masks and rotary modules."""

from typing import Any

Arguments = dict[str, Any]
"""Arguments of a forward, by name."""

NAME = "hf_posenc"
"""Name under which transformers finds our attention function and our mask function."""

QUERY_NUMBERS = "posenc_query_numbers"
"""Argument that carries the numbers of the queries from a pre-hook of an attention to our attention function."""

POSITION_IDS = "posenc_position_ids"
"""Argument that carries position ids to layers and attention, in families that do not hand them on themselves."""
