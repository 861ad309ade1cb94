"""Trains small decoders from scratch, one for each scheme: starts `hf_posenc.recipes.pretrain` from a checkout, for `accelerate launch recipes/pretrain.py`."""

from hf_posenc.recipes import program
from hf_posenc.recipes.pretrain import main

if __name__ == "__main__":
    program.start(main)
