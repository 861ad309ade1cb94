"""The families of architectures that can be patched. Importing this package registers them."""

from ..core.registry import register_family, register_refusals
from . import own_code, refused, table
from .base import Family, Names, RotationFacts
from .own_attention import OwnAttention

__all__ = ["Family", "Names", "OwnAttention", "RotationFacts"]

for _file in (own_code, table):
    for _family in _file.FAMILIES:
        register_family(_family)
register_refusals(refused.REFUSED)
