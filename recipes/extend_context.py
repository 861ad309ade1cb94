"""Extends the context of a causal language model: starts `hf_posenc.recipes.extend_context` from a checkout, for `accelerate launch recipes/extend_context.py`."""

from hf_posenc.recipes import program
from hf_posenc.recipes.extend_context import main

if __name__ == "__main__":
    program.start(main)
