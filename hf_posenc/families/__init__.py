"""The families of architectures that can be patched. Importing this package registers them."""

from ..registry import register_family, register_refusal
from . import learned_tables, own_code, refused, table, unpositioned
from .base import Family, Names, RotationFacts
from .own_attention import OwnAttention

__all__ = ["Family", "Names", "OwnAttention", "RotationFacts"]

for _file in (learned_tables, own_code, unpositioned, table):
    for _family in _file.FAMILIES:
        register_family(_family)
for _refusal in refused.REFUSALS:
    register_refusal(_refusal)
