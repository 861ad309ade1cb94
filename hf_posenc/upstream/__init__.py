"""The rooms of the package that know transformers' internals: attention, masks and rotary modules."""

NAME = "hf_posenc"
"""Name of our attention and mask function."""
