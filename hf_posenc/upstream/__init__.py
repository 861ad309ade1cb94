"""The rooms of the package that know transformers' internals: attention, masks and rotary modules."""

from typing import Any

Arguments = dict[str, Any]
"""Arguments of a forward, by name."""

NAME = "hf_posenc"
"""Name of our attention and mask function."""

POSITION_IDS = "posenc_position_ids"
"""Argument by which a decoder's position ids reach layers and attention where a family does not hand them down."""
