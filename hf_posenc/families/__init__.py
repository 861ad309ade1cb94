"""The families of architectures that can be patched. Importing this package registers them."""

from ..registry import register_family, register_refusal
from . import alibi_bases, biogpt, falcon, gpt2, gpt_bigcode, gpt_neo, gptj, opt, refused, table, unpositioned
from .base import Family, Resolved, resolve

__all__ = ["Family", "Resolved", "resolve"]

_FILES = (gpt2.FAMILY, opt.FAMILY, biogpt.FAMILY, gpt_bigcode.FAMILY, gpt_neo.FAMILY, falcon.FAMILY)

for _family in (*_FILES, *gptj.FAMILIES, *alibi_bases.FAMILIES, *unpositioned.FAMILIES, *table.FAMILIES):
    register_family(_family)
for _refusal in refused.REFUSALS:
    register_refusal(_refusal)
