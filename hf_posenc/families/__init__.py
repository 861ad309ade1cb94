"""The families of architectures that can be patched. Importing this package registers them."""

from ..registry import register_family, register_refusal
from . import (
    alibi_bases,
    biogpt,
    falcon,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox_japanese,
    gptj,
    opt,
    refused,
    table,
    unpositioned,
    xglm,
)
from .base import Family, Resolved, resolve

__all__ = ["Family", "Resolved", "resolve"]

_FILES = (gpt2, opt, biogpt, gpt_bigcode, gpt_neo, falcon, gpt_neox_japanese, xglm)

_SEVERAL = (gptj, alibi_bases, unpositioned, table)

for _family in (*(file.FAMILY for file in _FILES), *(family for file in _SEVERAL for family in file.FAMILIES)):
    register_family(_family)
for _refusal in refused.REFUSALS:
    register_refusal(_refusal)
