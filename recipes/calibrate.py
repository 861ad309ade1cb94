"""Calibrates a swap, and no more: starts `hf_posenc.recipes.calibrate` from a checkout."""

from hf_posenc.recipes import program
from hf_posenc.recipes.calibrate import main

if __name__ == "__main__":
    program.start(main)
