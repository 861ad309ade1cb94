"""Patched checkpoints in other engines, as plugins of these."""
