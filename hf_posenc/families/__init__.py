"""The families of architectures that can be patched. Importing this package registers them."""

from ..registry import register_family
from . import gpt2, opt, table, unpositioned
from .base import Family, Resolved, resolve

__all__ = ["Family", "Resolved", "resolve"]

for _family in (gpt2.FAMILY, opt.FAMILY, *table.FAMILIES, *unpositioned.FAMILIES):
    register_family(_family)
