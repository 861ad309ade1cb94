"""Measures a checkpoint: starts `hf_posenc.recipes.evaluate` from a checkout, for `accelerate launch recipes/evaluate.py`."""

from hf_posenc.recipes import program
from hf_posenc.recipes.evaluate import main

if __name__ == "__main__":
    program.start(main)
